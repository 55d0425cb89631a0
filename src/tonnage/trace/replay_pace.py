"""Which rank the others wait for, and the run with that rank at their pace.

A rank's *own pace* is what it would need from one collective to the next with nobody to wait for: the
replay of its moments alone. Waiting hides it in the measured times, for whoever waits seems slow, too.
What a rank needs beyond the median of the others, less what it needs below it, is its excess. A rank
that comes into the trace late is late by what it came late, whatever the reason before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tonnage.trace.events import NANOSECOND, Bools, Int64s
from tonnage.trace.graph import Graph, Why, solve
from tonnage.trace.replay_job import Job, dones, moves, span

STRAGGLES = 0.03
"""Share of the run that a rank must lose against the others' median to be called a straggler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        rank: its global rank.
        seconds: a step that it loses against the others' median, at its own pace.
        entered: seconds that it came into the trace after the others' median.
    """

    rank: int
    seconds: float
    entered: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paces:
    """For each rank its excess and its late start (nanoseconds); for each moment the share it would keep."""

    excess: NDArray[np.float64]
    entered: NDArray[np.float64]
    scale: NDArray[np.float64]


def stragglers(job: Job) -> tuple[Straggler, ...]:
    """Ranks that lose more than 3 % of the run against the others' median; the slowest first."""
    if not job.is_met:
        return ()
    paces, whole = _paces(job, job.graph), span(job.graph, job.graph.at)
    found = [
        Straggler(
            rank=job.ranks[position],
            seconds=float(paces.excess[position]) * NANOSECOND / job.num_steps,
            entered=float(paces.entered[position]) * NANOSECOND,
        )
        for position in _late(paces, whole)
    ]
    return tuple(sorted(found, key=lambda each: -each.seconds))


def at_others_pace(job: Job, graph: Graph, only: int | None = None) -> tuple[Graph, tuple[int, ...]]:
    """The graph with its stragglers (or one rank) at the others' pace, and which ranks these are."""
    if not job.is_met:
        return graph, ()
    paces = _paces(job, graph)
    late = _late(paces, span(graph, graph.at)) if only is None else [job.ranks.index(only)]
    mine = np.isin(graph.rank, late)
    keep = np.where(mine, paces.scale, 1.0)
    roots = _roots(graph)
    # A root's delay is the time at which its rank's trace begins, not something that it does.
    delay = np.where(roots, graph.delay, np.rint(graph.delay * keep).astype(np.int64))
    early = np.where(roots & mine, np.rint(paces.entered[np.maximum(graph.rank, 0)]).astype(np.int64), 0)
    made = replace(graph, span=np.rint(graph.span * keep).astype(np.int64), delay=delay - early)
    return made, tuple(job.ranks[position] for position in late)


def _late(paces: _Paces, whole: int) -> list[int]:
    late: list[int] = np.flatnonzero(paces.excess > STRAGGLES * whole).tolist()
    return late


def _roots(graph: Graph) -> Bools:
    roots = np.ones(len(graph), np.bool_)
    roots[graph.target] = False
    return roots


def _paces(job: Job, graph: Graph) -> _Paces:
    anchors, scale = _anchors(job), np.ones(len(graph))
    zeros = np.zeros(len(job.ranks))
    if len(job.ranks) < 2 or len(anchors) < 2:
        return _Paces(excess=zeros, entered=zeros, scale=scale)
    alone = solve(_alone(job, graph))
    reached = np.maximum.accumulate(alone[anchors], axis=0)
    excess, entered = zeros.copy(), zeros.copy()
    for position in range(len(job.ranks)):
        others = np.delete(reached, position, axis=1)
        own, usual = np.diff(reached[:, position]), np.median(np.diff(others, axis=0), axis=1)
        entered[position] = max(0.0, float(reached[0, position] - np.median(others[0])))
        excess[position] = entered[position] + float((own - usual).sum())
        mine = np.flatnonzero(graph.rank == position)
        part = np.clip(np.searchsorted(reached[:, position], alone[mine]) - 1, 0, len(own) - 1)
        scale[mine] = np.where(own > usual, usual / np.maximum(own, 1), 1.0)[part]
    return _Paces(excess=excess, entered=entered, scale=scale)


def _anchors(job: Job) -> Int64s:
    """Moments that all ranks have in common, by time: borders of steps, arrivals at collectives of all."""
    everyone, built = len(job.ranks), job.built
    rows = [
        [int(built.arrive[rank][i]) for rank, i in sorted(each.members)]
        for each in job.transfers
        if each.is_met and len(each.members) == everyone
    ]
    borders = [{number: (start, stop) for number, start, stop in each} for each in built.borders]
    for number in set(borders[0]).intersection(*borders[1:]) if borders else ():
        rows.extend([each[number][side] for each in borders] for side in (0, 1))
    rows.sort(key=lambda row: int(job.graph.at[row].max()))
    return np.asarray(rows, np.int64).reshape(-1, everyone)


def _alone(job: Job, graph: Graph) -> Graph:
    """Each rank with nobody to wait for: its transfers move as soon as it has come itself."""
    source, edge_of = graph.source.copy(), moves(graph)
    for each in job.transfers:
        for done, (rank, i) in zip(dones(job, each), each.members, strict=True):
            source[edge_of[done]] = job.built.arrive[rank][i]
    free = replace(graph, source=source, order=np.empty(0, np.int32))
    return free.without(graph.why == Why.PEERS)
