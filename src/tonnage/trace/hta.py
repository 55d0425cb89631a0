"""Temporal breakdown and overlap by HolisticTraceAnalysis' definitions, for figures that compare with its own.

They differ from ours: communication is what begins with "nccl", the last step is left out, and the time
that is neither idle nor computing mixes exposed communication with exposed copies.

Source: HolisticTraceAnalysis 0.5.0, ``analyzers/breakdown_analysis.py`` and ``utils/utils.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tonnage.ledger import intervals, length, overlap, union
from tonnage.trace.events import NANOSECOND, Bools, Events, RankTrace

_NO_COMPUTE = re.compile(r"^nccl|Memcpy|Memset|dma|^.*Sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class HtaBreakdown:
    """One rank's time by HTA's definitions, in seconds.

    Attributes:
        idle: no device event ran.
        compute: some kernel computed.
        non_compute: the rest: exposed communication and exposed copies together.
        span: from the first device event's start to the last one's end.
        overlap: share of communication beside which a kernel computed; 0 without communication.
    """

    idle: float
    compute: float
    non_compute: float
    span: float
    overlap: float


def hta_breakdown(trace: RankTrace) -> HtaBreakdown:
    """The rank's breakdown as HTA 0.5.0 prints it for times in whole microseconds."""
    events = trace.events.select(_before_last_step(trace))
    if not len(events):
        return HtaBreakdown(idle=0.0, compute=0.0, non_compute=0.0, span=0.0, overlap=0.0)
    begin = int(events.start.min())
    start, stop = events.start - begin, events.stop - begin
    sets = {
        "all": intervals(start, stop),
        "compute": _of(events, start, stop, events.where_name(lambda name: not _NO_COMPUTE.search(name))),
        "moves": _of(events, start, stop, events.where_name(lambda name: name.startswith("nccl"))),
    }
    span, busy, compute = float(stop.max()), length(sets["all"]), length(sets["compute"])
    moves = length(sets["moves"])
    return HtaBreakdown(
        idle=(span - busy) * NANOSECOND,
        compute=compute * NANOSECOND,
        non_compute=(busy - compute) * NANOSECOND,
        span=span * NANOSECOND,
        overlap=overlap(sets["moves"], sets["compute"]) / moves if moves else 0.0,
    )


def _of(events: Events, start: object, stop: object, wanted: Bools) -> np.ndarray:
    return union(intervals(np.asarray(start)[wanted], np.asarray(stop)[wanted]))


def _before_last_step(trace: RankTrace) -> Bools:
    """Device events that were launched before the last step began; all of them with one step."""
    events = trace.events
    device = events.stream >= 0
    if len(trace.steps) < 2:
        return device
    last = trace.steps[-1].start
    calls = np.flatnonzero(~device & (events.correlation >= 0) & (events.start < last))
    launched = np.isin(events.correlation, events.correlation[calls])
    return device & launched
