"""Changes of a run's graph: what ``nic=2x`` or ``bucket=25MB`` mean in spans, lags and edges.

Each takes the job and its graph as changed so far. None adds a gain that the trace doesn't show: bytes
that aren't known are left as they are, and so is time that may be waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tonnage.trace.events import Bools, Int64s
from tonnage.trace.graph import Graph, Moment, Why
from tonnage.trace.replay_job import Job, dones, moves
from tonnage.trace.replay_pace import at_others_pace
from tonnage.trace.replay_work import element_size
from tonnage.trace.transfers import Transfer, moving

_FUSED_OPS = ("all-reduce", "reduce-scatter")
_COMPRESSED = ("all-reduce", "reduce-scatter", "all-gather", "reduce")

SMALL = 1_048_576
"""Bytes up to which ``fuse`` joins transfers, into buckets of ``FUSED``."""

FUSED = 26_214_400

_UNNAMED = 65_536
"""Bytes of a bucket that a transfer of unknown size is taken to fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A changed graph, how many transfers, calls or ranks were changed, and what limits it."""

    graph: Graph
    touched: int
    note: str = ""


def faster_links(job: Job, graph: Graph, factor: float) -> Changed:
    """Links that move ``factor`` times the bytes a second; latency stays."""
    return _scaled(job, graph, lambda each: 1 / factor)


def compressed(job: Job, graph: Graph, width: float) -> Changed:
    """Floating-point payloads of gradients and parameters at ``width`` bytes an element."""

    def keep(each: Transfer) -> float:
        kind, size = each.dtype.lower(), element_size(each.dtype)
        # Indices and masks would lose their meaning.
        is_float = "float" in kind or "half" in kind or "double" in kind or kind.startswith(("bf", "fp"))
        return min(1.0, width / size) if size and is_float and each.op in _COMPRESSED else 1.0

    changed = _scaled(job, graph, keep)
    if not changed.touched:
        return replace(changed, note=changed.note or "nothing to compress whose type and size are known")
    return replace(changed, note="; ".join(filter(None, (changed.note, "time to convert not counted"))))


def _scaled(job: Job, graph: Graph, keep: Callable[[Transfer], float]) -> Changed:
    """Each transfer's time for its bytes, times what ``keep`` says."""
    lag, touched, unknown = graph.lag.copy(), 0, 0
    edge_of = moves(graph)
    for each in job.transfers:
        share = keep(each)
        if share == 1.0:
            continue
        if not each.is_met and each.nbytes < 0:
            unknown += 1
            continue
        touched += 1
        latency = job.lines[each.kind].latency
        for done, time in zip(dones(job, each), moving(each, job.graph, job.lines), strict=True):
            edge = edge_of[done]
            lag[edge] -= round(max(min(float(lag[edge]), time) - latency, 0.0) * (1 - share))
    notes = [f"{unknown} transfers of unknown size left as they are"] if unknown else []
    if touched and not job.is_met:
        notes.append("one rank's trace: what may be waiting is left as it is")
    return Changed(graph=replace(graph, lag=lag), touched=touched, note="; ".join(notes))


def bucketed(job: Job, graph: Graph, size: float) -> Changed:
    """Buckets of about ``size`` bytes: consecutive transfers joined, larger ones cut."""
    return _cut(job, _fused(job, graph, _runs(job, lambda each: True, size)), size)


def small_fused(job: Job, graph: Graph) -> Changed:
    """Consecutive small transfers joined."""
    return _fused(job, graph, _runs(job, lambda each: each.nbytes <= SMALL, FUSED))


def _runs(job: Job, wanted: Callable[[Transfer], bool], size: float) -> list[list[Transfer]]:
    """Consecutive transfers of a step and kind that fill a bucket together."""
    now: dict[tuple[object, ...], list[Transfer]] = {}
    filled: dict[tuple[object, ...], float] = {}
    found = []
    for each in job.transfers:
        if each.op not in _FUSED_OPS or not wanted(each):
            continue
        key = (each.kind, each.step, each.dtype, tuple(rank for rank, _ in each.members), each.is_met)
        nbytes = each.nbytes if each.nbytes >= 0 else _UNNAMED
        if key not in now or filled[key] + nbytes > size:
            now[key], filled[key] = [], 0.0
            found.append(now[key])
        now[key].append(each)
        filled[key] += nbytes
    return [run for run in found if len(run) > 1]


