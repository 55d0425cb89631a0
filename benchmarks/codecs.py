"""What gradient codecs cost and save, and on which links they pay.

Claims: int8 is 3.94 times smaller than fp32, within 2 %, and encodes with error feedback at more than
1 GB/s of fp32 on one core; bf16 is twice as small; the lossless codec gives back the same bits. Measured
on gradients of the demo's GPT after a few real steps. Speeds are also given as a part of what copying the
same gradients takes, which is the least that anything that reads and writes them all can take.

    python benchmarks/codecs.py                      # ratios, speeds, and a grid of predictions
    python benchmarks/codecs.py --check              # the predictions against real exchanges on shaped links

``--check`` runs ranks on hosts with links of each rate (see ``tonnage lab``). A step there computes by
sleeping, as when an accelerator does, while one thread encodes, exchanges by Gloo and adds up, bucket by
bucket. It compares which codec was predicted to be fastest with which one was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tonnage.engine.compress import (
    AUTO_CODECS,
    CODEC_NAMES,
    LEAST_GAIN,
    NO_CODEC,
    CodecSpeed,
    Exchange,
    choose,
    make_codec,
    measure_codec,
    predict_step,
)
from tonnage.units import format_rate, format_time, parse_rate

LINKS = ("100mbit", "200mbit", "500mbit", "1gbit", "2.5gbit", "10gbit", "25gbit", "100gbit", "400gbit")
SHAPED = ("100mbit", "300mbit", "1gbit", "2gbit")
LATENCY = 2e-4
BUCKETS = 12


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps before gradients are taken")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--compute", type=float, default=0.3, help="seconds of computation a step")
    parser.add_argument("--check", action="store_true", help="check predictions on shaped links")
    parser.add_argument("--links", nargs="*", default=list(SHAPED), help="rates for --check")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker is not None:
        return work(args.worker)
    gradients = real_gradients(args.steps)
    copy = copy_rate(gradients)
    speeds = [measure_codec(make_codec(name), gradients, clock=time.perf_counter) for name in CODEC_NAMES]
    results: dict[str, Any] = {"copy": copy, "codecs": [as_dict(speed) for speed in speeds]}
    show_codecs(speeds, copy, gradients)
    chosen = [speed for speed in speeds if speed.name in AUTO_CODECS]
    show_grid(gradients.nbytes, args.ranks, args.compute, speeds, chosen)
    holds = claims(speeds)
    if args.check:
        results["check"] = [check(link, args.ranks, args.compute, chosen) for link in args.links]
        right = sum(case["right"] for case in results["check"])
        print(f"predictions right on {right} of {len(args.links)} links")
    if args.json:
        print(json.dumps(results))
    return 0 if holds else 1


def real_gradients(steps: int) -> torch.Tensor:
    """Flat gradients of the demo's GPT, 3.3 M parameters, after some steps on real text."""
    from tonnage.demo.model import Gpt, GptShape, next_byte_loss
    from tonnage.demo.text import read_text

    torch.manual_seed(0)
    data = torch.frombuffer(bytearray(read_text(None)), dtype=torch.uint8)
    model = Gpt(GptShape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - 129, (4,)).tolist()
        optimizer.zero_grad()
        next_byte_loss(model, torch.stack([data[s : s + 129] for s in starts]).long()).backward()
        optimizer.step()
    return torch.cat([p.grad.reshape(-1) for p in reversed(list(model.parameters()))])


def copy_rate(gradients: torch.Tensor) -> float:
    into, taken = torch.empty_like(gradients), []
    for _ in range(9):
        start = time.perf_counter()
        into.copy_(gradients)
        taken.append(time.perf_counter() - start)
    return gradients.nbytes / statistics.median(taken)


def as_dict(speed: CodecSpeed) -> dict[str, object]:
    return {name: getattr(speed, name) for name in ("name", "ratio", "encode", "decode", "error")}


