"""A trace made ready for replays: its graph, its transfers, and what moving takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.errors import TonnageError
from tonnage.trace.build import Built, Work, build
from tonnage.trace.events import NANOSECOND, Int64s, Trace
from tonnage.trace.graph import Graph, Moment, Why
from tonnage.trace.replay_work import Meets, works
from tonnage.trace.transfers import Kind, Line, Transfer, lines, transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A trace made ready for replays.

    Attributes:
        ranks: global rank of each position.
        works: what each rank did.
        built: the graph, and where in it things are.
        transfers: all transfers, by the arrival of their first rank.
        lines: what moving takes, by kind of transfer.
        num_steps: training steps in it; 1 where none is marked.
    """

    ranks: tuple[int, ...]
    works: tuple[Work, ...]
    built: Built
    transfers: tuple[Transfer, ...]
    lines: dict[Kind, Line]
    num_steps: int

    @property
    def graph(self) -> Graph:
        """The moments as they were."""
        return self.built.graph

    @property
    def is_met(self) -> bool:
        """Whether several ranks of a collective are there, so that waiting can be told from moving."""
        return any(each.is_met for each in self.transfers)


def replay_job(trace: Trace) -> Job:
    """The trace's graph and transfers.

    Raises:
        TonnageError: nothing in the trace computes or moves.
    """
    found, meets = works(trace)
    job = job_of([each.rank for each in trace.ranks], found, meets)
    if not np.isin(job.graph.kind, (Moment.COMPUTE, Moment.COPY, Moment.ARRIVE)).any():
        raise TonnageError(
            "no kernel, operator or collective in the trace",
            where=trace.ranks[0].source if trace.ranks else "",
            hint="record with activities=[CPU, CUDA], within the steps that the profiler's schedule records",
        )
    return job


def job_of(ranks: Sequence[int], found: tuple[Work, ...], meets: Meets) -> Job:
    """The graph and transfers of these ranks' work."""
    built = build(found, meets)
    moved = transfers(found, built, meets)
    return Job(
        ranks=tuple(ranks),
        works=found,
        built=built,
        transfers=moved,
        lines=lines(moved, built.graph),
        num_steps=max([1, *(len(each) for each in built.borders)]),
    )


def span(graph: Graph, times: Int64s) -> int:
    """Nanoseconds from the first moment to the end of the last."""
    return int((times + graph.span).max() - times.min()) if len(graph) else 0


def step_times(job: Job, times: Int64s) -> dict[int, float]:
    """Seconds of each step on the host: the longest of the ranks."""
    found: dict[int, float] = {}
    for borders in job.built.borders:
        for number, start, stop in borders:
            found[number] = max(found.get(number, 0.0), float(times[stop] - times[start]) * NANOSECOND)
    return found


def moves(graph: Graph) -> dict[int, int]:
    """The edge that moves the bytes of each transfer's end."""
    edges = np.flatnonzero(graph.why == Why.MOVE)
    return dict(zip(graph.target[edges].tolist(), edges.tolist(), strict=True))


def dones(job: Job, each: Transfer) -> list[int]:
    """The moment at which each member's transfer ends."""
    return [int(job.built.done[rank][i]) for rank, i in each.members]
