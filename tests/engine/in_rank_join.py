"""What the ranks of ``test_join.py`` run: different numbers of batches on each."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from models import features, largest_difference, perceptron, seeded
from torch import nn

from tonnage.engine import DataParallel, GradScaler


def _batches(rank: int, epoch: int) -> list[torch.Tensor]:
    """Rank ``r`` has ``r`` batches more than the first; in the second epoch it is the other way round."""
    extra = rank if epoch == 0 else dist.get_world_size() - 1 - rank
    return [features(50 + epoch, rank, step) for step in range(4 + 2 * extra)]


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def uneven(
    schedule: str, accumulate: int, clip: float | None, compress: str | None = None
) -> tuple[float, bool]:
    """How far from training with zeros for what is missing, after two epochs; whether ranks are alike."""
    world_size = dist.get_world_size()
    plain = seeded(perceptron)
    reference = copy.deepcopy(plain)
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}
    model = DataParallel(plain, schedule=schedule, bucket=900, compress=compress)
    optimizer = model.optimizer(torch.optim.SGD, **settings)
    theirs = torch.optim.SGD(reference.parameters(), **settings)
    for epoch in range(2):
        batches = _batches(dist.get_rank(), epoch)
        with model.join():
            for first in range(0, len(batches), accumulate):
                with model.no_sync():
                    for x in batches[first : first + accumulate - 1]:
                        _loss(model, x).backward()
                _loss(model, batches[first + accumulate - 1]).backward()
                if clip is not None:
                    model.clip_grad_norm_(clip)
                optimizer.step()
                optimizer.zero_grad()

        everybodys = [_batches(rank, epoch) for rank in range(world_size)]
        for first in range(0, max(map(len, everybodys)), accumulate):
            for own in everybodys:
                for x in own[first : first + accumulate]:
                    (_loss(reference, x) / world_size).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(reference.parameters(), clip)
            theirs.step()
            theirs.zero_grad()
    model.wait()
    far = largest_difference(model.module, reference)
    flat = torch.cat([p.detach().view(-1) for p in model.module.parameters()])
    everywhere = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(everywhere, flat)
    model.close()
    return far, all(torch.equal(each, flat) for each in everywhere)


def by_rates() -> list[list[float]]:
    """Learning rates in the groups after a scheduler that only some ranks could step."""
    model = DataParallel(seeded(perceptron))
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.9))
    with model.join():
        for x in _batches(dist.get_rank(), 0):
            _loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.5
    model.close()
    return [[group["lr"], *group["betas"]] for group in optimizer.param_groups]


def tuned(schedule: str) -> int:
    """How often a training tunes itself that first has uneven and then even numbers of batches; on rank 0."""
    model = DataParallel(seeded(perceptron), schedule=schedule)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.01)
    with model.join():
        for step in range(4 + 3 * dist.get_rank()):
            _loss(model, features(60, dist.get_rank(), step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(12):
        _loss(model, features(61, dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ledger = model.ledger()
    model.close()
    return len(ledger.facts["tuning"]) if ledger is not None else -1


def at_odds() -> None:
    """Rank 1 clips, and rank 0 does not."""
    model = DataParallel(seeded(perceptron))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    with model.join():
        _loss(model, features(7, dist.get_rank(), 0)).backward()
        if dist.get_rank():
            model.clip_grad_norm_(1.0)
        optimizer.step()


def without_optimizer() -> None:
    with DataParallel(seeded(perceptron)).join():
        pass


def scaled() -> None:
    """A gradient scaler within ``join()``."""
    model, scaler = DataParallel(seeded(perceptron)), GradScaler("cpu", init_scale=8.0)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    with model.join():
        scaler.scale(_loss(model, features(8, dist.get_rank(), 0))).backward()
        scaler.step(optimizer)
