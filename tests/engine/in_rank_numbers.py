"""What the ranks of ``test_numbers.py`` run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from models import (
    OPTIMIZERS,
    Mixed,
    Stack,
    differing,
    features,
    largest_difference,
    perceptron,
    seeded,
    tokens,
    twin,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tonnage.engine import DataParallel

_CLASSES = {"Mixed": (Mixed, tokens), "perceptron": (perceptron, features)}


def beside_ddp(
    model: str, schedule: str, optimizer: str, steps: int, bucket: int = 2000
) -> tuple[list[str], float, list[tuple[float, float]]]:
    """Bits that differ after training, the largest difference, and both losses of each step."""
    make, batch = _CLASSES[model]
    rank = dist.get_rank()
    kind, settings = OPTIMIZERS[optimizer]
    plain = seeded(make)
    ddp = DistributedDataParallel(twin(plain))
    ours = DataParallel(plain, schedule=schedule, bucket=bucket)
    their_optimizer = kind(ddp.parameters(), **settings)
    our_optimizer = ours.optimizer(kind, **settings)
    losses = []
    for step in range(steps):
        x = batch(1, rank, step)
        pair = []
        for each, stepped in ((ours, our_optimizer), (ddp, their_optimizer)):
            loss = _loss(each(x), x)
            loss.backward()
            stepped.step()
            stepped.zero_grad()
            pair.append(loss.item())
        losses.append((pair[0], pair[1]))
    found = differing(ours.module, ddp.module), largest_difference(ours.module, ddp.module), losses
    ours.close()
    return found


def against_average(
    layers: Sequence[tuple[str, str, bool, bool]],
    bucket: int,
    num_ranks: int,
    schedule: str,
    accumulate: int,
    groups: bool,
) -> float:
    """Largest difference, in units of the coarsest dtype's precision, from training that averages gradients in one process.

    Ranks are split into groups of ``num_ranks``, each with a training of its own.
    """
    if not _groups:
        _make_groups()
    group, members = _groups[num_ranks]
    rank, num_ranks = group.rank(), len(members)
    plain = seeded(lambda: Stack(layers))
    reference = twin(plain)
    ours = DataParallel(plain, schedule=schedule, bucket=bucket, process_group=group)
    settings = {"lr": 0.05, "momentum": 0.9}
    our_optimizer = ours.optimizer(torch.optim.SGD, _grouped(ours.module, groups), **settings)
    optimizer = torch.optim.SGD(_grouped(reference, groups), **settings)
    for step in range(3):
        for part in range(accumulate):
            x = features(2, rank, step * accumulate + part)
            if part < accumulate - 1:
                with ours.no_sync():
                    ours(x).square().mean().backward()
            else:
                ours(x).square().mean().backward()
        our_optimizer.step()
        our_optimizer.zero_grad()
        _average_into(reference, num_ranks, step, accumulate)
        optimizer.step()
        optimizer.zero_grad()
    mine, other = ours.module.state_dict(), reference.state_dict()
    eps = max(torch.finfo(value.dtype).eps for value in mine.values())
    worst = max(
        float((mine[n].double() - other[n].double()).abs().max()) / (1 + float(other[n].abs().max()))
        for n in mine
    )
    ours.close()
    return worst / eps


def _average_into(model: nn.Module, num_ranks: int, step: int, accumulate: int) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p, dtype=torch.float64) for p in trained]
    for rank in range(num_ranks):
        for part in range(accumulate):
            model(features(2, rank, step * accumulate + part)).square().mean().backward()
        for each, p in zip(total, trained, strict=True):
            assert p.grad is not None
            each += p.grad.double() / num_ranks
            p.grad = None
    for each, p in zip(total, trained, strict=True):
        p.grad = each.to(p.dtype)


def _grouped(model: nn.Module, groups: bool) -> list[nn.Parameter] | list[dict[str, object]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if not groups:
        return trained
    decayed = [p for p in trained if p.dim() > 1]
    plain = [p for p in trained if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.2}, {"params": plain, "weight_decay": 0.0, "lr": 0.01}]


_groups: dict[int, tuple[dist.ProcessGroup, list[int]]] = {}


def _make_groups() -> None:
    """Split the ranks into groups of n for each n; all ranks together, as torch wants it."""
    world_size = dist.get_world_size()
    for n in range(1, world_size + 1):
        for first in range(0, world_size, n):
            members = list(range(first, min(first + n, world_size)))
            group = dist.new_group(members)
            if dist.get_rank() in members:
                _groups[n] = (group, members)


def two_groups_at_once() -> list[str]:
    """Ranks 0 and 1 train one model, ranks 2 and 3 another; bits in which the group's ranks differ from DDP's."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    plain = seeded(perceptron, seed=rank // 2)
    ddp = DistributedDataParallel(twin(plain), process_group=mine)
    ours = DataParallel(plain, process_group=mine)
    their_optimizer = torch.optim.AdamW(ddp.parameters())
    our_optimizer = ours.optimizer(torch.optim.AdamW)
    for step in range(3):
        x = features(3, rank, step)
        for each, stepped in ((ours, our_optimizer), (ddp, their_optimizer)):
            each(x).square().mean().backward()
            stepped.step()
            stepped.zero_grad()
    found = differing(ours.module, ddp.module)
    ours.close()
    return found


def _loss(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return output.square().mean() if x.dtype.is_floating_point else F.cross_entropy(output, x)
