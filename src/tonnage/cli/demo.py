"""``tonnage demo``: train a small GPT three ways, and see where the time went."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tonnage.demo import Progress

_EPILOG = """\
example:
  tonnage demo --ranks 4 --link 500mbit --html demo.html
  tonnage demo --text ~/notes --steps 20 --out ledgers
"""


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small GPT three ways and see where the time went",
        description=(
            "Trains the same 3.3 M-parameter GPT on real text with the naive way, torch DDP and Tonnage, "
            "on real ranks over slow links, and reports from their ledgers."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="processes (default 4)")
    parser.add_argument(
        "--link",
        default="500mbit",
        metavar="RATE",
        help="speed of each rank's link, or none (default 500mbit)",
    )
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps of each way (default 40)")
    parser.add_argument(
        "--text", type=Path, metavar="FOLDER", help="text to train on (default: Python's own library)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML file")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the three ledgers in this folder")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, then report."""
    import json

    from rich.console import Console

    from tonnage.demo import WAY_NAMES, run_demo
    from tonnage.report import print_report, report_json, write_html
    from tonnage.units import parse_rate

    _check_target(args.html)
    errors = Console(stderr=True)
    with _bars(errors, WAY_NAMES, args.steps) as shown:
        ledgers = run_demo(
            ranks=args.ranks,
            link=None if args.link.lower() == "none" else parse_rate(args.link),
            steps=args.steps,
            text=args.text,
            out=args.out,
            on_start=lambda note: errors.print(f"{args.ranks} ranks: {note}", highlight=False),
            on_progress=shown,
        )
    if args.json:
        print(json.dumps(report_json(ledgers)))
    else:
        print_report(ledgers, Console())
    if args.html:
        errors.print(f"the pictures: {write_html(ledgers, args.html)}", highlight=False, soft_wrap=True)
    if args.out:
        errors.print(f"the ledgers: {args.out}/*.ledger", highlight=False, soft_wrap=True)
    return 0


def _check_target(path: Path | None) -> None:
    from tonnage.errors import UsageError

    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"no folder {str(path.parent)!r} to write {path.name} into", hint="make it first")


class _Plain:
    """Progress for logs: one line for every tenth step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def __call__(self, progress: Progress) -> None:
        if progress.step % 10 == 0 or progress.step == self._steps:
            print(
                f"{progress.way:8} step {progress.step}/{self._steps}  loss {progress.loss:.3f}  "
                f"{progress.seconds:.2f} s",
                file=sys.stderr,
                flush=True,
            )


def _bars(console: Any, names: tuple[str, ...], steps: int) -> AbstractContextManager[Any]:
    """A bar for each way on a terminal, lines elsewhere."""
    return _Live(console, names, steps) if console.is_terminal else nullcontext(_Plain(steps))


class _Live:
    """Bars with the loss and the last step's time."""

    def __init__(self, console: Any, names: tuple[str, ...], steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("{task.description:8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks = {name: self._bars.add_task(name, total=steps, told="") for name in names}

    def __enter__(self) -> _Live:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        told = f"loss {progress.loss:.3f}  {progress.seconds:.2f} s a step"
        self._bars.update(self._tasks[progress.way], completed=progress.step, told=told)