def show_codecs(speeds: list[CodecSpeed], copy: float, gradients: torch.Tensor) -> None:
    print(
        f"{gradients.nbytes / 1e6:.1f} MB of fp32 gradients, one core; a copy runs at {copy / 1e9:.1f} GB/s"
    )
    print(f"{'codec':<12}{'ratio':>8}{'encode':>12}{'/ copy':>8}{'decode':>12}{'/ copy':>8}{'error':>9}")
    for s in speeds:
        print(
            f"{s.name:<12}{s.ratio:8.2f}{s.encode / 1e6:7.0f} MB/s{s.encode / copy:8.2f}"
            f"{s.decode / 1e6:7.0f} MB/s{s.decode / copy:8.2f}{s.error:9.1e}"
        )


def show_grid(
    nbytes: int, ranks: int, compute: float, speeds: list[CodecSpeed], chosen: list[CodecSpeed]
) -> None:
    """Predicted steps over links, with gradients of 40 times the sample: a model of 132 M parameters."""
    print(
        f"\nseconds a step, predicted: {ranks} ranks, {40 * nbytes / 1e6:.0f} MB, {format_time(compute)} of computation"
    )
    print(f"{'link':<12}" + "".join(f"{s.name:>12}" for s in [NO_CODEC, *speeds]) + "  auto")
    for link in LINKS:
        step = exchange_of(40 * nbytes, ranks, link, compute)
        cells = "".join(f"{predict_step(step, s).step:12.3f}" for s in [NO_CODEC, *speeds])
        print(f"{format_rate(parse_rate(link)):<12}{cells}  {choose(step, chosen).name}")


def exchange_of(nbytes: int, ranks: int, link: str, compute: float, buckets: int = BUCKETS) -> Exchange:
    return Exchange(
        nbytes=nbytes,
        num_ranks=ranks,
        num_buckets=buckets,
        latency=LATENCY,
        bandwidth=parse_rate(link),
        compute=compute,
        busy=0.0,
        both_legs=True,
    )


def claims(speeds: list[CodecSpeed]) -> bool:
    by_name = {speed.name: speed for speed in speeds}
    told = {
        "int8 is 3.94 times smaller, within 2 %": abs(by_name["int8"].ratio / 3.94 - 1) < 0.02,
        "int8 encodes at more than 1 GB/s": by_name["int8"].encode > 1e9,
        "bf16 is twice as small": abs(by_name["bf16"].ratio / 2 - 1) < 0.001,
        "lossless is smaller": by_name["lossless"].ratio > 1.1,
    }
    for claim, holds in told.items():
        print(f"claim: {claim}: {'holds' if holds else 'DOES NOT HOLD'}")
    return all(told.values())


# Predictions against real exchanges.


def check(link: str, ranks: int, compute: float, speeds: list[CodecSpeed]) -> dict[str, Any]:
    from tonnage.lab import Lab

    sample = real_gradients(5)
    task = {"compute": compute, "numel": 3 * sample.numel(), "codecs": ["none", *(s.name for s in speeds)]}
    found: list[dict[str, float]] = []
    with Lab(ranks, parse_rate(link)) as lab:
        result = lab.run(
            [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(task)],
            timeout=240,
            env={"OMP_NUM_THREADS": "1"},
            on_stdout=lambda rank, line: found.append(json.loads(line)) if line.startswith("{") else None,
        )
    if result.exit_code or not found:
        raise SystemExit(f"the ranks on {link} failed")
    step = exchange_of(4 * BUCKETS * ranks * shard_numel(task["numel"], ranks), ranks, link, compute)
    measured = found[-1]
    predicted = {s.name: predict_step(step, s).step for s in [NO_CODEC, *speeds]}
    chosen = choose(step, speeds).name
    pays = {name: measured[name] < (1 - LEAST_GAIN) * measured["none"] for name in measured}
    said = {name: predicted[name] < (1 - LEAST_GAIN) * predicted["none"] for name in pays}
    differ = [name for name in pays if pays[name] != said[name]]
    regret = measured[chosen] / min(measured.values()) - 1
    right = (chosen != "none") == any(pays.values()) and regret <= LEAST_GAIN
    print(
        f"{link}: auto takes {chosen}, {regret:.1%} behind the fastest: {'right' if right else 'WRONG'}"
        + (f"; near the border of paying, unlike predicted: {', '.join(differ)}" if differ else "")
    )
    for name in predicted:
        print(f"  {name:<10} predicted {predicted[name]:.3f} s, measured {measured[name]:.3f} s")
    return {"link": link, "right": right, "chosen": chosen, "predicted": predicted, "measured": measured}


