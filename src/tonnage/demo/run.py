"""The demo as a whole: hosts, ranks on them, and the ledgers that they leave."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.demo.text import read_text
from tonnage.errors import TonnageError, UsageError, require
from tonnage.lab import Hosts, RunResult, open_lab
from tonnage.ledger import Ledger, read_ledger, write_ledger

WAY_NAMES = ("naive", "ddp", "tonnage")
MOST_RANKS = 16

_ERROR_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One step of one way has ended."""

    way: str
    step: int
    loss: float
    seconds: float


def run_demo(
    *,
    ranks: int,
    link: float | None,
    steps: int,
    text: Path | None,
    out: Path | None,
    on_start: Callable[[str], None],
    on_progress: Callable[[Progress], None],
) -> list[Ledger]:
    """Train the naive way, DDP and Tonnage on real ranks; returns their ledgers in that order.

    Args:
        ranks: processes, each on a host of its own where the machine allows it.
        link: bytes per second of each host's link, or ``None`` for as fast as it goes.
        steps: training steps of each way.
        text: folder to train on; the standard library when ``None``.
        out: folder to keep the ledgers in as well; made if missing.
        on_start: gets one line that says what the ranks' links are.
        on_progress: called after each step.

    Raises:
        UsageError: numbers that can't be meant, or no text.
        MissingExtra: torch is not installed.
        TonnageError: a rank failed; tells its last lines.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise UsageError(
            f"--ranks {ranks}", hint=f"give 1 to {MOST_RANKS} ranks: they share this machine's cores"
        )
    if steps < 2:
        raise UsageError(f"--steps {steps}", hint="give at least 2 steps: the first only warms up")
    require("torch", extra="train", purpose="the demo")
    read_text(text)  # an error now is better than one from every rank
    with tempfile.TemporaryDirectory(prefix="tonnage-demo-") as scratch, open_lab(ranks, link) as hosts:
        on_start(hosts.note)
        _train(hosts, Path(scratch), link=link, steps=steps, text=text, on_progress=on_progress)
        ledgers = [read_ledger(Path(scratch) / f"{name}.ledger") for name in WAY_NAMES]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, ledger in zip(WAY_NAMES, ledgers, strict=True):
            write_ledger(ledger, out / f"{name}.ledger")
    return ledgers


def _train(
    hosts: Hosts,
    scratch: Path,
    *,
    link: float | None,
    steps: int,
    text: Path | None,
    on_progress: Callable[[Progress], None],
) -> None:
    facts: dict[str, Any] = {"link_note": hosts.note, "link_rate": link if hosts.shaped else None}
    command = [
        *(sys.executable, "-m", "tonnage.demo.worker", "--out", str(scratch), "--steps", str(steps)),
        *("--interface", hosts.interface, "--link", "nic" if hosts.isolated else "loopback"),
        *("--facts", json.dumps(facts)),
        *(("--text", str(text.resolve())) if text else ()),
    ]
    last_lines: dict[int, deque[str]] = {}

    def on_stdout(rank: int, line: str) -> None:
        try:
            on_progress(Progress(**json.loads(line)))
        except (ValueError, TypeError):
            on_stderr(rank, line)

    def on_stderr(rank: int, line: str) -> None:
        last_lines.setdefault(rank, deque(maxlen=_ERROR_LINES)).append(line)

    result = hosts.run(command, env=_ENVIRONMENT, on_stdout=on_stdout, on_stderr=on_stderr)
    if result.exit_code != 0:
        raise _failure(result, last_lines)


_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _failure(result: RunResult, last_lines: Mapping[int, deque[str]]) -> TonnageError:
    rank = result.first_failed if result.first_failed is not None else 0
    code = result.codes[rank]
    how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
    said = "\n".join(last_lines.get(rank, ()))
    return TonnageError(f"rank {rank} of the demo {how}", where=f"its last lines:\n{said}" if said else "")
