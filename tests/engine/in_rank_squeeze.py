"""What the ranks of ``test_squeeze.py`` run: trainings whose gradients and parameters are compressed."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from models import Mixed, seeded, tokens
from torch.nn import functional as F

from tonnage.engine import DataParallel

_ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def trained(schedule: str, compress: str | None, steps: int) -> dict[str, Any]:
    """Losses, a hash of the parameters, and the bytes that the ledger has for one step."""
    model, optimizer = _make(seeded(Mixed), schedule, compress)
    losses = [_step(model, optimizer, step) for step in range(steps)]
    ledger = model.ledger()
    result: dict[str, Any] = {"losses": losses, "bits": _bits(model.module)}
    if ledger is not None:
        frame = ledger.filter(step=steps - 1, rank=0).movements.frame
        result |= {
            "wire": frame["wire_nbytes"].sum(),
            "plain": 2 * (dist.get_world_size() - 1) * frame["nbytes"].sum() / dist.get_world_size(),
            "legs": frame.height,
            "facts": ledger.facts.get("compress"),
        }
    model.close()
    return result


def resumed(schedule: str, compress: str) -> tuple[str, str]:
    """Parameters after six steps without a break, and with one after three."""
    model, optimizer = _make(seeded(Mixed), schedule, compress)
    saved: Any = None
    for step in range(6):
        _step(model, optimizer, step)
        if step == 2:
            saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
    model.wait()
    unbroken = _bits(model.module)
    model.close()
    bare = seeded(Mixed, seed=3)
    bare.load_state_dict(saved[0])
    model, optimizer = _make(bare, schedule, compress)
    optimizer.load_state_dict(saved[1])
    for step in range(3, 6):
        _step(model, optimizer, step)
    model.wait()
    broken = _bits(model.module)
    model.close()
    return unbroken, broken


def loaded(schedule: str, compress: str) -> tuple[float, str]:
    """Load parameters in mid-training: how far they are from what was loaded after a step of rate 0."""
    model, optimizer = _make(seeded(Mixed), schedule, compress)
    for step in range(2):
        _step(model, optimizer, step)
    other = seeded(Mixed, seed=5).state_dict()
    model.module.load_state_dict(other)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    _step(model, optimizer, 2)
    model.wait()
    now = model.module.state_dict()
    far = max((now[name] - value).abs().max().item() for name, value in other.items())
    bits = _bits(model.module)
    model.close()
    return far, bits


def refused(schedule: str, compress: str) -> None:
    """The error is the result."""
    _make(seeded(Mixed), schedule, compress)


def _make(plain: Any, schedule: str, compress: str | None) -> tuple[Any, Any]:
    model = DataParallel(plain, schedule=schedule, bucket=1500, compress=compress)
    return model, model.optimizer(torch.optim.AdamW, **_ADAMW)


def _step(model: Any, optimizer: Any, step: int) -> float:
    x = tokens(21, dist.get_rank(), step, batch=16)
    loss = F.cross_entropy(model(x), (x * 5 + 3) % 16)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _bits(module: Any) -> str:
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()
