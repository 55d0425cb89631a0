"""Where the time of the run went, as the replay's graph has it: waiting for ranks, moving, exposed.

Of each collective that several ranks are there for, what lies before its last rank's arrival is waiting and
what lies after it moving. Bus bandwidth is that of moving alone, in decimal bytes a second, with the
longest of its ranks' times. With one rank's trace neither is told apart, and none is claimed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tonnage.ledger import bus_factor, exposed, intervals, length
from tonnage.trace.events import NANOSECOND
from tonnage.trace.lanes import lanes
from tonnage.trace.replay_job import Job
from tonnage.trace.transfers import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSplit:
    """Transfers of one op and group; seconds and counts are those of a mean rank in a mean step.

    Attributes:
        op: a word of the ledger's ``OPS``.
        group_size: ranks that take part; 0 if unknown.
        calls: transfers.
        nbytes: payload; NaN where the trace gives none.
        known: share of the calls whose payload is known.
        seconds: from a rank's arrival to its end.
        waiting: of these, before the last rank came; NaN with one rank's trace.
        busbw: median bytes a second of moving; NaN if unknown.
    """

    op: str
    group_size: int
    calls: float
    nbytes: float
    known: float
    seconds: float
    waiting: float
    busbw: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """How often a rank came last, and seconds that all others together waited for it in the whole trace."""

    rank: int
    times: int
    caused: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where a run's time went; seconds of a mean rank in a mean step.

    Attributes:
        kinds: by seconds, the longest first.
        last: ranks that came last, by the waiting that they caused; empty with one rank's trace.
        num_met: collectives of which several ranks are there.
        compute: something was computed.
        communication: some transfer ran.
        exposed: some transfer ran and nothing was computed.
        waiting: of transfers; NaN with one rank's trace.
    """

    kinds: tuple[KindSplit, ...]
    last: tuple[Last, ...]
    num_met: int
    compute: float
    communication: float
    exposed: float
    waiting: float


def split(job: Job) -> Split:
    """Where the job's time went."""
    share = 1.0 / (max(1, len(job.ranks)) * job.num_steps)
    kinds: dict[tuple[str, int], list[Transfer]] = {}
    for each in job.transfers:
        kinds.setdefault((each.op, each.group_size), []).append(each)
    rows = [_kind(job, found, share) for found in kinds.values()]
    met = [each for each in job.transfers if each.is_met]
    waiting = sum(_waiting(job, each) for each in met) * NANOSECOND * share
    compute, communication, bare = _covered(job)
    return Split(
        kinds=tuple(sorted(rows, key=lambda row: -row.seconds)),
        last=_last(job, met),
        num_met=len(met),
        compute=compute * share,
        communication=communication * share,
        exposed=bare * share,
        waiting=waiting if met else math.nan,
    )


def _kind(job: Job, found: list[Transfer], share: float) -> KindSplit:
    members = sum(len(each.members) for each in found)
    known = [each for each in found if each.nbytes >= 0]
    met = [each for each in found if each.is_met]
    speeds = [speed for each in met if not math.isnan(speed := _busbw(job, each))]
    return KindSplit(
        op=found[0].op,
        group_size=found[0].group_size,
        calls=members * share,
        nbytes=sum(each.nbytes * len(each.members) for each in known) * share if known else math.nan,
        known=sum(len(each.members) for each in known) / members,
        seconds=sum(sum(_times(job, each)) for each in found) * NANOSECOND * share,
        waiting=sum(_waiting(job, each) for each in met) * NANOSECOND * share if met else math.nan,
        busbw=float(np.median(speeds)) if speeds else math.nan,
    )


def _times(job: Job, each: Transfer) -> list[int]:
    at, built = job.graph.at, job.built
    return [int(at[built.done[rank][i]] - at[built.arrive[rank][i]]) for rank, i in each.members]


def _arrivals(job: Job, each: Transfer) -> list[int]:
    return [int(job.graph.at[job.built.arrive[rank][i]]) for rank, i in each.members]


def _waiting(job: Job, each: Transfer) -> int:
    arrivals = _arrivals(job, each)
    last = max(arrivals)
    # Who was done before the last came waited for nobody.
    return sum(min(last - begun, took) for begun, took in zip(arrivals, _times(job, each), strict=True))


def _busbw(job: Job, each: Transfer) -> float:
    arrivals = _arrivals(job, each)
    ends = [begun + took for begun, took in zip(arrivals, _times(job, each), strict=True)]
    moved = (max(ends) - max(arrivals)) * NANOSECOND
    if each.nbytes <= 0 or each.group_size < 2 or moved <= 0 or each.op in ("wait", "barrier"):
        return math.nan
    return each.nbytes / moved * bus_factor(each.op, each.group_size)


def _last(job: Job, met: list[Transfer]) -> tuple[Last, ...]:
    times: dict[int, int] = {}
    caused: dict[int, float] = {}
    for each in met:
        arrivals = _arrivals(job, each)
        rank = job.ranks[each.members[int(np.argmax(arrivals))][0]]
        times[rank] = times.get(rank, 0) + 1
        caused[rank] = caused.get(rank, 0.0) + _waiting(job, each) * NANOSECOND
    rows = [Last(rank=rank, times=times[rank], caused=caused[rank]) for rank in times]
    return tuple(sorted(rows, key=lambda row: -row.caused))


def _covered(job: Job) -> tuple[float, float, float]:
    """Seconds, summed over the ranks, in which something was computed, moved, and moved with no computing."""
    shown = lanes(job, budget=None)
    total = [0.0, 0.0, 0.0]
    for rank in job.ranks:
        mine = [each for each in shown.pieces if shown.ranks[each.lane] == rank]
        busy = [each for each in mine if each.kind == "compute"]
        moves = [each for each in mine if each.kind in ("waiting", "moving", "communication")]
        compute = intervals([each.start for each in busy], [each.stop for each in busy])
        moving = intervals([each.start for each in moves], [each.stop for each in moves])
        for place, micro in enumerate((length(compute), length(moving), exposed(moving, compute))):
            total[place] += micro * 1e-6
    return total[0], total[1], total[2]
