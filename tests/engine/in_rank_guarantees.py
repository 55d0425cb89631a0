"""What the ranks of ``test_guarantees.py`` run: trainings in which something is late."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from models import differing, features, perceptron, seeded, twin
from ranks import tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tonnage.engine import DataParallel


def watched(schedule: str, late: str, steps: int) -> dict[str, Any]:
    """Train beside DDP; what left early, what was read stale, and what differs at the end.

    ``late`` is ``gradient`` (rank 1's are slow), ``forward`` (rank 0's layers are slow) or ``paused``
    (the test stops and resumes whole ranks meanwhile).
    """
    rank = dist.get_rank()
    plain = seeded(lambda: perceptron(depth=5, width=64))
    theirs: Any = DistributedDataParallel(twin(plain))
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    written: set[int] = set()
    trained = list(plain.parameters())
    for index, parameter in enumerate(trained):
        if late == "gradient" and rank == 1:
            parameter.register_hook(lambda gradient: time.sleep(0.003))
        # Before the engine's own hook: whatever has left by then has left early.
        parameter.register_post_accumulate_grad_hook(lambda _, i=index: written.add(i))
    ours = DataParallel(plain, schedule=schedule, bucket=8000)
    optimizer = ours.optimizer(torch.optim.AdamW, lr=1e-2)
    early: list[str] = []
    stale: list[str] = []
    _spy_on_departures(ours, written, early)
    for name, module in plain.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(
                lambda each, _, n=name: _check(each, theirs.module.get_submodule(n), n, stale, late, rank)
            )
    for step in range(steps):
        x = features(20, rank, step)
        # Theirs steps after ours has read its parameters, so that both are of the same version.
        written.clear()
        loss = ours(x).square().mean()
        loss.backward()
        theirs(x).square().mean().backward()
        for each in (optimizer, their_optimizer):
            each.step()
            each.zero_grad()
        tell(step)
    found = {"early": early, "stale": stale, "differing": differing(ours.module, theirs.module)}
    ours.close()
    return found


def _spy_on_departures(model: DataParallel, written: set[int], early: list[str]) -> None:
    transport: Any = model._transport
    for name in ("start_reduce_scatter", "start_all_reduce"):
        start = getattr(transport, name)

        def spy(index: int, *rest: Any, start: Any = start) -> Any:
            missing = [slot.name for slot in model._buckets[index].slots if slot.index not in written]
            early.extend(missing)
            return start(index, *rest)

        setattr(transport, name, spy)


def _check(ours: nn.Module, theirs: nn.Module, name: str, stale: list[str], late: str, rank: int) -> None:
    if late == "forward" and rank == 0:
        time.sleep(0.003)
    for (part, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not torch.equal(mine, other):
            stale.append(f"{name}.{part}")


def late_sender_meets_exchange() -> float:
    """Rank 0's gradients are late, so all of rank 1's are there when rank 0 asks for the norm."""
    rank = dist.get_rank()
    plain = nn.Linear(2048, 2048)
    if rank == 0:
        plain.weight.register_hook(lambda gradient: time.sleep(0.5))
    model = DataParallel(plain, bucket="32MB", timeout=10)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 2048)).mean().backward()
    norm = float(model.clip_grad_norm_(1.0))
    optimizer.step()
    model.close()
    return norm


def stress(runs: int, seed: int) -> tuple[int, int, int]:
    """Many short trainings with random sizes and delays; threads before and after, steps taken."""
    same = random.Random(seed)
    own = random.Random(seed * 100 + dist.get_rank())
    before = _threads()
    steps = 0
    for _ in range(runs):
        depth, width = same.randint(2, 5), same.randint(1, 60)
        bucket, schedule = same.choice([1, 500, 5000, 1 << 20]), same.choice(["shard", "early", "allreduce"])
        num_steps, clip, wait = (
            same.randint(1, 3),
            schedule != "early" and same.random() < 0.3,
            same.random() < 0.3,
        )
        plain = seeded(lambda d=depth, w=width: perceptron(d, w))  # type: ignore[misc]
        for parameter in plain.parameters():
            if own.random() < 0.2:
                parameter.register_hook(lambda gradient: time.sleep(own.random() * 0.004))
        model = DataParallel(plain, schedule=schedule, bucket=bucket)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.01)
        for step in range(num_steps):
            model(features(seed, dist.get_rank(), step)).square().mean().backward()
            if clip:
                model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if wait and own.random() < 0.5:
                model.module.state_dict()
            steps += 1
        model.close()
    return before, _threads(), steps


def _threads() -> int:
    return sum(each.name.startswith("tonnage") for each in threading.enumerate())


def one_rank_reads(steps: int) -> list[str]:
    """Rank 0 alone looks at the parameters after each step, while rank 1 goes on to share buffers."""
    rank = dist.get_rank()
    layers = [layer for _ in range(8) for layer in (nn.Linear(12, 12), nn.BatchNorm1d(12))]
    plain = seeded(lambda: nn.Sequential(*layers))
    theirs: Any = DistributedDataParallel(twin(plain))
    ours = DataParallel(plain, bucket=1, timeout=15)
    pairs = [(ours, ours.optimizer(torch.optim.SGD, lr=0.1))]
    pairs.append((theirs, torch.optim.SGD(theirs.parameters(), lr=0.1)))
    for step in range(steps):
        for model, optimizer in pairs:
            model(features(21, rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                model.module.state_dict()
    found = differing(ours.module, theirs.module)
    ours.close()
    return found
