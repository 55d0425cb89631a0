"""What a replay needs of a trace: each rank's transfers, which of them are one collective, whose clock is off."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tonnage.trace.build import Work
from tonnage.trace.clocks import clock_offsets
from tonnage.trace.events import (
    Bools,
    BytesBasis,
    Collectives,
    Events,
    Int64s,
    RankTrace,
    Step,
    Trace,
)

Meets = tuple[tuple[tuple[int, int], ...], ...]
"""For each collective that several ranks took part in: position of the rank, number of its transfer."""

_KERNEL = re.compile(
    r"nccl|rccl|hccl|oneccl|msccl|deep_?ep|(internode|intranode)::|nvshmem|all_?reduce", re.I
)
_COPY = re.compile(r"^(memcpy|memset|hip_?mem|dma|copybuffer)", re.I)
_NO_WORK = re.compile(r"^event_(wait|record)$")
"""Rows of a stream that stand for its waiting, as MTIA writes them: never busy time."""

_OPS = (
    ("all-reduce", re.compile(r"all_?reduce", re.I)),
    ("reduce-scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all-gather", re.compile(r"all_?gather", re.I)),
    ("all-to-all", re.compile(r"all_?to_?all|sendrecv|ep::|dispatch|combine", re.I)),
    ("broadcast", re.compile(r"broadcast", re.I)),
    ("barrier", re.compile(r"barrier", re.I)),
    ("recv", re.compile(r"recv", re.I)),
    ("send", re.compile(r"send", re.I)),
    ("reduce", re.compile(r"reduce", re.I)),
)
_BYTES = (
    (8, re.compile(r"long|double|int64|float64", re.I)),
    (2, re.compile(r"half|bfloat16|float16|short|int16|^bf16|^fp16", re.I)),
    (1, re.compile(r"char|bool|byte|int8|float8|fp8|^signed|^unsigned", re.I)),
    (4, re.compile(r"float|int|^fp32", re.I)),
)


def works(trace: Trace) -> tuple[tuple[Work, ...], Meets]:
    """Each rank's work, and the collectives that several of them took part in."""
    found = [_work(each) for each in trace.ranks]
    meets = matched([each.collectives for each in found], _peers(trace.ranks))
    clocks = clock_offsets([each.collectives for each in found], meets)
    shifted = tuple(
        replace(each, offset=clock.offset, offset_error=clock.error)
        for each, clock in zip(found, clocks, strict=True)
    )
    return shifted, meets


def element_size(dtype: str) -> int:
    """Bytes of one element; 0 where the name says nothing."""
    return next((size for size, name in _BYTES if name.search(dtype)), 0)


Peers = Sequence[Mapping[tuple[str, int], tuple[int, ...]]]
"""For each position, the ranks of each group that its file declares, by name and size."""


def matched(ranks: Sequence[Collectives], peers: Peers | None = None) -> Meets:
    """Collectives of several ranks: by the group's own count where it is written, else by order.

    Groups of one name and size on different ranks are one group, unless their files list other ranks.
    A send and its receive have different partners on every rank, and are left as they are.
    """
    rows: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for position, table in enumerate(ranks):
        count: dict[tuple[object, ...], int] = {}
        for i, op in enumerate(table.op):
            if op in ("send", "recv"):
                continue
            group = (table.group[i], int(table.group_size[i]))
            key = (op, *group, _of_group(peers, position, group))
            number = count[key] = count.get(key, -1) + 1
            by = ("seq", int(table.seq[i])) if table.seq[i] >= 0 else ("order", number)
            rows.setdefault((*key, by), []).append((position, i))
    return tuple(tuple(members) for members in rows.values() if len({r for r, _ in members}) > 1)


def _of_group(peers: Peers | None, position: int, group: tuple[str, int]) -> tuple[int, ...]:
    """Which of the groups of this name: its ranks where files differ, nothing where they agree."""
    if peers is None:
        return ()
    declared = {each[group] for each in peers if each.get(group)}
    if len(declared) < 2:
        return ()
    # A file that lists no ranks (profilers cut long lists) leaves its rank in the first group.
    return peers[position].get(group) or min(declared)


def _peers(ranks: Sequence[RankTrace]) -> Peers:
    return [
        {(group.name, group.size or len(group.ranks)): group.ranks for group in each.groups} for each in ranks
    ]


def _work(trace: RankTrace) -> Work:
    events = _host_calls(trace.events)
    device = events.stream >= 0
    kernels = device & ~events.where_category(lambda c: "annotation" in c or "sync" in c)
    kernels &= ~events.where_name(lambda name: bool(_NO_WORK.match(name)))
    copy = kernels & events.where_name(lambda name: bool(_COPY.match(name)))
    moves = kernels & ~copy & events.where_name(lambda name: bool(_KERNEL.search(name)))
    if not moves.any():
        moves = ~device & events.where_name(lambda name: name.startswith("gloo:"))
    operators = ~device & events.where_category(lambda c: c in ("cpu_op", "operator"))
    plain = operators & ~events.where_name(lambda name: name.startswith(("gloo:", "nccl:", "record_param")))
    steps = _own_steps(trace.steps)
    return Work(
        events=events,
        collectives=_collectives(trace, np.flatnonzero(moves), steps),
        compute=(kernels & ~copy & ~moves) | plain,
        copy=copy,
        steps=steps,
        offset=0,
        groups=trace.groups,
        world_size=trace.world_size,
    )


def _host_calls(events: Events) -> Events:
    """The events, with runtime calls on the host even where their arguments name a stream, as HIP's do."""
    calls = events.where_category(lambda c: "runtime" in c or "driver" in c) & (events.stream >= 0)
    if not calls.any():
        return events
    return replace(
        events,
        stream=np.where(calls, -1, events.stream),
        device=np.where(calls, -1, events.device).astype(np.int32),
    )


