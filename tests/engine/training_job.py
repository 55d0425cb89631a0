"""A rank as users start it: trains until it is told to stop, and prints each step.

Usage: training_job.py HOW, with torchrun's environment. HOW is one of

    train       600 steps
    leave       as train, but rank 1 returns from the loop after step 5
    exit        20 steps, then the script just ends: no close(), no destroy_process_group()
    destroy     20 steps, then destroy_process_group()
    shaped      25 steps of a larger model; prints the ledger's and the kernel's bytes
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tonnage


def main() -> None:
    how = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    if how == "shaped":
        _shaped()
    else:
        _train(how)
    if how in ("destroy", "shaped"):
        dist.destroy_process_group()


def _train(how: str) -> None:
    schedule = os.environ.get("SCHEDULE", "shard")
    rank = dist.get_rank()
    plain = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    model = tonnage.DataParallel(plain, schedule=schedule, bucket="100kB", hang_timeout=2.0)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    for step in range(20 if how in ("exit", "destroy") else 100_000):
        if how == "leave" and rank == 1 and step == 5:
            return
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}", flush=True)


def _shaped() -> None:
    plain = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)), nn.Linear(1024, 100))
    model = tonnage.DataParallel(plain)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-4)
    dist.barrier()
    before = _sent()
    for _ in range(25):
        model(torch.randn(4, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.drain()
    dist.barrier()
    counted = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counted, torch.tensor([_sent() - before]))
    ledger = model.ledger()
    if ledger is not None:
        told = [int(ledger.filter(rank=r).frame.filter(_inside())["wire_nbytes"].sum()) for r in ledger.ranks]
        print(json.dumps({"ledger": told, "kernel": [int(each) for each in counted]}), flush=True)


def _inside() -> object:
    import polars as pl

    return (pl.col("step") >= 0) | (pl.col("label") == "tuning")


def _sent() -> int:
    """Bytes that the kernel counted as sent, on all interfaces but loopback."""
    total = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() != "lo":
            total += int(counters.split()[8])
    return total


if __name__ == "__main__":
    main()
