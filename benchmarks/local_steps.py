"""Loss and bytes of local steps (DiLoCo) against torch DDP, after the same real training.

    python benchmarks/local_steps.py                       # three seeds of 300 steps, some minutes
    python benchmarks/local_steps.py --seeds 1 --every 25 --compress none

Each seed trains a small GPT on this Python's standard library twice from the same parameters on the same
batches: with DDP, and with ``LocalSteps``. As in the DiLoCo paper, both take up a model that was trained
synchronously, for ``--before`` steps (0 begins from nothing). Every rank has its own batches, in its own network
namespace on a shaped link. Printed are the loss on text that neither has seen, and the bytes that the
kernel counted as sent by rank 0 for each token it trained on.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path

BATCH, WIDTH, LAYERS, CONTEXT = 8, 96, 3, 64


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--before", type=int, default=300, help="synchronous steps before, not counted")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--compress", default="int8", help="or none, bf16, sign, …")
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--mixing", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        return work(args.worker)
    from tonnage.lab import Lab
    from tonnage.units import parse_rate

    found: list[dict[str, float]] = []

    def told(rank: int, line: str) -> None:
        if line.startswith("{"):
            found.append(json.loads(line))
            show(found[-1])

    task = {key: value for key, value in vars(args).items() if key not in ("worker", "json", "link")}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(task)]
    with Lab(args.ranks, parse_rate(args.link)) as lab:
        result = lab.run(command, timeout=1200, env={"OMP_NUM_THREADS": "1"}, on_stdout=told)
    if result.exit_code or len(found) < args.seeds:
        raise SystemExit("the training failed")
    for what in ("loss", "bytes", "seconds"):
        ratios = [each[f"local_{what}"] / each[f"ddp_{what}"] for each in found]
        if what == "bytes":
            ratios = [1 / each for each in ratios]
        name = {
            "loss": "loss, local / DDP",
            "bytes": "bytes a token, DDP / local",
            "seconds": "seconds, local / DDP",
        }
        print(f"{name[what]}: {statistics.median(ratios):.4g} ({min(ratios):.4g}-{max(ratios):.4g})")
    if args.json:
        print(json.dumps(found))
    return 0


def show(case: dict[str, float]) -> None:
    print(
        f"seed {case['seed']}: loss {case['first_loss']:.3f} -> DDP {case['ddp_loss']:.4f}, "
        f"local steps {case['local_loss']:.4f} ({case['local_loss'] / case['ddp_loss'] - 1:+.2%}); "
        f"bytes a token {case['ddp_bytes']:.0f} and {case['local_bytes']:.2f}; "
        f"{case['ddp_seconds']:.1f} s and {case['local_seconds']:.1f} s",
        flush=True,
    )


# One rank.


def work(task: dict) -> int:
    import torch
    import torch.distributed as dist

    from tonnage.demo.text import read_text

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text = torch.frombuffer(bytearray(read_text(None)), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    for seed in range(task["seeds"]):
        begun = gpt(seed)
        ddp(begun, text[:cut], text[cut:], 100 + seed, task | {"steps": task["before"]})
        case = {"seed": seed, "first_loss": held_out(begun, text[cut:])}
        for name, way in (("ddp", ddp), ("local", local_steps)):
            dist.barrier()
            model = copy.deepcopy(begun)
            loss, sent, seconds = way(model, text[:cut], text[cut:], seed, task)
            tokens = task["steps"] * BATCH * CONTEXT
            case |= {f"{name}_loss": loss, f"{name}_bytes": sent / tokens, f"{name}_seconds": seconds}
        if dist.get_rank() == 0:
            print(json.dumps(case), flush=True)
    dist.destroy_process_group()
    return 0


def ddp(model, text, unseen, seed, task):
    import torch

    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task["lr"], fused=True)
    return train(wrapped, model, optimizer, lambda: None, text, unseen, seed, task)


def local_steps(model, text, unseen, seed, task):
    import torch

    import tonnage.engine

    optimizer = torch.optim.AdamW(model.parameters(), lr=task["lr"], fused=True)
    local = tonnage.engine.LocalSteps(
        model,
        optimizer,
        every=task["every"],
        outer=tonnage.engine.Nesterov(lr=task["outer_lr"], momentum=task["momentum"]),
        compress=None if task["compress"] == "none" else task["compress"],
        stream=not task["no_stream"],
        mixing=task["mixing"],
    )
    found = train(model, model, optimizer, local.sync, text, unseen, seed, task)
    local.close()
    return found


def train(wrapped, model, optimizer, finish, text, unseen, seed, task):
    """Loss on unseen text, bytes that this rank sent, and seconds."""
    import torch
    import torch.distributed as dist

    from tonnage.demo.model import next_byte_loss

    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    dist.barrier()
    before, begun = sent_nbytes(), time.perf_counter()
    for _ in range(task["steps"]):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
        next_byte_loss(wrapped, torch.stack([text[s : s + CONTEXT + 1].long() for s in starts])).backward()
        optimizer.step()
        optimizer.zero_grad()
    finish()
    sent, seconds = sent_nbytes() - before, time.perf_counter() - begun
    return held_out(model, unseen), sent, seconds


def held_out(model, text) -> float:
    """Mean loss on 256 windows that lie evenly in ``text``."""
    import torch

    from tonnage.demo.model import next_byte_loss

    starts = torch.linspace(0, len(text) - CONTEXT - 1, 256).long().tolist()
    windows = torch.stack([text[s : s + CONTEXT + 1].long() for s in starts])
    with torch.no_grad():
        return float(next_byte_loss(model, windows))


def gpt(seed: int):
    import torch

    from tonnage.demo.model import Gpt, GptShape

    torch.manual_seed(seed)
    return Gpt(GptShape(width=WIDTH, num_layers=LAYERS, num_heads=4, context=CONTEXT))


def sent_nbytes() -> int:
    """Bytes that the kernel counted as sent, on all interfaces but loopback."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counters = [line.partition(":") for line in lines]
    return sum(int(each.split()[8]) for name, _, each in counters if name.strip() != "lo")


if __name__ == "__main__":
    sys.exit(main())
