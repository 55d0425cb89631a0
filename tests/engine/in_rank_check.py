"""What the ranks of ``test_check.py`` run."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from models import Mixed, differing, features, perceptron, seeded, tokens, twin
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tonnage.engine import DataParallel


def beside_ddp(schedule: str, set_to_none: bool, accumulate: int) -> list[str]:
    """Bits that differ from DDP's after training with everything checked."""
    plain = seeded(Mixed)
    theirs = DistributedDataParallel(twin(plain))
    ours = DataParallel(plain, schedule=schedule, bucket=1500, debug=True)
    optimizers = (
        ours.optimizer(torch.optim.AdamW, lr=1e-2),
        torch.optim.AdamW(theirs.parameters(), lr=1e-2),
    )
    models: tuple[Any, Any] = (ours, theirs)
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            with model.no_sync():
                for part in range(accumulate - 1):
                    x = tokens(21 + part, dist.get_rank(), step)
                    F.cross_entropy(model(x), x).backward()
            x = tokens(31, dist.get_rank(), step)
            F.cross_entropy(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    ours.wait()
    found = differing(ours.module, theirs.module)
    ours.close()
    return found


def compressed(schedule: str, compress: str) -> bool:
    """Whether the loss of a compressed run is a number after some steps."""
    model = DataParallel(seeded(perceptron), schedule=schedule, bucket=1500, compress=compress, debug=True)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.05)
    for step in range(4):
        loss = model(features(3, dist.get_rank(), step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return bool(loss.isfinite())


def written_late(schedule: str) -> None:
    """Rank 0 writes a gradient whose bucket has left, while rank 1 has yet to send its part."""
    module = seeded(perceptron)
    model = DataParallel(module, schedule=schedule, bucket=1000, debug=True)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    last, rank = module[-1].weight, dist.get_rank()

    def meddle(_: Any) -> None:
        if rank == 0:
            last.grad.add_(1.0)

    def stall(gradient: torch.Tensor) -> None:
        if rank == 1:
            time.sleep(1.0)

    module[0].weight.register_post_accumulate_grad_hook(meddle)
    output = model(features(4, rank, 0))
    output.register_hook(stall)
    output.square().mean().backward()
    optimizer.step()


def drifted() -> None:
    """Rank 1 changes a parameter between two steps."""
    model = DataParallel(seeded(perceptron), schedule="allreduce", debug=True)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(2):
        model(features(5, dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.module[-1].bias[0] += 1e-6


def left_behind() -> tuple[bool, bool]:
    """Whether the averaged gradients of a step are NaN once it is over, with and without ``debug``."""
    found = []
    for debug in (True, False):
        model = DataParallel(seeded(perceptron), debug=debug)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        model(features(6, dist.get_rank(), 0)).square().mean().backward()
        optimizer.step()
        model.wait()
        found.append(all(bool(each.shard_gradient.isnan().all()) for each in model._memory))
        model.close()
    return found[0], found[1]
