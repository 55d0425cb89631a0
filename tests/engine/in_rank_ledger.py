"""What the ranks of ``test_ledger.py`` run."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from models import features, perceptron, seeded

from tonnage.engine import DataParallel
from tonnage.ledger import to_bytes


def recorded(schedule: str, steps: int, delay: float) -> tuple[bytes | None, list[tuple[str, int]], int]:
    """Rank 0's ledger of all ranks, each bucket's label and bytes, and the model's bytes."""
    plain = seeded(lambda: perceptron(4, 96))
    for parameter in plain.parameters():
        parameter.register_hook(lambda gradient: time.sleep(delay))
    model = DataParallel(plain, schedule=schedule, bucket=10_000)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    for step in range(steps):
        model(features(30, dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ledger = model.ledger({"run": "mine"})
    buckets: Any = model._buckets
    sizes = [(bucket.label, bucket.nbytes) for bucket in buckets]
    model.close()
    nbytes = sum(p.nbytes for p in plain.parameters())
    return None if ledger is None else to_bytes(ledger), sizes, nbytes
