"""The run as a trace-event file that ui.perfetto.dev opens: all ranks on one clock, waiting told from moving.

A process stands for a rank, a thread for a stream (or a host thread) and one for its steps. From the
rank that came last to a collective, arrows lead to those who waited for it.

Source: the Trace Event Format that Perfetto reads (complete events, metadata, flow events).
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

from tonnage.errors import TonnageError
from tonnage.trace.lanes import Lanes, lanes
from tonnage.trace.replay_job import Job

_STEPS = 0
"""Number of the thread that holds a rank's steps; lanes follow from 1."""


def write_perfetto(job: Job, path: str | Path) -> Path:
    """Write the file whole or not at all, compressed where its name ends in ``.gz``; returns its path.

    Raises:
        TonnageError: it can't be written there.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as raw:
            if target.suffix == ".gz":
                # Without a time and name the same trace gives the same file.
                with gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw, mtime=0) as packed:
                    packed.writelines(_lines(job))
            else:
                raw.writelines(_lines(job))
        temporary.replace(target)
    except OSError as error:
        raise TonnageError(
            f"can't write the Perfetto file: {error.strerror}",
            where=str(target),
            hint="name a file in a folder that exists",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _lines(job: Job) -> Iterator[bytes]:
    yield b'{"displayTimeUnit":"ns","traceEvents":[\n'
    first = True
    for event in _events(job, lanes(job, budget=None)):
        yield (b"" if first else b",\n") + json.dumps(event, separators=(",", ":")).encode()
        first = False
    yield b"\n]}\n"


def _events(job: Job, shown: Lanes) -> Iterator[dict[str, object]]:
    for rank in job.ranks:
        yield _meta(rank, _STEPS, "process_name", f"rank {rank}")
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        yield _meta(rank, _STEPS, "thread_name", "steps")
    for lane, (name, rank) in enumerate(zip(shown.names, shown.ranks, strict=True)):
        yield _meta(rank, lane + 1, "thread_name", name.partition(f"rank {rank} ")[2])
    for rank, number, start, stop in shown.steps:
        yield _slice(rank, _STEPS, f"step {number}", start, stop, "step")
    flow = _Flows()
    for each in shown.pieces:
        rank, thread = shown.ranks[each.lane], each.lane + 1
        name = f"wait for {each.label}" if each.kind == "waiting" else each.label
        yield _slice(rank, thread, name, each.start, each.stop, each.kind)
        if each.kind == "moving":
            flow.add(each.label, each.start, rank, thread)
    yield from flow.events()


def _meta(pid: int, tid: int, kind: str, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, start: float, stop: float, category: str) -> dict[str, object]:
    duration = round(stop - start, 3)
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start, "dur": duration}


class _Flows:
    """Arrows between the pieces of one transfer, which all begin to move at the same moment."""

    def __init__(self) -> None:
        self._met: dict[tuple[str, float], list[tuple[int, int]]] = {}

    def add(self, label: str, start: float, rank: int, thread: int) -> None:
        self._met.setdefault((label, start), []).append((rank, thread))

    def events(self) -> Iterator[dict[str, object]]:
        for number, ((label, start), members) in enumerate(self._met.items()):
            for at, (rank, thread) in enumerate(members if len(members) > 1 else ()):
                arrow: dict[str, object] = {"ph": "s" if at == 0 else "f", "id": number, "name": label}
                yield {**arrow, "cat": "meet", "pid": rank, "tid": thread, "ts": start, "bp": "e"}
