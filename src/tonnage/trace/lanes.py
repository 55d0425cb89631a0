"""What ran when, a lane for each rank and stream: waiting and moving apart, on the clock that ranks share.

A transfer of several ranks lies in two pieces: waiting until its last rank has come, moving from then on.
With one rank's trace the two can't be told, and it is one piece of communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tonnage.trace.events import Bools, Int64s
from tonnage.trace.graph import Moment
from tonnage.trace.replay_job import Job

PieceKind = Literal["compute", "copy", "waiting", "moving", "communication"]

LANE_KINDS: tuple[PieceKind, ...] = ("compute", "copy", "waiting", "moving", "communication")

BUDGET = 24_000
"""Pieces of a picture: more than a screen has pixels for, and drawn in a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a lane: microseconds from the first moment of any rank, and what it was."""

    lane: int
    start: float
    stop: float
    kind: PieceKind
    label: str
    merged: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """A picture of all ranks.

    Attributes:
        names: of the lanes, from the top: "rank 3 stream 7".
        ranks: rank of each lane.
        pieces: by lane, then by start.
        steps: rank, number, start and stop (microseconds) of each step.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    steps: tuple[tuple[int, int, float, float], ...]


def lanes(job: Job, *, budget: int | None = BUDGET) -> Lanes:
    """The picture of the run as it was.

    Args:
        job: the trace, ready for replays.
        budget: pieces at most; neighbours of a kind that lie close together become one. ``None``: all.
    """
    origin = int(job.graph.at.min()) if len(job.graph) else 0
    names: list[str] = []
    ranks: list[int] = []
    pieces: list[Piece] = []
    for position, rank in enumerate(job.ranks):
        found = _rank_pieces(job, position, origin)
        for key in sorted(found):
            lane = len(names)
            names.append(f"rank {rank} {key[1]}")
            ranks.append(rank)
            pieces.extend(
                Piece(lane=lane, start=start, stop=stop, kind=kind, label=label)
                for start, stop, kind, label in sorted(found[key], key=lambda each: each[:2])
            )
    shown = pieces if budget is None or len(pieces) <= budget else _merged(pieces, budget)
    return Lanes(names=tuple(names), ranks=tuple(ranks), pieces=tuple(shown), steps=_steps(job, origin))


_Raw = tuple[float, float, PieceKind, str]


def _rank_pieces(job: Job, position: int, origin: int) -> dict[tuple[int, str], list[_Raw]]:
    """A rank's pieces by lane: device streams, else the host's threads."""
    work, graph = job.works[position], job.graph
    events = work.events
    lane_of = _lane_names(job, position)
    found: dict[tuple[int, str], list[_Raw]] = {}
    mine = np.flatnonzero(
        (graph.rank == position) & np.isin(graph.kind, (Moment.COMPUTE, Moment.COPY)) & (graph.span > 0)
    )
    for moment in mine.tolist():
        event = int(graph.event[moment])
        start = int(graph.at[moment]) - origin
        kind: PieceKind = "copy" if graph.kind[moment] == Moment.COPY else "compute"
        row = (start / 1e3, (start + int(graph.span[moment])) / 1e3, kind, events.name_of(event))
        found.setdefault(lane_of(event), []).append(row)
    for event, piece in _transfer_pieces(job, position, origin):
        found.setdefault(lane_of(event), []).append(piece)
    return found


def _lane_names(job: Job, position: int) -> Callable[[int], tuple[int, str]]:
    events = job.works[position].events
    on_device: Bools = events.stream >= 0
    many_devices = len(np.unique(events.device[on_device])) > 1

    def lane(event: int) -> tuple[int, str]:
        if not on_device[event]:
            return int(events.thread[event]), f"thread {events.threads[events.thread[event]][1]}"
        device = f"device {events.device[event]} " if many_devices else ""
        return int(events.stream[event]), f"{device}stream {events.stream[event]}"

    return lane


def _transfer_pieces(job: Job, position: int, origin: int) -> list[tuple[int, _Raw]]:
    """For each transfer of a rank its event, and its stretch of waiting or of moving."""
    found: list[tuple[int, _Raw]] = []
    at: Int64s = job.graph.at - origin
    for each in job.transfers:
        last = max(int(at[job.built.arrive[rank][i]]) for rank, i in each.members)
        label = f"{each.op} {each.nbytes:,} B" if each.nbytes >= 0 else each.op
        moves: PieceKind = "moving" if each.is_met else "communication"
        for rank, i in (member for member in each.members if member[0] == position):
            start, stop = int(at[job.built.arrive[rank][i]]), int(at[job.built.done[rank][i]])
            event = int(job.works[rank].collectives.event[i])
            turn = min(max(last, start), stop) if each.is_met else start
            if turn > start:
                found.append((event, (start / 1e3, turn / 1e3, "waiting", label)))
            if stop > turn:
                found.append((event, (turn / 1e3, stop / 1e3, moves, label)))
    return found


def _merged(pieces: list[Piece], budget: int) -> list[Piece]:
    """Fewer pieces: of a kind and lane, those that begin within a slice of time become one."""
    whole = max(each.stop for each in pieces) - min(each.start for each in pieces)
    slices = 4 * budget // max(1, len({each.lane for each in pieces}))
    while True:
        width, found = whole / slices, list[Piece]()
        for each in pieces:
            last = found[-1] if found else None
            near = last is not None and last.lane == each.lane and last.kind == each.kind
            if last is None or not near or each.stop - last.start > max(width, last.stop - last.start):
                found.append(each)
                continue
            label = last.label if last.label == each.label else "several"
            found[-1] = Piece(
                lane=last.lane,
                start=last.start,
                stop=max(last.stop, each.stop),
                kind=last.kind,
                label=label,
                merged=last.merged + each.merged,
            )
        if len(found) <= budget or slices <= 64:
            return found
        slices //= 2


def _steps(job: Job, origin: int) -> tuple[tuple[int, int, float, float], ...]:
    at = job.graph.at
    return tuple(
        (rank, number, (int(at[start]) - origin) / 1e3, (int(at[stop]) - origin) / 1e3)
        for rank, borders in zip(job.ranks, job.built.borders, strict=True)
        for number, start, stop in borders
    )