def _fused(job: Job, graph: Graph, runs: Sequence[Sequence[Transfer]]) -> Changed:
    """Each run as one transfer: begins when its last member could, saves a latency for each that went.

    What waited for an earlier member and falls before the whole begins is taken not to need its result:
    frameworks make a stream wait for each call whether or not anything reads it.
    """
    source, lag = graph.source.copy(), graph.lag.copy()
    edge_of, begins = moves(graph), np.full(len(graph), np.iinfo(np.int64).min)
    arrive_of = np.arange(len(graph))
    for run in runs:
        latency = job.lines[run[0].kind].latency
        for members in zip(*(zip(dones(job, each), each.members, strict=True) for each in run), strict=True):
            edges = [edge_of[done] for done, _ in members]
            times = np.maximum(lag[edges], 0).astype(np.float64)
            spare = float(np.minimum(times, latency).sum()) - min(latency, float(times.max()))
            lag[edges] = max(round(times.max()), round(times.sum() - spare))
            source[edges] = source[edges[-1]]
            for done, (rank, i) in members:
                begins[done] = graph.at[source[edges[-1]]]
                arrive_of[done] = job.built.arrive[rank][i]
    # An edge from a member's end to a moment before the whole begins now leaves the member's arrival.
    early = graph.at[graph.target] < begins[graph.source]
    # Nor does a member wait for another: those of one run follow each other on their stream.
    assumed = int((early & (graph.kind[graph.target] != Moment.ARRIVE)).sum())
    tied = early | (
        (arrive_of[graph.source] != graph.source) & (graph.at[graph.target] <= begins[graph.source])
    )
    source = np.where(tied & (graph.why != Why.MOVE), arrive_of[source], source)
    joined = replace(graph, source=source.astype(np.int32), lag=lag, order=np.empty(0, np.int32))
    note = f"if {assumed} calls in between need no result" if assumed else ""
    return Changed(graph=_unasked(job, joined, runs), touched=sum(map(len, runs)), note=note)


def _unasked(job: Job, graph: Graph, runs: Sequence[Sequence[Transfer]]) -> Graph:
    """The host no longer asks for all of a run but the last: those calls cost it nothing."""
    launch = np.full(len(graph), -1, np.int64)
    launches = graph.why == Why.LAUNCH
    launch[graph.target[launches]] = graph.source[launches]
    asked: dict[int, list[int]] = {}
    for run in runs:
        for each in run[:-1]:
            for rank, i in each.members:
                call = int(launch[job.built.arrive[rank][i]])
                if call >= 0:
                    asked.setdefault(rank, []).append(int(graph.event[call]))
    span, delay = graph.span.copy(), graph.delay.copy()
    for rank, calls in asked.items():
        _spare_calls(job, graph, rank, calls, span, delay)
    return replace(graph, span=span, delay=delay)


def _spare_calls(
    job: Job, graph: Graph, rank: int, calls: Sequence[int], span: Int64s, delay: Int64s
) -> None:
    """Take the operators around these calls out of their thread's time, in place."""
    work = job.works[rank]
    events = work.events
    around = np.flatnonzero(
        (events.stream < 0)
        & events.where_name(lambda name: name.startswith(("c10d::", "record_param_comms")))
    )
    if not len(around):
        return
    host = np.flatnonzero((graph.rank == rank) & (graph.kind == Moment.HOST))
    thread_of = events.thread[graph.event[host]]
    for thread in np.unique(events.thread[list(calls)]).tolist():
        marks, mine = around[events.thread[around] == thread], host[thread_of == thread]
        at = graph.at[mine]
        for call in (each for each in calls if events.thread[each] == thread):
            first = np.searchsorted(events.start[marks], events.start[call], side="right")
            near = marks[max(first - 4, 0) : first]
            near = near[events.stop[near] >= events.start[call]]
            if not len(near):
                continue
            start, stop = int(events.start[near[0]]) + work.offset, int(events.stop[near[0]]) + work.offset
            low, high = np.searchsorted(at, (start, stop))
            inside = mine[low:high]
            span[inside] = 0
            delay[inside] = np.minimum(
                delay[inside], np.maximum(0, start - (graph.at[inside] - delay[inside]))
            )
            if high < len(mine):
                after = mine[high]
                delay[after] -= min(int(delay[after]), max(0, stop - int(graph.at[after] - delay[after])))


