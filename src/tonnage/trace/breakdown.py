"""A rank's time by what ran: computation, communication, copies, nothing; overlapped and exposed.

Each is the length of a union of intervals, so that streams beside each other, nested operators and
concurrent transfers count once. *Overlapped* is communication beside which something was computed,
*exposed* communication without. *Idle* is what no kernel, operator, copy or transfer covers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.ledger import Intervals, exposed, intervals, length, overlap, union
from tonnage.trace.events import NANOSECOND
from tonnage.trace.graph import Moment
from tonnage.trace.replay_job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """One rank's time in seconds, over the whole trace.

    Attributes:
        rank: its global rank.
        span: from its first moment to the end of its last.
        compute: something was computed.
        communication: some transfer ran, waiting included.
        copies: some copy or fill ran.
        idle: none of the three.
        overlapped: communication beside computation.
        exposed: communication without.
    """

    rank: int
    span: float
    compute: float
    communication: float
    copies: float
    idle: float
    overlapped: float
    exposed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """When a rank did what; seconds from the first moment of any rank, shape ``(n, 2)`` each."""

    compute: Intervals
    copies: Intervals
    moves: Intervals


def breakdowns(job: Job) -> tuple[Breakdown, ...]:
    """Each rank's time, in the order of the job's ranks."""
    return tuple(_breakdown(job, position) for position in range(len(job.ranks)))


def busy(job: Job, position: int) -> Busy:
    """When this rank computed, copied and moved; the sets are as recorded, and not normal."""
    graph, built = job.graph, job.built
    origin = int(graph.at.min()) if len(graph) else 0
    mine = graph.rank == position
    done, arrive = built.done[position], built.arrive[position]
    there = arrive >= 0

    def of(kind: Moment) -> Intervals:
        at = np.flatnonzero(mine & (graph.kind == kind) & (graph.span > 0))
        start = graph.at[at] - origin
        return intervals(start * NANOSECOND, (start + graph.span[at]) * NANOSECOND)

    return Busy(
        compute=of(Moment.COMPUTE),
        copies=of(Moment.COPY),
        moves=intervals(
            (graph.at[arrive[there]] - origin) * NANOSECOND, (graph.at[done[there]] - origin) * NANOSECOND
        ),
    )


def _breakdown(job: Job, position: int) -> Breakdown:
    graph, when = job.graph, busy(job, position)
    mine = np.flatnonzero(graph.rank == position)
    span = 0.0
    if len(mine):
        span = int((graph.at[mine] + graph.span[mine]).max() - graph.at[mine].min()) * NANOSECOND
    covered = length(union(when.compute, when.copies, when.moves))
    return Breakdown(
        rank=job.ranks[position],
        span=span,
        compute=length(when.compute),
        communication=length(when.moves),
        copies=length(when.copies),
        idle=max(0.0, span - covered),
        overlapped=overlap(when.moves, when.compute),
        exposed=exposed(when.moves, when.compute),
    )
