"""``tonnage probe``: measure this machine's or this job's links and computation, for the planner."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tonnage.plan import Measured


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the main parser."""
    parser = subparsers.add_parser(
        "probe",
        help="measure links and computation, and write a cluster.toml for plan",
        description="Time each collective over sizes, fit a latency-bandwidth line to each link level, time a matrix "
        "product and a copy, and write what was found for tonnage plan --cluster. Inside a job (torchrun, mpirun, "
        "Slurm) it measures that job's links; alone, it asks torchrun for ranks on this host.",
        epilog="example: tonnage probe --ranks 8 --out cluster.toml; or in a job: "
        "torchrun --nnodes 2 --nproc-per-node 8 -m tonnage probe --out cluster.toml",
    )
    parser.add_argument("--out", metavar="FILE", default="cluster.toml", help="where to write (cluster.toml)")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks on this host (its cards, or 2)")
    parser.add_argument("--largest", metavar="SIZE", default="64MiB", help="largest payload (64MiB)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="timings of each size (5)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write and tell."""
    from tonnage.errors import UsageError
    from tonnage.plan import SIZES, measure_here
    from tonnage.units import parse_size

    largest = parse_size(args.largest)
    sizes = [size for size in SIZES if size <= largest]
    if len(sizes) < 2 or args.repeat < 1:
        raise UsageError(f"--largest {args.largest} leaves fewer than two sizes", hint="use 16KiB or more")
    if "RANK" not in os.environ:
        return _under_torchrun(args)
    measured = measure_here(
        sizes=sizes,
        repeat=args.repeat,
        progress=lambda line: print(line, file=sys.stderr) if sys.stderr.isatty() else None,
    )
    if measured is not None:
        _tell(args, measured)
    return 0


def _under_torchrun(args: argparse.Namespace) -> int:
    """The same command on ranks of this host, started by torchrun itself."""
    import subprocess

    from tonnage.errors import LinkError, require

    torch = require("torch", extra="train", purpose="measuring links")
    ranks = args.ranks or (torch.cuda.device_count() if torch.cuda.is_available() else 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--no-python", sys.executable, "-m", "tonnage", "probe"]
    command += ["--out", args.out, "--largest", args.largest, "--repeat", str(args.repeat)]
    command += ["--json"] if args.json else []
    done = subprocess.run(
        command, check=False, env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    )
    if done.returncode:
        raise LinkError(f"torchrun ended with status {done.returncode}", hint="its own message stands above")
    return 0


def _tell(args: argparse.Namespace, measured: Measured) -> None:
    from tonnage.plan import fit_line, measured_table, to_toml
    from tonnage.units import format_bandwidth, format_size, format_time

    table = measured_table(measured)
    _write(Path(args.out), to_toml(table))
    if args.json:
        timings = [
            {"level": level, "op": s.op, "group_size": s.group_size, "nbytes": s.nbytes, "seconds": s.seconds}
            for level, found in (("scaleup", measured.inside), ("nic", measured.outside))
            for s in found
        ]
        print(json.dumps({"schema": "tonnage.probe/1", **table, "samples": timings}, allow_nan=False))
    else:
        print(
            f"{measured.device}: {measured.matmul / 1e12:.3f} TFLOP/s, memory {format_bandwidth(measured.copy)}"
        )
        for level, samples in (("inside the host", measured.inside), ("between hosts", measured.outside)):
            if not samples:
                print(
                    f"{level}: not measured, {'one host' if level == 'between hosts' else 'one rank a host'}"
                )
                continue
            line = fit_line(samples)
            print(
                f"{level}: latency {format_time(line.latency)}, {format_bandwidth(line.bandwidth)}; the line misses "
                f"by {line.error:.0%} in the median and {line.worst:.0%} at worst over {line.samples} timings"
            )
            for op in dict.fromkeys(s.op for s in samples):
                own = [s for s in samples if s.op == op]
                large = max(own, key=lambda s: s.nbytes)
                rate = format_bandwidth(large.wire / large.seconds)
                print(f"  {op}: {rate} on the bus at {format_size(large.nbytes, binary=True)}")
    print(f"cluster: {args.out}", file=sys.stderr)


def _write(path: Path, text: str) -> None:
    """Write ``text`` whole or not at all."""
    from tonnage.errors import UsageError

    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"can't write the cluster: {error.strerror}", where=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
