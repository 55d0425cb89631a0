"""2,000 small gradients: ours against one fused all-reduce, one all-reduce a tensor, and torch DDP.

    python benchmarks/small_tensors.py            # links that hardly limit anything
    python benchmarks/small_tensors.py --ranks 4 --link 1gbit

What such a model's step costs is latency: of each message, and of each call. Every way takes the same steps
in the same processes, in turns; printed is the time of a step over that with one fused all-reduce after the
backward pass (the bound of whoever does not overlap), the median and the range over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_TENSORS, SIZE = 2000, 256


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default="100gbit", help="between the ranks, each a host of its own")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.rounds, args.steps)
    times = json.loads(launched(args))
    ratios = {
        name: [one / fused for one, fused in zip(each, times["one fused"], strict=True)]
        for name, each in times.items()
    }
    if args.json:
        print(json.dumps({"ranks": args.ranks, "link": args.link, "over_fused": ratios}))
        return 0
    print(f"{NUM_TENSORS} gradients of {SIZE} numbers, {args.ranks} ranks, {args.link}; over one fused:")
    for name, ratio in ratios.items():
        print(f"  {name:18} {statistics.median(ratio):6.2f} ({min(ratio):.2f}-{max(ratio):.2f})")
    return 0


def launched(args: argparse.Namespace) -> str:
    """The line that rank 0 printed."""
    from tonnage.lab import Lab
    from tonnage.units import parse_rate

    found: list[str] = []

    def keep(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{"):
            found.append(line)

    words = ["--worker", "--rounds", str(args.rounds), "--steps", str(args.steps)]
    with Lab(args.ranks, parse_rate(args.link)) as lab:
        command = [sys.executable, str(Path(__file__).resolve()), *words]
        result = lab.run(command, timeout=600, env={"OMP_NUM_THREADS": "1"}, on_stdout=keep)
    if result.exit_code or not found:
        raise SystemExit("the ranks failed")
    return found[-1]


# One rank.


def work(rounds: int, steps: int) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    turns = {
        "alone": plain(lambda parameters: None),
        "one fused": plain(fused),
        "one each": plain(each_alone),
        "ddp": ddp(),
        "tonnage allreduce": ours("allreduce"),
        "tonnage shard": ours("shard"),
    }
    for turn in turns.values():
        turn(8)
    times: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for round_ in range(rounds):
        for place in range(len(names)):
            name = names[(place + round_) % len(names)]
            dist.barrier()
            slowest = torch.tensor(turns[name](steps) / steps)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    if dist.get_rank() == 0:
        print(json.dumps(times), flush=True)
    dist.destroy_process_group()
    return 0


def model() -> Any:
    import torch
    from torch import nn

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.full((SIZE,), 1.0 + i / 1e6) for i in range(NUM_TENSORS))

        def forward(self, x: Any) -> Any:
            total = x
            for scale in self.scales:
                total = total + scale
            return total.sum()

    return Small()


def timed(module: Any, optimizer: Any, after: Callable[[], None]) -> Callable[[int], float]:
    import torch

    x = torch.ones(SIZE)

    def turn(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            module(x).backward()
            after()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return time.perf_counter() - start

    return turn


def plain(exchange: Callable[[list[Any]], None]) -> Callable[[int], float]:
    import torch

    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, foreach=True)
    return timed(module, optimizer, lambda: exchange(list(module.parameters())))


def fused(parameters: list[Any]) -> None:
    import torch
    import torch.distributed as dist

    flat = torch.cat([p.grad for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    torch._foreach_copy_([p.grad for p in parameters], list(flat.split(SIZE)))


def each_alone(parameters: list[Any]) -> None:
    import torch.distributed as dist

    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def ddp() -> Callable[[int], float]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    module = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    return timed(module, torch.optim.SGD(module.parameters(), lr=1e-3, foreach=True), lambda: None)


def ours(schedule: str) -> Callable[[int], float]:
    import torch

    import tonnage

    module = tonnage.DataParallel(model(), schedule=schedule)
    return timed(module, module.optimizer(torch.optim.SGD, lr=1e-3, foreach=True), lambda: None)


if __name__ == "__main__":
    sys.exit(main())