def _own_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Each step once, by start: a file may mark a step on several threads, some for microseconds."""
    longest: dict[int, Step] = {}
    for step in steps:
        known = longest.get(step.number)
        if known is None or step.stop - step.start > known.stop - known.start:
            longest[step.number] = step
    return tuple(sorted(longest.values(), key=lambda step: step.start))


def _collectives(trace: RankTrace, moves: Int64s, steps: Sequence[Step]) -> Collectives:
    events = trace.events
    around = _Around(events)
    told = [around.details(int(event)) for event in moves]
    sizes = {group.name: group.size or len(group.ranks) for group in trace.groups}
    op = [_op(d, events.name_of(int(e))) for d, e in zip(told, moves, strict=True)]
    group = [str(d.get("Process Group Name", "")) for d in told]
    group_size = [
        int(d.get("Group size", 0)) or sizes.get(g, 0) or trace.world_size
        for d, g in zip(told, group, strict=True)
    ]
    payload = [_payload(d, o, n) for d, o, n in zip(told, op, group_size, strict=True)]
    begun = np.asarray([around.launch_time(int(event)) for event in moves], np.int64)
    return Collectives(
        event=moves,
        start=events.start[moves],
        stop=events.stop[moves],
        op=tuple(op),
        nbytes=np.asarray([n for n, _, _ in payload], np.int64),
        basis=tuple(b for _, b, _ in payload),
        group=tuple(group),
        group_size=np.asarray(group_size, np.int64),
        seq=np.asarray([int(d.get("Seq", -1)) for d in told], np.int64),
        dtype=tuple(t for _, _, t in payload),
        step=_step_of(begun, steps),
        label=tuple(events.name_of(int(event))[:60] for event in moves),
    )


def _step_of(at: Int64s, steps: Sequence[Step]) -> Int64s:
    found = np.full(len(at), -1, np.int64)
    for step in steps:
        found[(at >= step.start) & (at < step.stop)] = step.number
    return found


def _op(told: dict[str, Any], name: str) -> str:
    """A word of the ledger's ``OPS``; "unknown" where neither arguments nor name say what it is."""
    for text in (str(told.get("Collective name", "")), str(told.get("annotation", "")), name):
        for op, pattern in _OPS:
            if pattern.search(text):
                return op
    return "wait" if told.get("Collective name") == "wait" else "unknown"


def _payload(told: dict[str, Any], op: str, group_size: int) -> tuple[int, BytesBasis, str]:
    """Bytes, where they come from, and the element type."""
    if op in ("barrier", "wait") or group_size == 1:
        return 0, "none", ""
    if "Ledger bytes" in told:
        return int(told["Ledger bytes"]), "ledger", ""
    dtype = str(told.get("dtype", ""))
    whole = group_size if op in ("all-gather", "reduce-scatter") else 1
    if "In msg nelems" in told and element_size(dtype):
        least = "In msg nelems" if op == "all-gather" else "Out msg nelems" if whole > 1 else "In msg nelems"
        return int(told[least]) * whole * element_size(dtype), "metadata", dtype
    dims, types = told.get("Input Dims"), told.get("Input type")
    if not dims or not types or not isinstance(dims, list) or not isinstance(types, list):
        return -1, "unknown", dtype
    flat = [
        (d, str(t)) for d, t in zip(dims, types, strict=False) if d and all(isinstance(n, int) for n in d)
    ]
    nbytes = sum(math.prod(d) * element_size(t) for d, t in flat)
    gathers = group_size if op == "all-gather" else 1
    return (nbytes * gathers, "dims", flat[0][1]) if nbytes else (-1, "unknown", dtype)


class _Around:
    """The call that launched a device event, and the annotation that says what it moves."""

    def __init__(self, events: Events) -> None:
        self.events = events
        host = (events.stream < 0) & (events.correlation >= 0)
        self.launch = {int(events.correlation[i]): int(i) for i in np.flatnonzero(host)}
        marks: Bools = (events.stream < 0) & events.where_name(
            lambda name: name.startswith(("nccl:", "gloo:", "rccl:", "hccl:", "mtia:"))
        )
        self.marks: dict[int, list[int]] = {}
        for i in np.flatnonzero(marks).tolist():
            self.marks.setdefault(int(events.thread[i]), []).append(i)
        self.begun = {t: [int(events.start[i]) for i in marks] for t, marks in self.marks.items()}

    def launch_time(self, event: int) -> int:
        """When the host asked for it; its own start where that isn't known."""
        call = self.launch.get(int(self.events.correlation[event]), event)
        return int(self.events.start[call])

    def details(self, event: int) -> dict[str, Any]:
        """What the event, or the annotation around its launch, says of the collective."""
        own = dict(self.events.details.get(event, {}))
        for mark in self._enclosing(event):
            own = {**self.events.details.get(mark, {}), "annotation": self.events.name_of(mark), **own}
        return own

    def _enclosing(self, event: int) -> Iterator[int]:
        events = self.events
        call = self.launch.get(int(events.correlation[event]), -1) if events.correlation[event] >= 0 else -1
        if call < 0:
            return
        marks, begun = (
            self.marks.get(int(events.thread[call]), []),
            self.begun.get(int(events.thread[call]), []),
        )
        # Annotations of one thread lie after one another, a few within one: the last ones suffice.
        at = bisect_right(begun, int(events.start[call]))
        for mark in marks[max(at - 3, 0) : at]:
            if events.start[call] <= events.stop[mark]:
                yield mark
