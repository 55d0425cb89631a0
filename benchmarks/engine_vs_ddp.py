"""Step time of tonnage.DataParallel against torch DDP on slow links, with the physical bound.

    python benchmarks/engine_vs_ddp.py                 # everything, about ten minutes
    python benchmarks/engine_vs_ddp.py --ranks 2 --ratio 1 --compute emulated
    python benchmarks/engine_vs_ddp.py --link 200mbit --compute real --compress int8

Each case runs ours and DDP with buckets of 1, 5 and 25 MB (its default) in one process group, in turns of
a few steps, so that a machine whose speed drifts is fair to all. A round's ratio compares turns that lie
beside each other; printed are the median and the range over the rounds.

``emulated`` compute sleeps, as when an accelerator computes and the CPUs are free: it shows the schedule.
``real`` compute runs a GPT on the CPUs, which communication then competes for. The bound of a step is
max(compute, bytes / bandwidth), with 2 (n-1)/n of the gradients' bytes, uncompressed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

CAPS = (1, 5, 25)
WIDTH, LAYERS, CONTEXT = 384, 6, 256


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument(
        "--ratio", type=float, nargs="*", default=[0.3, 1.0, 3.0], help="communication / compute"
    )
    parser.add_argument("--compute", nargs="*", default=["emulated", "real"], choices=["emulated", "real"])
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn")
    parser.add_argument("--schedule", default="shard", choices=["shard", "early", "allreduce"])
    parser.add_argument("--bucket", default=None, help="our bucket size")
    parser.add_argument("--compress", default=None, help="our compression, as int8 or power:4")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        return work(args.worker)
    cases = [("emulated", n, r) for n in args.ranks for r in args.ratio if "emulated" in args.compute]
    cases += [("real", n, float("nan")) for n in args.ranks if "real" in args.compute]
    results = [measure(compute, ranks, ratio, args) for compute, ranks, ratio in cases]
    if args.json:
        print(json.dumps(results))
    return 0


def measure(compute: str, ranks: int, ratio: float, args: argparse.Namespace) -> dict[str, object]:
    from tonnage.lab import Lab
    from tonnage.units import parse_rate

    rate = parse_rate(args.link)
    task = {
        "compute": compute,
        "ratio": None if compute == "real" else ratio,
        "rate": rate,
        "rounds": args.rounds,
        "steps": args.steps,
        "schedule": args.schedule,
        "bucket": args.bucket,
        "compress": args.compress,
    }
    found: list[dict[str, object]] = []
    with Lab(ranks, rate) as lab:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(task)]
        result = lab.run(
            command,
            timeout=1200,
            env={"OMP_NUM_THREADS": "1"},
            on_stdout=lambda rank, line: found.append(json.loads(line)) if line.startswith("{") else None,
        )
    if result.exit_code or not found:
        raise SystemExit(f"the case {compute}, {ranks} ranks, ratio {ratio} failed")
    show(found[-1])
    return found[-1]


def show(case: dict[str, object]) -> None:
    times: dict[str, list[float]] = case["times"]  # type: ignore[assignment]
    ours = times["tonnage"]
    best = min((f"ddp {cap}" for cap in CAPS), key=lambda name: statistics.median(times[name]))
    bound: float = case["bound"]  # type: ignore[assignment]
    against = {
        "default ddp": [a / b for a, b in zip(ours, times["ddp 25"], strict=True)],
        f"best ddp ({best[4:]} MB)": [a / b for a, b in zip(ours, times[best], strict=True)],
        "bound": [a / bound for a in ours],
    }
    ratio = (
        f"comm {case['ratio']}x compute"
        if case["ratio"]
        else f"comm {case['comm'] / case['alone']:.2f}x compute"
    )  # type: ignore[operator]
    told = "  ".join(
        f"/{name} {statistics.median(r):.2f} ({min(r):.2f}-{max(r):.2f})" for name, r in against.items()
    )
    for line in case["tuning"]:  # type: ignore[attr-defined]
        print(f"  {line}")
    print(f"{case['compute']:8} {case['ranks']} ranks, {ratio}:  {told}", flush=True)


# One rank.


def work(task: dict[str, object]) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    model_nbytes = sum(p.numel() for p in gpt().parameters()) * 4
    comm = 2 * (ranks - 1) / ranks * model_nbytes / float(task["rate"])  # type: ignore[arg-type]
    real = task["compute"] == "real"
    seconds = 0.0 if real else comm / float(task["ratio"])  # type: ignore[arg-type]
    make = gpt if real else lambda: emulated(seconds)
    turns = {"alone": alone(make())}
    turns |= {f"ddp {cap}": ddp(make(), cap) for cap in CAPS}
    turns["tonnage"], model = ours(make(), task)
    times: dict[str, list[float]] = {name: [] for name in turns}
    steps: int = task["steps"]  # type: ignore[assignment]
    names = list(turns)
    for run in turns.values():
        run(8)  # by then ours has measured and cut its buckets
    for round_ in range(int(task["rounds"])):  # type: ignore[call-overload]
        for place in range(len(names)):
            name = names[(place + round_) % len(names)]
            dist.barrier()
            slowest = torch.tensor(turns[name](steps) / steps)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    told = model.ledger()
    single = statistics.median(times["alone"])
    if dist.get_rank() == 0:
        case = {
            **{key: task[key] for key in ("compute", "ratio")},
            "ranks": ranks,
            "comm": comm,
            "alone": single,
            "bound": max(single, comm),
            "times": times,
            "tuning": told.facts.get("notes", []) if told is not None else [],
        }
        print(json.dumps(case), flush=True)
    dist.destroy_process_group()
    return 0


def alone(model):
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return lambda steps: train(model, optimizer, steps)


def ddp(model, cap: int):
    import torch

    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap)
    optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
    return lambda steps: train(wrapped, optimizer, steps)


def ours(model, task):
    import torch

    import tonnage

    settings = {name: task[name] for name in ("bucket", "compress") if task[name]}
    wrapped = tonnage.DataParallel(model, schedule=task["schedule"], **settings)
    optimizer = wrapped.optimizer(torch.optim.AdamW, fused=True)

    def run(steps: int) -> float:
        seconds = train(wrapped, optimizer, steps)
        wrapped.drain()
        return seconds

    return run, wrapped


def train(model, optimizer, steps: int) -> float:
    """Seconds of ``steps`` steps in the middle of a training: one more goes before, untimed.

    That one pays for what begins, and what the last one leaves for a next forward pass to hide is not
    waited for: so each timed step has just what a step of a long training has.
    """
    import torch

    begun = 0.0
    for step in range(steps + 1):
        if step == 1:
            begun = time.perf_counter()
        tokens = torch.zeros(2, CONTEXT + 1, dtype=torch.long)
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - begun


def loss_of(model, tokens):
    import torch

    out = model(tokens[:, :-1])
    return (
        torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        if out.dim() == 3
        else out.sum()
    )


def gpt():
    import torch

    from tonnage.demo.model import Gpt, GptShape

    torch.manual_seed(0)
    return Gpt(GptShape(width=WIDTH, num_layers=LAYERS, num_heads=6, context=CONTEXT))


def emulated(seconds: float):
    """The same parameters as :func:`gpt`, in leaves that sleep for their share of ``seconds``."""
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, share):
            ctx.share, ctx.shapes = share, (weight.shape, bias.shape)
            time.sleep(share / 3)
            return x + 0.0

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(ctx.share * 2 / 3)  # twice the forward's work, as with matrix products
            return gradient, *(torch.full(shape, 1e-3) for shape in ctx.shapes), None

    class Leaf(torch.nn.Module):
        def __init__(self, rows: int, columns: int, share: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(rows, columns))
            self.bias = torch.nn.Parameter(torch.zeros(rows))
            self.share = share

        def forward(self, x):
            return Sleep.apply(x, self.weight, self.bias, self.share)

    shapes = [(256, WIDTH), (CONTEXT, WIDTH)]
    for _ in range(LAYERS):
        shapes += [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    shapes += [(256, WIDTH)]
    total = sum(r * c for r, c in shapes)
    leaves = torch.nn.Sequential(*(Leaf(r, c, seconds * r * c / total) for r, c in shapes))

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaves = leaves

        def forward(self, tokens):
            return self.leaves(torch.ones(8, requires_grad=True))

    return Whole()


if __name__ == "__main__":
    sys.exit(main())
