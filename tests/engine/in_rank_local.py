"""What the ranks of ``test_local.py`` run."""

from __future__ import annotations

import copy
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from models import differing, features, largest_difference, perceptron, seeded, twin
from torch import nn

from tonnage.engine import AVERAGE, LocalSteps, Nesterov


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, seed: int = 3) -> float:
    """Steps of this rank on its own batches; the last loss."""
    loss = torch.zeros(())
    for step in range(first, last):
        x = features(seed, dist.get_rank(), step)
        loss = (model(x) - torch.tanh(x.roll(1, dims=1))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def beside_plain_data_parallel(steps: int) -> float:
    """Largest difference from SGD on the mean of all ranks' gradients, with an average after each step."""
    ours = seeded(perceptron)
    reference = twin(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    local = LocalSteps(ours, optimizer, every=1, outer=AVERAGE, stream=False)
    train(ours, optimizer, 0, steps)
    local.close()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(steps):
        for rank in range(dist.get_world_size()):
            x = features(3, rank, step)
            loss = (reference(x) - torch.tanh(x.roll(1, dims=1))).square().mean()
            (loss / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return largest_difference(ours, reference)


def outer_steps(
    compress: str | None, stream: bool, every: int, steps: int, fragments: int = 3
) -> dict[str, Any]:
    """The shared values after each step in which there are new ones, and what it all came to."""
    ours = seeded(perceptron, seed=dist.get_rank())  # unlike at first: rank 0's are handed to all
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    local = LocalSteps(
        ours, optimizer, every=every, compress=compress, stream=stream, fragments=fragments, delay=2
    )
    shared, same = [], []
    first = train(ours, optimizer, 0, 1)
    for step in range(1, steps):
        train(ours, optimizer, step, step + 1)
        shared.append(_bits(torch.cat([f.start for f in local._fragments])))
        same.append(_bits(torch.cat([p.detach().flatten() for p in ours.parameters()])))
    local.sync()
    last = train(ours, optimizer, steps, steps + 1)
    ledger = local.ledger()
    rows = None
    if ledger is not None:
        outer = ledger.filter(kind="gradient").frame
        rows = outer.select("rank", "op", "label", "nbytes", "wire_nbytes").to_dicts()
    local.sync()
    synced = _bits(torch.cat([p.detach().flatten() for p in ours.parameters()]))
    local.close()
    numel = sum(p.numel() for p in ours.parameters())
    return {
        "shared": shared,
        "same": same,
        "synced": synced,
        "losses": (first, last),
        "rows": rows,
        "numel": numel,
    }


def against_one_process(every: int, rounds: int) -> float:
    """Largest difference from DiLoCo computed in one process for all ranks."""
    outer = Nesterov(lr=0.7, momentum=0.9)
    ours = seeded(perceptron)
    replicas = [twin(ours) for _ in range(dist.get_world_size())]
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    local = LocalSteps(ours, optimizer, every=every, outer=outer, stream=False)
    train(ours, optimizer, 0, every * rounds)
    local.close()
    start = [p.detach().clone() for p in replicas[0].parameters()]
    velocity = [torch.zeros_like(p) for p in start]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in replicas]
    for turn in range(rounds):
        for rank, (model, own) in enumerate(zip(replicas, optimizers, strict=True)):
            for step in range(turn * every, (turn + 1) * every):
                x = features(3, rank, step)
                (model(x) - torch.tanh(x.roll(1, dims=1))).square().mean().backward()
                own.step()
                own.zero_grad()
        with torch.no_grad():
            for i, each in enumerate(zip(*(m.parameters() for m in replicas), strict=True)):
                delta = sum(start[i] - p for p in each) / len(each)
                velocity[i] = outer.momentum * velocity[i] + delta
                start[i] = start[i] - outer.lr * (delta + outer.momentum * velocity[i])
                for p in each:
                    p.copy_(start[i])
    return max(float((a.detach() - b).abs().max()) for a, b in zip(ours.parameters(), start, strict=True))


def resumed(compress: str | None, stop: int, steps: int) -> list[str]:
    """Bits that differ between a training and one that was saved and taken up again after ``stop``."""
    made = [_streaming(seeded(perceptron), compress) for _ in range(3)]
    (whole, whole_optimizer, whole_local), (first, first_optimizer, first_local), other = made
    train(whole, whole_optimizer, 0, steps)
    train(first, first_optimizer, 0, stop)
    saved = copy.deepcopy((first.state_dict(), first_optimizer.state_dict(), first_local.state_dict()))
    model, optimizer, local = other
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    local.load_state_dict(saved[2])
    train(model, optimizer, stop, steps)
    found = differing(whole, model)
    for each in (whole_local, first_local, local):
        each.close()
    return found


def _streaming(model: nn.Module, compress: str | None) -> tuple[nn.Module, torch.optim.Optimizer, LocalSteps]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, LocalSteps(model, optimizer, every=6, compress=compress, fragments=3, delay=3)


def with_halves_and_frozen_ones() -> list[bool]:
    """Whether ranks agree bit for bit on a model of bf16 and fp32 parameters, some of them frozen."""
    model = seeded(perceptron)
    model[0].requires_grad_(False)
    model[-1].to(torch.bfloat16)
    before = model[0].weight.clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    local = LocalSteps(model, optimizer, every=2, stream=False, compress="bf16")
    for step in range(4):
        x = features(5, dist.get_rank(), step)
        out = model[:-1](x)
        model[-1](out.to(torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    local.close()
    mine = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    return [torch.equal(mine, theirs), torch.equal(before, model[0].weight)]


def unlike_models() -> None:
    model = seeded(lambda: perceptron(width=24 + dist.get_rank()))
    LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1))


def diverged() -> None:
    """One rank's parameters are no numbers any more."""
    model = seeded(perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSteps(model, optimizer, every=2, stream=False)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight.fill_(float("nan"))
    try:
        train(model, optimizer, 0, 2)
    finally:
        local.close()


def _bits(flat: torch.Tensor) -> bytes:
    return flat.numpy().tobytes()


def main() -> None:
    """A rank as users start it: trains until it is told to stop, and prints each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    model = seeded(perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    LocalSteps(model, optimizer, every=5, compress=sys.argv[1] or None, hang_timeout=2.0)
    for step in range(100_000):
        train(model, optimizer, step, step + 1)
        print(f"step {step}", flush=True)


if __name__ == "__main__":
    main()
