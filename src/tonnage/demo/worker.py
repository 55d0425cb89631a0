"""One rank of the demo: trains the ways in turns, on the same batches, and writes their ledgers.

The ways take turns in blocks of a few steps, so that a machine whose speed drifts is fair to all. Rank 0
prints one JSON line a step; that is how the command that started it draws its progress.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tonnage.demo.model import Gpt, GptShape, next_byte_loss
from tonnage.demo.text import read_text
from tonnage.demo.ways import TITLES, WAYS, Way, WayName, open_way
from tonnage.ledger import write_ledger

BATCH = 4
LEARNING_RATE = 1e-3
BLOCK = 10
WARMUP = 2
_COMPUTE_STEPS = 6


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank; its number and its peers come from the environment, as torchrun gives them."""
    parser = argparse.ArgumentParser(prog="python -m tonnage.demo.worker")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--interface", required=True)
    parser.add_argument("--link", choices=["nic", "loopback"], required=True)
    parser.add_argument("--facts", type=json.loads, default={})
    parser.add_argument("--text", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the ranks share this machine's cores
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        _train(args)
    finally:
        dist.destroy_process_group()
    return 0


def _train(args: argparse.Namespace) -> None:
    rank, shape = dist.get_rank(), GptShape()
    text = torch.frombuffer(bytearray(read_text(args.text)), dtype=torch.uint8)
    compute = _compute_seconds(text, shape)
    settings = {"lr": LEARNING_RATE}
    ways: dict[WayName, Way] = {}
    counted = dict.fromkeys(WAYS, 0)
    for name in WAYS:
        dist.barrier()
        before = _sent_nbytes(args.interface)
        ways[name] = open_way(name, _model(shape), torch.optim.AdamW, settings, link=args.link)
        if name == "tonnage":  # what DDP sends to wrap a model is in no ledger
            counted[name] = _sent_nbytes(args.interface) - before
    batches = {name: _batches(text, shape, rank) for name in WAYS}
    losses: dict[WayName, list[float]] = {name: [] for name in WAYS}
    for block, first in enumerate(range(0, args.steps, BLOCK)):
        for turn in range(len(WAYS)):
            # Another order each time: who comes after whom should not matter either.
            name = WAYS[(turn + block) % len(WAYS)]
            dist.barrier()
            before = _sent_nbytes(args.interface)
            _run_block(name, ways[name], batches[name], losses[name], min(BLOCK, args.steps - first))
            ways[name].drain()
            dist.barrier()
            counted[name] += _sent_nbytes(args.interface) - before
    for name in WAYS:
        facts = args.facts | {
            "run": name,
            "title": TITLES[name],
            "world_size": dist.get_world_size(),
            "num_params": sum(p.numel() for p in _model(shape).parameters()),
            "tokens_per_step": BATCH * shape.context * dist.get_world_size(),
            "compute_time": compute,
            "loss": losses[name],
            "warmup": min(WARMUP, args.steps - 1),
        }
        if args.link == "nic":
            facts["wire_counted"] = _gathered(counted[name])
        ledger = ways[name].ledger(facts)
        if ledger is not None:
            write_ledger(ledger, args.out / f"{name}.ledger")


def _run_block(
    name: WayName, way: Way, batches: Iterator[torch.Tensor], losses: list[float], steps: int
) -> None:
    for _ in range(steps):
        begun = time.perf_counter()
        windows = next(batches)
        loss = way.step(lambda model, windows=windows: next_byte_loss(model, windows))  # type: ignore[misc]
        mean = torch.tensor(loss)
        # The curve is the mean over ranks, which costs a message of four bytes in every way alike.
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - begun
            print(
                json.dumps({"way": name, "step": len(losses), "loss": losses[-1], "seconds": seconds}),
                flush=True,
            )


def _compute_seconds(text: torch.Tensor, shape: GptShape) -> float:
    """Median step time of the slowest rank without communication, all ranks computing at once.

    Of the optimizer's time only the n-th part counts: less than that no way can do.
    """
    model = _model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = _batches(text, shape, dist.get_rank())
    times = []
    dist.barrier()
    for _ in range(_COMPUTE_STEPS):
        begun = time.perf_counter()
        next_byte_loss(model, next(batches)).backward()
        computed = time.perf_counter()
        optimizer.step()
        updated = time.perf_counter()
        optimizer.zero_grad()
        times.append(computed - begun + (updated - computed) / dist.get_world_size())
    slowest = torch.tensor(median(times[1:]))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def _model(shape: GptShape) -> Gpt:
    torch.manual_seed(7)
    return Gpt(shape)


def _batches(text: torch.Tensor, shape: GptShape, rank: int) -> Iterator[torch.Tensor]:
    """Windows ``(batch, context + 1)`` at random places; the same for each way, others on each rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        starts = torch.randint(len(text) - shape.context - 1, (BATCH,), generator=generator).tolist()
        yield torch.stack([text[s : s + shape.context + 1].long() for s in starts])


def _gathered(value: int) -> list[int]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return [int(each) for each in everyone]


def _sent_nbytes(interface: str) -> int:
    """Bytes that the kernel counted as sent on this rank's interface."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"no interface {interface}")


if __name__ == "__main__":
    sys.exit(main())
