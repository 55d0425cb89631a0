"""``tonnage probe``: measure this machine's or this job's links and computation, for the planner."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.cli.plan_options import whole
from tonnage.cli.terminal import console, print_table, write_text

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Sequence

    from tonnage.plan import Measured, Sample

BUSY = 0.25
"""Spread of the rounds of a timing above which the machine is called busy."""

MISSES = 0.3
"""Median miss of a line above which it is called no model of the link."""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the main parser."""
    parser = subparsers.add_parser(
        "probe",
        help="measure links and computation, and write a cluster.toml for plan",
        description="Time each collective over sizes, fit a latency-bandwidth line to each link level, time a matrix "
        "product and a copy, and write what was found for tonnage plan --cluster. Inside a job (torchrun, mpirun, "
        "Slurm) it measures that job's links; alone, it asks torchrun for ranks on this host.",
        epilog="example: tonnage probe --ranks 8 --out cluster.toml; or in a job: "
        "torchrun --nnodes 2 --nproc-per-node 8 -m tonnage probe --out cluster.toml; "
        "then: tonnage plan llama3-8b --cluster cluster.toml",
    )
    parser.add_argument("--out", metavar="FILE", default="cluster.toml", help="where to write (cluster.toml)")
    parser.add_argument("--ranks", type=whole, metavar="N", help="ranks on this host (its cards, or 2)")
    parser.add_argument("--largest", metavar="SIZE", default="64MiB", help="largest payload (64MiB)")
    parser.add_argument("--repeat", type=whole, default=5, metavar="N", help="rounds of timings (5)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    # The ranks of this host hand what they measured to the command that started them.
    parser.add_argument("--hand-to", metavar="FILE", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write and tell."""
    from tonnage.errors import TonnageError, UsageError
    from tonnage.plan import SIZES, measure_here
    from tonnage.units import parse_size

    largest = parse_size(args.largest)
    sizes = [size for size in SIZES if size <= largest]
    if len(sizes) < 2:
        raise UsageError(f"--largest {args.largest} leaves fewer than two sizes", hint="use 4KiB or more")
    if not Path(args.out).absolute().parent.is_dir():
        raise UsageError("there is no such folder to write to", where=args.out, hint="name a file in another")
    if "RANK" not in os.environ:
        _tell(args, _on_this_host(args))
        return 0
    if args.hand_to:
        _end_with_torchrun()
        # It may have gone before that: then so has the folder.
        if not Path(args.hand_to).parent.is_dir():
            return 1
    told = _progress if sys.stderr.isatty() else None
    try:
        measured = measure_here(sizes=sizes, repeat=args.repeat, progress=told)
    except TonnageError as error:
        if not args.hand_to:
            raise
        _hand(args.hand_to, {"error": [error.what, error.where, error.hint]})
        return 0
    if measured is not None and args.hand_to:
        import dataclasses

        _hand(args.hand_to, dataclasses.asdict(measured))
    elif measured is not None:
        _tell(args, measured)
    return 0


def _end_with_torchrun() -> None:
    """Let the kernel end this rank once torchrun is gone: one that waits for a lost peer would stay."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _progress(line: str) -> None:
    # One line that is written over: the terminal shows the round at work, and a log shows nothing.
    print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _hand(path: str, document: dict[str, Any]) -> None:
    write_text(Path(path), json.dumps(document), what="what was measured")


def _on_this_host(args: argparse.Namespace) -> Measured:
    """What ranks of this host measure, started by torchrun itself."""
    from tonnage.errors import LinkError, require

    torch = require("torch", extra="train", purpose="measuring links")
    ranks = args.ranks or (torch.cuda.device_count() if torch.cuda.is_available() else 2)
    with tempfile.TemporaryDirectory(prefix="tonnage-probe-") as folder:
        handed = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--log-dir", str(Path(folder) / "logs")]
        command += ["--no-python", sys.executable, "-m", "tonnage", "probe", "--hand-to", str(handed)]
        command += ["--largest", args.largest, "--repeat", str(args.repeat)]
        status = _run(command)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        if status or not handed.exists():
            raise LinkError(
                f"the ranks of this host ended with status {status}",
                hint="what they said stands above; try --ranks 2",
            )
        return _received(json.loads(handed.read_text("utf-8")))


def _run(command: Sequence[str]) -> int:
    # Two processes that share a core's caches measure each other, not the link: one thread a rank.
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with subprocess.Popen(command, env=environment, start_new_session=True) as ranks:
        try:
            # Asked again and again: a signal that another of torch's threads takes would not end a wait.
            while (status := ranks.poll()) is None:
                time.sleep(0.05)
            return status
        except BaseException:
            # The kernel ends the ranks with torchrun; asked to stop, it would print a traceback of its own.
            ranks.kill()
            raise


def _received(document: dict[str, Any]) -> Measured:
    from tonnage.errors import LinkError
    from tonnage.plan import Measured, Sample

    if "error" in document:
        what, where, hint = document["error"]
        raise LinkError(what, where=where, hint=hint)
    timings = {name: tuple(Sample(**each) for each in document[name]) for name in ("inside", "outside")}
    return Measured(**{**document, **timings})


def _tell(args: argparse.Namespace, measured: Measured) -> None:
    from tonnage.plan import measured_table, to_toml

    table = measured_table(measured)
    write_text(Path(args.out), to_toml(table), what="the cluster")
    if args.json:
        timings = [
            {"level": level, "op": s.op, "group_size": s.group_size, "nbytes": s.nbytes, "seconds": s.seconds}
            for level, found in (("scaleup", measured.inside), ("nic", measured.outside))
            for s in found
        ]
        print(json.dumps({"schema": "tonnage.probe/1", **table, "samples": timings}, allow_nan=False))
    else:
        _show(measured)
    print(f"cluster: {args.out}", file=sys.stderr)


def _show(measured: Measured) -> None:
    from tonnage.units import format_bandwidth

    to = console()
    to.print(
        f"{measured.device}, {measured.world_size} ranks: {measured.matmul / 1e12:.3g} TFLOP/s, "
        f"memory {format_bandwidth(measured.copy)}",
        highlight=False,
    )
    levels = (("inside the host", measured.inside), ("between hosts", measured.outside))
    heads = ["collective", "latency", "bandwidth", "misses by", "at worst", "spread", "bus at largest"]
    for name, samples in levels:
        if samples:
            print_table(to, name, heads, _rows(samples), numbers=tuple(range(1, len(heads))))
            for note in _notes(samples):
                to.print(note, style="yellow", highlight=False)
        else:
            why = "one rank a host" if name == "inside the host" else "one host"
            to.print(f"{name}: not measured, {why}; plan takes a preset's figures", highlight=False)


def _rows(samples: Sequence[Sample]) -> list[tuple[str, ...]]:
    """The line of each collective, and that of all together, which the file holds."""
    from tonnage.errors import LinkError
    from tonnage.plan import fit_line
    from tonnage.units import format_bandwidth, format_time

    rows: list[tuple[str, ...]] = []
    for op in [*dict.fromkeys(s.op for s in samples), "all, as written"]:
        own = [s for s in samples if s.op == op] or list(samples)
        large = max(own, key=lambda s: s.nbytes)
        bus = "" if own == list(samples) else format_bandwidth(large.wire / large.seconds)
        try:
            line = fit_line(own)
        except LinkError:
            rows.append((op, "no line", "", "", "", "", bus))
            continue
        figures = (format_time(line.latency), format_bandwidth(line.bandwidth))
        rows.append((op, *figures, f"{line.error:.0%}", f"{line.worst:.0%}", f"{line.spread:.0%}", bus))
    return rows


def _notes(samples: Sequence[Sample]) -> list[str]:
    from tonnage.plan import fit_line

    line = fit_line(samples)
    notes = []
    if line.spread > BUSY:
        notes.append(
            f"the same call's times spread by {line.spread:.0%}: the machine is busy; probe again when it is "
            "quiet, or with --repeat 20"
        )
    if line.error > MISSES:
        notes.append(
            f"a line that misses by {line.error:.0%} is no model of this link: take its times with care"
        )
    return notes