def _cut(job: Job, changed: Changed, size: float) -> Changed:
    """Transfers above ``size`` in pieces: all but the last move while the rest is still being computed."""
    graph, lag, touched = changed.graph, changed.graph.lag.copy(), changed.touched
    edge_of = moves(graph)
    free: dict[tuple[object, ...], int] = {}
    for each in job.transfers:
        if each.op not in _FUSED_OPS or each.nbytes <= 1.5 * size:
            continue
        pieces, latency = -(-each.nbytes // int(size)), job.lines[each.kind].latency
        touched += 1
        for done, time, (rank, i) in zip(
            dones(job, each), moving(each, job.graph, job.lines), each.members, strict=True
        ):
            begun = int(graph.at[job.built.arrive[rank][i]])
            window = max(0, begun - free.get((rank, each.kind), begun))
            free[rank, each.kind] = int(graph.at[done])
            whole = max(time - latency, 0.0)
            early = (whole / pieces + latency) * (pieces - 1)
            lag[edge_of[done]] -= round(whole * (pieces - 1) / pieces - max(early - window, 0.0))
    return Changed(graph=replace(graph, lag=lag), touched=touched, note=changed.note)


def no_straggler(job: Job, graph: Graph, only: int | None = None) -> Changed:
    """Stragglers (or one rank) at the others' pace."""
    if not job.is_met:
        return Changed(graph=graph, touched=0, note="one rank's trace doesn't tell who is late")
    made, late = at_others_pace(job, graph, only)
    names = ", ".join(map(str, late))
    note = f"rank {names} at the others' pace" if late else "no rank is late by 3 % of the run"
    return Changed(graph=made, touched=len(late), note=note)


def usual_transfers(job: Job, graph: Graph) -> Changed:
    """No transfer takes longer than the median of those of its kind and size."""
    edge_of, lag, touched = moves(graph), graph.lag.copy(), 0
    alike: dict[tuple[object, ...], list[list[int]]] = {}
    for each in job.transfers:
        if each.is_met:
            alike.setdefault((each.kind, each.nbytes), []).append([edge_of[d] for d in dones(job, each)])
    for found in alike.values():
        longest = [int(graph.lag[edges].max()) for edges in found]
        usual = float(np.median(longest))
        for edges, time in zip(found, longest, strict=True):
            if time > 1.2 * usual and len(found) > 2:
                touched += 1
                lag[edges] = np.minimum(lag[edges], round(usual))
    return Changed(graph=replace(graph, lag=lag), touched=touched)


def early(job: Job, graph: Graph) -> Changed:
    """Transfers on the device wait for their input alone, however late the host asked."""
    freed = np.zeros(len(graph), np.bool_)
    freed[graph.target[graph.why == Why.EVENT]] = True
    freed &= graph.kind == Moment.ARRIVE
    edges = freed[graph.target] & (graph.why == Why.LAUNCH)
    delay = np.where(freed, 0, graph.delay)
    made = replace(graph, delay=delay, order=np.empty(0, np.int32)).without(edges)
    return Changed(graph=made, touched=int(edges.sum()))


def overlapped(job: Job, graph: Graph) -> Changed:
    """Nothing but the step's end waits for a transfer: a bound on what more overlap can bring."""
    arrive_of = np.arange(len(graph))
    pairs = []
    stops = [{number: stop for number, _, stop in each} for each in job.built.borders]
    for each in job.transfers:
        for done, (rank, i) in zip(dones(job, each), each.members, strict=True):
            arrive_of[done] = job.built.arrive[rank][i]
            stop = stops[rank].get(each.step, -1)
            if stop >= 0 and graph.at[done] <= graph.at[stop]:
                pairs.append((done, stop))
    freed: Bools = (graph.kind[graph.source] == Moment.DONE) & (graph.kind[graph.target] != Moment.ARRIVE)
    source = np.where(freed, arrive_of[graph.source], graph.source).astype(np.int32)
    made = replace(graph, source=source, order=np.empty(0, np.int32))
    note = "a bound: every transfer beside computation"
    return Changed(graph=_with_edges(made, pairs), touched=int(freed.sum()), note=note)


def _with_edges(graph: Graph, pairs: Sequence[tuple[int, int]]) -> Graph:
    new = np.asarray(pairs, np.int32).reshape(-1, 2)
    return replace(
        graph,
        source=np.concatenate([graph.source, new[:, 0]]),
        target=np.concatenate([graph.target, new[:, 1]]),
        from_end=np.concatenate([graph.from_end, np.zeros(len(new), np.bool_)]),
        lag=np.concatenate([graph.lag, np.zeros(len(new), np.int64)]),
        why=np.concatenate([graph.why, np.full(len(new), Why.SYNC, np.int8)]),
    )


def unsynced(job: Job, graph: Graph) -> Changed:
    """The host waits for no device."""
    freed: Bools = graph.why == Why.SYNC
    made = replace(graph, order=np.empty(0, np.int32)).without(freed)
    return Changed(graph=made, touched=int(freed.sum()), note="if the host needs no result of the device")