def shard_numel(numel: int, ranks: int) -> int:
    """Elements of one rank's shard of one bucket."""
    return numel // BUCKETS // ranks // 1024 * 1024


def work(task: dict[str, Any]) -> int:
    """One rank: steps of sleeping beside exchanges, with each codec in turn."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = shard_numel(task["numel"], ranks)
    # The same gradients over and over: a sample of real ones, for the lossless codec's sake.
    sample = real_gradients(5)
    times: dict[str, list[float]] = {name: [] for name in task["codecs"]}
    runs = {name: Direct(name, rank, ranks, size, sample) for name in task["codecs"]}
    for round_ in range(4):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            thread = threading.Thread(target=run.step)
            thread.start()
            time.sleep(task["compute"])
            thread.join()
            dist.barrier()
            if round_:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps({name: statistics.median(each) for name, each in times.items()}), flush=True)
    dist.destroy_process_group()
    return 0


class Direct:
    """Reduce-scatter and all-gather by direct exchange, both compressed, as a pipeline over the buckets.

    While one bucket's bytes travel the next one is encoded. Receives are posted for the longest wire that
    there can be: Gloo takes a shorter message, and the wire itself says how long it is.
    """

    def __init__(self, name: str, rank: int, ranks: int, size: int, sample: torch.Tensor) -> None:
        self.codec = None if name == "none" else make_codec(name)
        self.rank, self.ranks, self.size = rank, ranks, size
        self.peers = [p for p in range(ranks) if p != rank]
        self.gradient = sample[: size * ranks].clone()
        self.residual = torch.zeros(BUCKETS, size * ranks)
        self.total = torch.zeros(size)
        most = self.codec.max_wire_nbytes(size) if self.codec else 4 * size
        self.sent = torch.zeros(2 * BUCKETS, ranks, most, dtype=torch.uint8)
        self.got = torch.zeros(2 * BUCKETS, ranks, most, dtype=torch.uint8)
        self.open: dict[int, list[Any]] = {}

    def step(self) -> None:
        """All buckets once."""
        for k in range(BUCKETS + 2):
            if k < BUCKETS:
                self.start(2 * k, [self.chunk(p) for p in range(self.ranks)], self.residual[k])
            if 1 <= k <= BUCKETS:
                self.reduce(2 * (k - 1))
                self.start(2 * k - 1, [self.total] * self.ranks, None)
            if k >= 2:
                self.gather(2 * k - 3)

    def start(self, leg: int, chunks: list[torch.Tensor], residual: torch.Tensor | None) -> None:
        """Encode for each peer, and send while what they sent comes in."""
        import torch.distributed as dist

        works = [dist.irecv(self.got[leg, p], p, tag=leg) for p in self.peers]
        for p in self.peers:
            owed = None if residual is None else residual[p * self.size : (p + 1) * self.size]
            wire = self.sent[leg, p]
            used = wire.numel()
            if self.codec is None:
                wire.view(torch.float32).copy_(chunks[p])
            else:
                used = self.codec.encode(chunks[p], wire, None if self.codec.lossless else owed)
            works.append(dist.isend(wire[:used], p, tag=leg))
        self.open[leg] = works

    def reduce(self, leg: int) -> None:
        """The mean of our shard."""
        for each in self.open.pop(leg):
            each.wait()
        own = self.chunk(self.rank)
        parts = [own if r == self.rank else self.got[leg, r] for r in range(self.ranks)]
        if self.codec:
            self.codec.reduce(parts, self.total, scale=1 / self.ranks)
        else:
            floats = [p if p.dtype == torch.float32 else p.view(torch.float32) for p in parts]
            torch.add(floats[0], floats[1], out=self.total)
            for each in floats[2:]:
                self.total += each

    def gather(self, leg: int) -> None:
        """What the others' shards became."""
        for each in self.open.pop(leg):
            each.wait()
        for p in self.peers:
            if self.codec:
                self.codec.decode(self.got[leg, p], self.total)

    def chunk(self, peer: int) -> torch.Tensor:
        """Our gradients of what ``peer`` owns."""
        return self.gradient[peer * self.size : (peer + 1) * self.size]


if __name__ == "__main__":
    sys.exit(main())
