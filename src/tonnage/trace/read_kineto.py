"""A Chrome trace (Kineto, and what writes like it) to a rank's columns, block by block."""

from __future__ import annotations

import gc
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tonnage.errors import TonnageError
from tonnage.trace.events import Events, Group, Int64s, Loss, RankTrace, Step
from tonnage.trace.read_rows import Args, Row, events_part, exact_times, rows
from tonnage.trace.read_text import TraceText

_EXACT_BELOW = 2.0**43
"""Microseconds below which a double's error stays under half a nanosecond."""

_BASES_APART = 10**15
"""Nanoseconds (11 days) between an event and the median that only another clock base explains."""

_STEP = re.compile(r"ProfilerStep\s*#(\d+)")
_ANNOTATION = re.compile(r"^(nccl|gloo|rccl|hccl|mccl|xccl|oneccl|mtia|c10d)[:_]|record_param_comms", re.I)
_DEVICE_CATEGORIES = frozenset(("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"))
_DISTRIBUTED = re.compile(r'"distributedInfo"\s*:\s*')
_CLOSED = re.compile(rb"\}\s*,?\s*\]")
_NO_ARGS = Args()


@dataclass(slots=True)
class _Columns:
    """What was read so far: an array a block and column, and the tables of texts."""

    names: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    threads: dict[tuple[str, str], int] = field(default_factory=dict)
    thread_names: dict[int, str] = field(default_factory=dict)
    blocks: list[dict[str, Any]] = field(default_factory=list)
    details: dict[int, dict[str, object]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    open: dict[tuple[str, str], list[tuple[Row, int]]] = field(default_factory=dict)
    num_events: int = 0

    def add(self, found: list[Row], text: bytes) -> None:
        """Keep a block's complete events; join begins and ends; count the rest."""
        complete = [row for row in found if row.ph == "X"]
        exact = _exact(found, text)
        if len(complete) < len(found):
            self._others(found, exact)
        start, duration = _times(
            complete,
            None
            if exact is None
            else [value for row, value in zip(found, exact, strict=True) if row.ph == "X"],
        )
        self._keep(complete, start, duration)

    def _others(self, found: list[Row], exact: Sequence[int] | None) -> None:
        self.skipped.update(row.ph for row in found if row.ph not in ("X", "B", "E"))
        joined: list[tuple[Row, int, int]] = []
        for i in [i for i, row in enumerate(found) if row.ph in "MBE"]:
            row = found[i]
            if row.ph == "M" and row.name == "thread_name" and row.args is not None:
                self.thread_names[self._thread(row)] = _text(row.args.name)
            if row.ph not in ("B", "E") or math.isnan(row.ts):
                continue
            at = exact[i] if exact is not None else round(row.ts * 1000)
            stack = self.open.setdefault((str(row.pid), str(row.tid)), [])
            if row.ph == "B":
                stack.append((row, at))
            elif stack:
                begin, begun = stack.pop()
                joined.append((begin, begun, at - begun))
            else:
                self.lost["events end without a beginning"] += 1
        if joined:
            self._keep(
                [row for row, _, _ in joined],
                np.asarray([at for _, at, _ in joined], np.int64),
                np.asarray([took for _, _, took in joined], np.int64),
            )

    def _thread(self, row: Row) -> int:
        return self.threads.setdefault((str(row.pid), str(row.tid)), len(self.threads))

    def _keep(self, found: list[Row], start: Int64s, duration: Int64s) -> None:
        good = duration >= 0
        if not good.all():
            self.lost["events have no time or a negative duration"] += int((~good).sum())
            found = [row for row, keep in zip(found, good.tolist(), strict=True) if keep]
            start, duration = start[good], duration[good]
        if not found:
            return
        args = [row.args or row.attr or _NO_ARGS for row in found]
        names, categories, threads = self.names, self.categories, self.threads
        name = [names.setdefault(row.name, len(names)) for row in found]
        category = [categories.setdefault(row.cat, len(categories)) for row in found]
        keys = [(row.pid, row.tid) for row in found]
        numbers = {key: threads.setdefault((str(key[0]), str(key[1])), len(threads)) for key in set(keys)}
        self._detail(found, args)
        self.blocks.append(
            {
                "start": start,
                "duration": duration,
                "name": np.asarray(name, np.int32),
                "category": np.asarray(category, np.int32),
                "thread": np.asarray([numbers[key] for key in keys], np.int32),
                "device": _int64s([each.device for each in args]),
                "stream": _int64s([each.stream for each in args]),
                "correlation": _int64s([each.correlation for each in args]),
                "external": _int64s([each.external for each in args]),
                "nbytes": _int64s([max(each.nbytes, each.size, each.bytes_of) for each in args]),
            }
        )
        self.num_events += len(found)

    def _detail(self, found: list[Row], args: list[Args]) -> None:
        speaks = {name for name in {row.name for row in found} if _ANNOTATION.search(name)}
        for i, (row, each) in enumerate(zip(found, args, strict=True)):
            if each.collective or each.grouped or (row.name in speaks and each.types):
                self.details[self.num_events + i] = _details(each)

    def events(self) -> Events:
        """The columns, by start."""
        for stack in self.open.values():
            if stack:
                self.lost["events begin without an end"] += len(stack)
        joined = {key: np.concatenate([block[key] for block in self.blocks]) for key in self.blocks[0]}
        self.blocks.clear()
        order = np.argsort(joined["start"], kind="stable")
        columns = {key: value[order] for key, value in joined.items()}
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        columns["stream"], columns["device"] = self._on_device(columns)
        on_host = columns["stream"] < 0
        columns["nbytes"][on_host] = -1
        return Events(
            **columns,
            names=tuple(self.names),
            categories=tuple(each.lower() for each in self.categories),
            threads=tuple(self.threads),
            thread_names=dict(self.thread_names),
            details={int(place[i]): each for i, each in self.details.items()},
        )

    def _on_device(self, columns: dict[str, Any]) -> tuple[Any, Any]:
        """Stream and device; a kernel without a stream has that of its thread's number."""
        kernels = np.asarray([each.lower() in _DEVICE_CATEGORIES for each in self.categories], np.bool_)
        stream, device = columns["stream"], columns["device"]
        lacks = (stream < 0) & kernels[columns["category"]]
        tids = np.asarray([_number(tid, i) for i, (_, tid) in enumerate(self.threads)], np.int64)
        pids = np.asarray([_number(pid, 0) for pid, _ in self.threads], np.int64)
        stream = np.where(lacks, tids[columns["thread"]], stream)
        device = np.where(stream < 0, -1, np.where(device < 0, pids[columns["thread"]], device))
        return stream, device.astype(np.int32)


def read_kineto(path: Path, *, progress: Callable[[int], None] | None = None) -> RankTrace:
    """The rank in this file; its number is -1 where the file doesn't give one.

    Raises:
        TonnageError: nothing in it is an event.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # Rows are plain and die with their block; looking for circles costs a third of the time.
    try:
        return _read(TraceText(path, progress))
    finally:
        if was_enabled:
            gc.enable()


def _read(text: TraceText) -> RankTrace:
    columns = _Columns()
    tail = b""
    for block, is_last in text.blocks():
        part = events_part(block) if is_last else block
        columns.add(rows(block, is_last=is_last, lost=columns.lost), part)
        if is_last:
            tail = block[len(part) :]
            if b'"traceEvents"' in tail:
                columns.lost["further documents in the same file were left out"] += 1
            elif not tail and text.head.lstrip()[:1] == b"{" and not _CLOSED.search(block):
                _miss_end(columns.lost)
    if not columns.num_events:
        raise TonnageError(
            "no events in this trace", where=str(text.path), hint="give the file that the profiler exported"
        )
    head = _header(text.head, tail)
    return _rank_trace(text, head, columns)


def _miss_end(lost: Counter[str]) -> None:
    if not any("cut off" in each for each in lost):
        lost["end of the file is missing (no whole event is known to be lost)"] += 1


def _rank_trace(text: TraceText, head: dict[str, Any], columns: _Columns) -> RankTrace:
    events = columns.events()
    info = head.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    losses = [*text.losses, *(_loss(what, count, events) for what, count in columns.lost.items())]
    far = np.abs(events.start - np.median(events.start).astype(np.int64)) > _BASES_APART
    if far.any():
        losses.append(Loss(what="events are on another clock and were left out", num_events=int(far.sum())))
        events = events.select(~far)
    devices = head.get("deviceProperties") or [{}]
    rank = info.get("rank")
    return RankTrace(
        rank=rank if isinstance(rank, int) else -1,
        world_size=int(info.get("world_size") or 0),
        events=events,
        groups=_groups(info.get("pg_config")),
        steps=_steps(events),
        losses=tuple(losses),
        source=str(text.path),
        rank_basis="file" if isinstance(rank, int) else "order",
        backend=str(info.get("backend", "")),
        device_name=str(devices[0].get("name", "")) if isinstance(devices[0], dict) else "",
        skipped=dict(columns.skipped),
    )


def _loss(what: str, count: int, events: Events) -> Loss:
    at_end = "cut off" in what or what.startswith("end of")
    where = f"after {int(events.stop.max()) * 1e-9:.6f} s on the trace's clock" if at_end else ""
    return Loss(what=what, num_events=-1 if what.startswith(("end", "further")) else count, where=where)


def _steps(events: Events) -> tuple[Step, ...]:
    marks = np.flatnonzero(events.where_name(lambda name: bool(_STEP.match(name))) & (events.stream < 0))
    found: dict[int, Step] = {}
    for i in marks.tolist():
        match = _STEP.match(events.name_of(i))
        assert match
        step = Step(number=int(match[1]), start=int(events.start[i]), stop=int(events.stop[i]))
        known = found.get(step.number)
        # A step may be marked on several threads, on some for microseconds; the longest is the step.
        if known is None or step.stop - step.start > known.stop - known.start:
            found[step.number] = step
    return tuple(sorted(found.values(), key=lambda step: step.start))


def _groups(config: object) -> tuple[Group, ...]:
    found = []
    for each in config if isinstance(config, list) else []:
        if not isinstance(each, dict):
            continue
        ranks = each.get("ranks") or []
        ranks = ranks if isinstance(ranks, list) and all(isinstance(r, int) for r in ranks) else []
        found.append(
            Group(
                name=str(each.get("pg_name", "")),
                description=str(each.get("pg_desc", "")),
                ranks=tuple(ranks),
                size=int(each.get("pg_size") or len(ranks)),
            )
        )
    return tuple(found)


def _header(head: bytes, tail: bytes) -> dict[str, Any]:
    """What the file says beside its events, before and after them."""
    found: dict[str, Any] = {}
    for raw in (head, tail):
        text = raw.decode("utf-8", "replace")
        for key in ("distributedInfo", "deviceProperties"):
            at = re.search(rf'"{key}"\s*:\s*', text)
            if at:
                try:
                    found[key] = json.JSONDecoder(strict=False).raw_decode(text, at.end())[0]
                except ValueError:
                    continue
    return found


def _exact(found: list[Row], text: bytes) -> list[int] | None:
    """Nanoseconds of each row's ``ts`` from its text, where a double can't hold them."""
    times = [row.ts for row in found if row.ph in ("X", "B", "E") and row.ts >= _EXACT_BELOW]
    if not times or all(each.is_integer() for each in times):
        return None
    written = exact_times(text)
    if written is None or len(written) != len(found):
        return None
    return [int(Decimal(each) * 1000) if each else 0 for each in written]


def _times(found: list[Row], exact: list[int] | None) -> tuple[Int64s, Int64s]:
    """Start and duration in nanoseconds; a duration of -1 marks what has none."""
    start = np.asarray([row.ts for row in found], np.float64)
    took = np.asarray([row.dur for row in found], np.float64)
    good = np.isfinite(start) & np.isfinite(took) & (np.abs(start) < 9e15) & (np.abs(took) < 9e15)
    start, took = np.where(good, start, 0.0), np.where(good, took, -1.0)
    # Whole microseconds of today's clock (1.7e15) times 1000 don't fit a double; they fit an integer.
    whole = np.floor(start)
    nanoseconds = whole.astype(np.int64) * 1000 + np.rint((start - whole) * 1000).astype(np.int64)
    if exact is not None:
        nanoseconds = np.asarray(exact, np.int64)
    return nanoseconds, np.rint(took * 1000).astype(np.int64)


def _details(each: Args) -> dict[str, object]:
    texts: dict[str, object] = {
        "Collective name": each.collective,
        "dtype": each.dtype,
        "Process Group Name": each.group,
        "Process Group Description": each.group_words,
        "CollGroup": each.grouped,
    }
    numbers = {
        "In msg nelems": each.num_in,
        "Out msg nelems": each.num_out,
        "Group size": each.group_size,
        "Seq": each.seq,
    }
    raws = {
        "Input Dims": each.dims,
        "Input type": each.types,
        "Process Group Ranks": each.group_ranks,
        "In split size": each.in_split,
        "Out split size": each.out_split,
    }
    found = {key: value for key, value in texts.items() if value}
    found |= {key: value for key, value in numbers.items() if value >= 0}
    return found | {key: msgspec.json.decode(raw) for key, raw in raws.items() if bytes(raw)}


def _int64s(values: list[int]) -> Int64s:
    try:
        return np.asarray(values, np.int64)
    except OverflowError:
        # An unsigned 64-bit number keeps its bits; what is larger still is no number of ours.
        return np.asarray([each if -(2**63) <= each < 2**63 else -1 for each in values], np.int64)


def _number(text: str, default: int) -> int:
    found = re.search(r"\d{1,9}$", text)
    return int(found[0]) if found else default


def _text(raw: msgspec.Raw) -> str:
    return str(msgspec.json.decode(raw)) if bytes(raw) else ""
