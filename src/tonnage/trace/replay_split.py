"""Where the time of the run went, as the replay's graph has it: waiting for ranks, moving, exposed.

Of each collective whose ranks are all there, what lies before its last rank's arrival is waiting and what
lies after it moving. Bus bandwidth is that of moving alone, in decimal bytes a second, with the longest of
its ranks' times. With some of the ranks the waiting for those is at least what is seen, and with one rank
none is; then each call's bandwidth is the least that the links can do, and no more is claimed.

Source: nccl-tests, doc/PERFORMANCE.md (algbw, busbw, factors).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tonnage.ledger import bus_factor
from tonnage.trace.breakdown import Breakdown, breakdowns
from tonnage.trace.dimensions import Dimension, Key, dimensions
from tonnage.trace.events import NANOSECOND
from tonnage.trace.replay_job import Job
from tonnage.trace.transfers import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSplit:
    """Transfers of one op in groups of one dimension and size; figures of a mean rank in a mean step.

    Attributes:
        op: a word of the ledger's ``OPS``, or "unknown".
        group_size: ranks that take part; 0 if unknown.
        dimension: what the groups are, and how that is known.
        calls: transfers.
        nbytes: payload; NaN where the trace gives none.
        known: share of the calls whose payload is known.
        basis: where payloads come from, joined by "+".
        dtype: element types as written, joined by "+".
        seconds: from a rank's arrival to its end.
        waiting: of these, before the last rank that is there came; NaN with one rank's trace.
        algbw: median payload over time of moving, bytes a second; NaN if some rank is missing.
        busbw: the same times nccl-tests' factor.
        busbw_least: largest bus bandwidth of any call by its whole time: the links do at least this;
            NaN where no payload is known.
    """

    op: str
    group_size: int
    dimension: Dimension
    calls: float
    nbytes: float
    known: float
    basis: str
    dtype: str
    seconds: float
    waiting: float
    algbw: float
    busbw: float
    busbw_least: float


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
        num_whole: collectives of which all ranks are there.
        compute: something was computed.
        communication: some transfer ran.
        copies: some copy ran.
        idle: none of the three.
        overlapped: some transfer ran and something was computed.
        exposed: some transfer ran and nothing was computed.
        waiting: of transfers, as far as ranks are there; NaN with one rank's trace.
        ranks: each rank's time over the whole trace.
    """

    kinds: tuple[KindSplit, ...]
    last: tuple[Last, ...]
    num_met: int
    num_whole: int
    compute: float
    communication: float
    copies: float
    idle: float
    overlapped: float
    exposed: float
    waiting: float
    ranks: tuple[Breakdown, ...]


def split(job: Job, given: Mapping[str, str] | None = None) -> Split:
    """Where the job's time went.

    Args:
        job: the trace, ready for replays.
        given: dimension of groups, by name or description, where the caller knows it.
    """
    share = 1.0 / (max(1, len(job.ranks)) * job.num_steps)
    known = dimensions(job, given)
    kinds: dict[tuple[str, str, int], list[Transfer]] = {}
    for each in job.transfers:
        dimension = known[each.group, each.group_size].name
        kinds.setdefault((each.op, dimension, each.group_size), []).append(each)
    rows = [_kind(job, found, known, share) for found in kinds.values()]
    met = [each for each in job.transfers if each.is_met]
    ranks = breakdowns(job)
    return Split(
        kinds=tuple(sorted(rows, key=lambda row: -row.seconds)),
        last=_last(job, met),
        num_met=len(met),
        num_whole=sum(each.is_whole for each in met),
        compute=sum(each.compute for each in ranks) * share,
        communication=sum(each.communication for each in ranks) * share,
        copies=sum(each.copies for each in ranks) * share,
        idle=sum(each.idle for each in ranks) * share,
        overlapped=sum(each.overlapped for each in ranks) * share,
        exposed=sum(each.exposed for each in ranks) * share,
        waiting=sum(waited(job, each) for each in met) * NANOSECOND * share if met else math.nan,
        ranks=ranks,
    )


def _kind(job: Job, found: list[Transfer], known: Mapping[Key, Dimension], share: float) -> KindSplit:
    members = sum(len(each.members) for each in found)
    sized = [each for each in found if each.nbytes >= 0]
    met = [each for each in found if each.is_met]
    speeds = [speed for each in met if not math.isnan(speed := moving_speed(job, each))]
    algbw = float(np.median(speeds)) if speeds else math.nan
    # One kind has one op and size, and so one factor.
    factor = bus_factor(found[0].op, found[0].group_size) if speeds else math.nan
    least = [speed for each in found if not math.isnan(speed := _least_speed(job, each))]
    return KindSplit(
        op=found[0].op,
        group_size=found[0].group_size,
        dimension=known[found[0].group, found[0].group_size],
        calls=members * share,
        nbytes=sum(each.nbytes * len(each.members) for each in sized) * share if sized else math.nan,
        known=sum(len(each.members) for each in sized) / members,
        basis="+".join(sorted({each.basis for each in found})),
        dtype="+".join(sorted({each.dtype for each in found if each.dtype})),
        seconds=sum(sum(_times(job, each)) for each in found) * NANOSECOND * share,
        waiting=sum(waited(job, each) for each in met) * NANOSECOND * share if met else math.nan,
        algbw=algbw,
        busbw=algbw * factor,
        busbw_least=max(least, default=math.nan),
    )


def _times(job: Job, each: Transfer) -> list[int]:
    at, built = job.graph.at, job.built
    return [int(at[built.done[rank][i]] - at[built.arrive[rank][i]]) for rank, i in each.members]


def arrivals(job: Job, each: Transfer) -> list[int]:
    """Nanoseconds at which each member began the transfer."""
    return [int(job.graph.at[job.built.arrive[rank][i]]) for rank, i in each.members]


def waited(job: Job, each: Transfer) -> int:
    """Nanoseconds that its members together waited for the last of them."""
    begun_at = arrivals(job, each)
    last = max(begun_at)
    # Who was done before the last came waited for nobody.
    return sum(min(last - begun, took) for begun, took in zip(begun_at, _times(job, each), strict=True))


def moving_speed(job: Job, each: Transfer) -> float:
    """Payload over time from the last arrival to the last end, bytes a second; NaN if that isn't known."""
    begun_at = arrivals(job, each)
    ends = [begun + took for begun, took in zip(begun_at, _times(job, each), strict=True)]
    moved = (max(ends) - max(begun_at)) * NANOSECOND
    return each.nbytes / moved if _moves(each) and each.is_whole and moved > 0 else math.nan


def _least_speed(job: Job, each: Transfer) -> float:
    """Bus bandwidth by the shortest of its ranks' whole times."""
    took = min(_times(job, each)) * NANOSECOND
    if not _moves(each) or took <= 0:
        return math.nan
    return each.nbytes / took * bus_factor(each.op, each.group_size)


def _moves(each: Transfer) -> bool:
    return each.nbytes > 0 and each.group_size > 1 and each.op not in ("wait", "barrier", "unknown")


def _last(job: Job, met: list[Transfer]) -> tuple[Last, ...]:
    times: dict[int, int] = {}
    caused: dict[int, float] = {}
    for each in met:
        rank = job.ranks[each.members[int(np.argmax(arrivals(job, each)))][0]]
        times[rank] = times.get(rank, 0) + 1
        caused[rank] = caused.get(rank, 0.0) + waited(job, each) * NANOSECOND
    rows = [Last(rank=rank, times=times[rank], caused=caused[rank]) for rank in times]
    return tuple(sorted(rows, key=lambda row: -row.caused))
