"""What the ranks of ``test_checkpoint.py`` run: save in mid-training, and go on from it."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import OPTIMIZERS, Mixed, seeded, tokens
from torch import nn
from torch.nn import functional as F

from tonnage.engine import DataParallel
from tonnage.engine.checkpoint import load_checkpoint, save_checkpoint

SAVED_AFTER = 3


class Dropping(nn.Module):
    """As the mixed model, with random numbers in each pass, a scalar parameter and channels-last filters."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = Mixed()
        self.mixed.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * F.dropout(self.mixed(x), 0.2) * random.uniform(0.9, 1.1)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _make(setting: dict[str, Any], seed: int = 0) -> tuple[DataParallel, Any]:
    """A model and its optimizer, with two groups of parameters."""
    name = setting.get("optimizer", "AdamW")
    kind, settings = OPTIMIZERS[name]
    model = DataParallel(seeded(Dropping, seed), **setting["engine"])
    decayed = [p for p in model.module.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.module.parameters() if p.requires_grad and p.dim() <= 1]
    return model, model.optimizer(kind, [{"params": decayed}, {"params": others, "lr": 0.02}], **settings)


def _train(model: DataParallel, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        batch = tokens(21, _rank(), step)
        F.cross_entropy(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 2)
    model.wait()


def digest(value: Any) -> str:
    """Of nested tensors and numbers, bit for bit."""
    found = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, dict):
            for key in sorted(each, key=str):
                found.update(str(key).encode())
                add(each[key])
        elif isinstance(each, list | tuple):
            for item in each:
                add(item)
        elif isinstance(each, torch.Tensor):
            found.update(f"{each.dtype}{tuple(each.shape)}".encode())
            found.update(each.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(each).encode())

    add(value)
    return found.hexdigest()


def save(folder: str, setting: dict[str, Any]) -> tuple[str, str, str]:
    """Train, save in each way, train on; what was saved, and the parameters before and at the end."""
    torch.manual_seed(100 + _rank())
    random.seed(100 + _rank())
    model, optimizer = _make(setting)
    torch.manual_seed(100 + _rank())
    _train(model, optimizer, 0, SAVED_AFTER)
    out = Path(folder)
    torch.save(optimizer.state_dict(), out / f"part{_rank()}.pt")
    whole = optimizer.full_state_dict()
    if whole is not None:
        torch.save({"optimizer": whole, "model": model.module.state_dict()}, out / "whole.pt")
    save_checkpoint(out / "job", model, optimizer, extra={"step": SAVED_AFTER}, rank_extra=_rank())
    before = digest(model.module.state_dict())
    _train(model, optimizer, SAVED_AFTER, SAVED_AFTER + 3)
    after = digest(model.module.state_dict())
    model.close()
    return digest(whole), before, after


def load(folder: str, setting: dict[str, Any], how: str, saved_by: int) -> tuple[str, str, str, Any]:
    """Load in that way and train on; what is there then, the parameters before and after, what else came."""
    model, optimizer = _make(setting, seed=3)
    torch.manual_seed(999)
    out = Path(folder)
    extra: Any = None
    if how == "job":
        extra = load_checkpoint(out / "job", model, optimizer)
    else:
        whole = torch.load(out / "whole.pt", weights_only=True)
        parts = [torch.load(out / f"part{rank}.pt", weights_only=True) for rank in range(saved_by)]
        model.module.load_state_dict(whole["model"])
        optimizer.load_state_dict(
            parts[_rank()] if how == "part" else {"whole": whole["optimizer"], "parts": parts}[how]
        )
    state, before = digest(optimizer.full_state_dict()), digest(model.module.state_dict())
    _train(model, optimizer, SAVED_AFTER, SAVED_AFTER + 3)
    after = digest(model.module.state_dict())
    model.close()
    return state, before, after, extra


def refuse(folder: str, setting: dict[str, Any], how: str, saved_by: int) -> None:
    """Loading that is refused; the error is the result."""
    model, optimizer = _make(setting, seed=3)
    parts = [torch.load(Path(folder) / f"part{rank}.pt", weights_only=True) for rank in range(saved_by)]
    try:
        if how == "another rank's":
            optimizer.load_state_dict(parts[1 - _rank()])
        elif how == "one is there twice":
            optimizer.load_state_dict(parts[1:] * 2)
        elif how == "one part of more":
            optimizer.load_state_dict(parts[0])
        elif how == "nonsense":
            optimizer.load_state_dict({"weights": 1})
        elif how == "other groups":
            whole = torch.load(Path(folder) / "whole.pt", weights_only=True)["optimizer"]
            whole["param_groups"] = whole["param_groups"][:1]
            optimizer.load_state_dict(whole)
        elif how == "no folder":
            load_checkpoint(Path(folder) / "nothing", model, optimizer)
        elif how == "another model":
            other = DataParallel(seeded(Mixed))
            load_checkpoint(Path(folder) / "job", other, other.optimizer(torch.optim.SGD, lr=0.1))
        elif how == "damaged":
            load_checkpoint(Path(folder) / "job", model, optimizer)
        elif how == "a file in the way":
            save_checkpoint(Path(folder) / "whole.pt" / "inside", model, optimizer)
        elif how == "plain optimizer":
            save_checkpoint(Path(folder) / "x", model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        model.close()
