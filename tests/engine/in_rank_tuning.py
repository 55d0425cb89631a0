"""What the ranks of ``test_tuning.py`` run."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from models import Mixed, seeded, tokens
from torch import nn
from torch.nn import functional as F

from tonnage.engine import DataParallel
from tonnage.engine.bucket import sending_order
from tonnage.engine.tune import OBSERVED, WARMUP

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}


def cut_anew(
    schedule: str, optimizer: str, seed: int, changes: dict[int, str | None], accumulate: int = 1
) -> tuple[str, str]:
    """Parameters after a training in fixed buckets, and after one that moves to others in between."""
    return (
        _trained(schedule, optimizer, seed, {}, accumulate),
        _trained(schedule, optimizer, seed, changes, accumulate),
    )


def moved_between_codecs(schedule: str, seed: int, changes: dict[int, str | None]) -> tuple[str, float]:
    """Parameters and last loss of a training that changes its compression."""
    losses: list[float] = []
    return _trained(schedule, "AdamW", seed, changes, 1, losses), sum(losses[-3:]) / 3


def tuned(schedule: str, steps: int, compress: str | None) -> dict[str, Any]:
    """What a training that tunes itself has in its ledger, and its parameters beside one in fixed buckets."""
    bits, facts = [], {}
    for bucket in ("auto", 700):
        model, optimizer = _make(schedule, "AdamW", bucket, compress if bucket == "auto" else None)
        for step in range(steps):
            _step(model, optimizer, step, 1)
        ledger = model.ledger()
        if ledger is not None and bucket == "auto":
            facts = dict(ledger.facts)
        bits.append(_bits(model.module))
        model.close()
    return {"bits": bits, "tuning": facts.get("tuning"), "world_size": dist.get_world_size()}


def waited_for() -> list[str]:
    """What is warned of when rank 1 is late in every step after the tuning."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, keep = logging.getLogger("tonnage"), Keep()
    logger.addHandler(keep)
    model, optimizer = _make("shard", "AdamW", "auto", None)
    for step in range(30):
        if dist.get_rank() and step > WARMUP + OBSERVED:
            time.sleep(0.05)
        _step(model, optimizer, step, 1)
    model.close()
    logger.removeHandler(keep)
    return said


def _trained(
    schedule: str,
    optimizer: str,
    seed: int,
    changes: dict[int, str | None],
    accumulate: int,
    losses: list[float] | None = None,
) -> str:
    model, stepped = _make(schedule, optimizer, 700, None)
    chance = random.Random(seed)
    for step in range(12):
        if step in changes:
            model.drain()
            model._transport.clear_buckets()
            model._lay_out(_boundaries(model, chance), changes[step])
        loss = _step(model, stepped, step, accumulate)
        if losses is not None:
            losses.append(loss)
    model.wait()
    found = _bits(model.module)
    model.close()
    return found


def _boundaries(model: DataParallel, chance: random.Random) -> tuple[int, ...]:
    count = len(sending_order(model._specs))
    inner = sorted(chance.sample(range(1, count), chance.randint(0, count - 1)))
    return (*inner, count)


def _make(
    schedule: str, optimizer: str, bucket: int | str, compress: str | None
) -> tuple[DataParallel, torch.optim.Optimizer]:
    kind, settings = _OPTIMIZERS[optimizer]
    model = DataParallel(seeded(Mixed), schedule=schedule, bucket=bucket, compress=compress)
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return model, model.optimizer(
        kind, [{"params": decayed, "lr": 2e-2}, {"params": others, "weight_decay": 0.0}], **settings
    )


def _step(model: DataParallel, optimizer: torch.optim.Optimizer, step: int, accumulate: int) -> float:
    rank = dist.get_rank()
    for part in range(accumulate - 1):
        with model.no_sync():
            x = tokens(part + 7, rank, step)
            _loss(model, x).backward()
    x = tokens(1, rank, step)
    loss = _loss(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    return loss.item()


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), (x * 5 + 3) % 16)


def _bits(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
