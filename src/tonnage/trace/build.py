"""From what ranks recorded to a graph of moments: what waited for what, as far as a trace shows it.

Certain are the order of a host thread's calls and of a stream's kernels, which call launched which
kernel (the correlation number), and that no rank of a collective moves bytes before the last has come.
Inferred, and dropped where a time contradicts it, are

* device work that waits for another stream: it begins within microseconds of the other's end, without
  its own stream or launch explaining the time; a transfer waits for what was launched before it;
* a host call that waits for the device: it returns when some device work ends;
* a host thread that waits for another (autograd's, a worker's): it goes on after a pause, once the
  other has done something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.trace.events import Bools, Collectives, Events, Group, Int64s, Step
from tonnage.trace.graph import Builder, Graph, Moment, Why

_PAUSE = 20_000
"""Nanoseconds without a call after which a host thread may have waited for another: some calls' length."""

_QUEUE = 50_000
"""A worker that begins its next transfer this soon took it from its queue, and waited for nobody."""

_NEAR = 100_000
"""Nanoseconds after the end of device work within which what waited for it begins."""

_RETURNS = 3_000
"""Nanoseconds that a host call takes which finds the device already done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the graph needs of one rank.

    Attributes:
        events: all its events.
        collectives: its transfers.
        compute: whether an event is computation: a kernel, or an operator on the host.
        copy: whether an event is a copy or fill on the device.
        steps: its training steps.
        offset: nanoseconds to add to its clock.
        offset_error: nanoseconds by which that may be off.
        groups: the process groups that its file declares.
        world_size: ranks of the job, 0 if its file doesn't say.
    """

    events: Events
    collectives: Collectives
    compute: Bools
    copy: Bools
    steps: tuple[Step, ...]
    offset: int
    offset_error: int = 0
    groups: tuple[Group, ...] = ()
    world_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A graph, and where in it a person's things are.

    Attributes:
        graph: the moments.
        arrive: for each rank, the moment at which each of its transfers begins; -1 if left out.
        done: for each rank, the moment at which each of its transfers ends; -1 if left out.
        meet: for each meeting, the moment at which its last rank has come; -1 if it's no meeting.
        borders: for each rank, step number, moment of its start, moment of its stop.
    """

    graph: Graph
    arrive: tuple[Int64s, ...]
    done: tuple[Int64s, ...]
    meet: Int64s
    borders: tuple[tuple[tuple[int, int, int], ...], ...]


def build(ranks: Sequence[Work], meets: Sequence[Sequence[tuple[int, int]]]) -> Built:
    """The graph of these ranks.

    Args:
        ranks: the ranks' work.
        meets: for each collective that several of them took part in, pairs of a rank's position and the
            number of the transfer in its ``collectives``.
    """
    builder = Builder()
    made = [_Rank(builder, position, work) for position, work in enumerate(ranks)]
    met = [np.zeros(len(work.collectives), np.bool_) for work in ranks]
    meet = _meetings(builder, made, meets, met)
    for rank, alone in zip(made, met, strict=True):
        rank.move_alone(~alone)
    return Built(
        graph=builder.graph(),
        arrive=tuple(rank.arrive for rank in made),
        done=tuple(rank.done for rank in made),
        meet=meet,
        borders=tuple(rank.borders for rank in made),
    )


def _meetings(
    builder: Builder,
    ranks: Sequence[_Rank],
    meets: Sequence[Sequence[tuple[int, int]]],
    met: Sequence[Bools],
) -> Int64s:
    """A moment for each meeting, after all who came and before each who moved on."""
    numbers = np.full(len(meets), -1, np.int64)
    for position, members in enumerate(meets):
        here = [(rank, i) for rank, i in members if ranks[rank].arrive[i] >= 0]
        last = max((ranks[rank].starts[i] for rank, i in here), default=0)
        # Who was done before the last one came did not wait for it: a sender, a broadcast's root.
        bound = [(rank, i) for rank, i in here if ranks[rank].stops[i] >= last]
        if len(bound) < 2:
            continue
        numbers[position] = number = int(builder.add(Moment.MEET, -1, _one(-1), _one(last))[0])
        came = np.asarray([ranks[rank].arrive[i] for rank, i in here], np.int64)
        gone = np.asarray([ranks[rank].done[i] for rank, i in bound], np.int64)
        took = np.asarray([ranks[rank].stops[i] - last for rank, i in bound], np.int64)
        builder.join(came, np.full(len(came), number), Why.PEERS)
        builder.join(np.full(len(gone), number), gone, Why.MOVE, lag=took)
        for rank, i in bound:
            met[rank][i] = True
    return numbers


def _one(value: int) -> Int64s:
    return np.asarray([value], np.int64)


class _Rank:
    """One rank's moments while the graph is made."""

    def __init__(self, builder: Builder, position: int, work: Work) -> None:
        self.builder, self.position, self.work = builder, position, work
        events, transfers = work.events, work.collectives
        self.starts = transfers.start + work.offset
        self.stops = transfers.stop + work.offset
        self.arrive = np.full(len(transfers), -1, np.int64)
        self.done = np.full(len(transfers), -1, np.int64)
        self.is_transfer = np.zeros(len(events), np.bool_)
        self.is_transfer[transfers.event] = True
        self.start = events.start + work.offset
        self.stop = events.stop + work.offset
        self.moment = np.full(len(events), -1, np.int64)
        self.end = np.full(len(events), -1, np.int64)
        self.launcher = np.full(len(events), -1, np.int64)
        self._select()
        self._device()
        self._host()
        self._edges_of_streams()
        self._edges_of_launches()
        self._edges_of_waits()

    def _select(self) -> None:
        """Which events take part: device work, what launches or waits for it, transfers, host computation."""
        events, work = self.work.events, self.work
        device = (events.stream >= 0) & (work.compute | work.copy | self.is_transfer)
        runtime = (events.stream < 0) & events.where_category(lambda c: "runtime" in c or "driver" in c)
        launches = runtime & (events.correlation >= 0)
        self._match_launches(device, launches)
        called = np.zeros(len(events), np.bool_)
        called[self.launcher[self.launcher >= 0]] = True
        waits = (events.stream < 0) & events.where_name(_is_sync) & ~self.is_transfer
        host = called | waits | (self.is_transfer & (events.stream < 0))
        if not device.any():
            host |= _outermost(events, work.compute & ~self.is_transfer & (events.stream < 0))
        first, last = self._window()
        inside = (self.start >= first) & (self.start < last)
        self.host = np.flatnonzero(host & inside)
        kept = np.zeros(len(events), np.bool_)
        kept[self.host] = True
        by_launch = np.where(self.launcher >= 0, kept[self.launcher], inside)
        self.device = np.flatnonzero(device & by_launch)
        self.waits = waits & kept
        self.launcher[~np.isin(np.arange(len(events)), self.device)] = -1

    def _window(self) -> tuple[int, int]:
        """From the first step's start to the last one's stop; all where no step is marked."""
        steps = self.work.steps
        if not steps:
            return int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
        first = min(step.start for step in steps) + self.work.offset
        return first, max(step.stop for step in steps) + self.work.offset

    def _match_launches(self, device: Bools, launches: Bools) -> None:
        numbers = np.flatnonzero(launches)
        if not len(numbers):
            return
        calls = self.work.events.correlation[numbers]
        by_call = np.argsort(calls, kind="stable")
        mine = np.flatnonzero(device & (self.work.events.correlation >= 0))
        at = np.searchsorted(calls[by_call], self.work.events.correlation[mine])
        at = np.minimum(at, len(numbers) - 1)
        found = numbers[by_call[at]]
        same = self.work.events.correlation[found] == self.work.events.correlation[mine]
        # A kernel that began before its launch has another clock: the two can't be ordered.
        same &= self.start[found] <= self.start[mine]
        self.launcher[mine[same]] = found[same]

    def _device(self) -> None:
        work, numbers = self.work, self.device
        kind = np.where(work.copy[numbers], Moment.COPY, Moment.COMPUTE)
        kind = np.where(self.is_transfer[numbers], Moment.ARRIVE, kind).astype(np.int8)
        span = np.where(self.is_transfer[numbers], 0, self.stop[numbers] - self.start[numbers])
        made = self.builder.add(kind, self.position, numbers, self.start[numbers], span)
        self.moment[numbers] = made
        self.end[numbers] = made
        self._transfers()

    def _transfers(self) -> None:
        """The end of each transfer on the device; those of the host follow with the host."""
        for i, event in enumerate(self.work.collectives.event.tolist()):
            if self.moment[event] >= 0 and self.arrive[i] < 0:
                self.arrive[i] = self.moment[event]
                number = self.builder.add(Moment.DONE, self.position, _one(event), _one(int(self.stops[i])))
                self.done[i] = self.end[event] = number[0]

    def _host(self) -> None:
        """Calls of each thread in order, the steps' borders among them, and hand-offs between threads."""
        work, numbers = self.work, self.host
        events = work.events
        waiting = self._returning(numbers)
        kind = np.where(work.compute[numbers] & (events.stream[numbers] < 0), Moment.COMPUTE, Moment.HOST)
        kind = np.where(self.is_transfer[numbers], Moment.ARRIVE, kind).astype(np.int8)
        whole = waiting | self.is_transfer[numbers]
        span = np.where(whole, 0, self.stop[numbers] - self.start[numbers])
        made = self.builder.add(kind, self.position, numbers, self.start[numbers], span)
        self.moment[numbers] = self.end[numbers] = made
        self._transfers()
        ends = self.builder.add(Moment.RETURN, self.position, numbers[waiting], self.stop[numbers[waiting]])
        self.end[numbers[waiting]] = ends
        least = np.minimum(self.stop[numbers[waiting]] - self.start[numbers[waiting]], _RETURNS)
        self.builder.join(made[waiting], ends, Why.ORDER, lag=least)
        self._thread_order(numbers)

    def _returning(self, numbers: Int64s) -> Bools:
        """Which host calls wait for the device: those named so, and copies that return after their copy."""
        waiting = self.waits[numbers].copy()
        copies = self.device[self.work.copy[self.device] & (self.launcher[self.device] >= 0)]
        blocking = copies[self.stop[copies] <= self.stop[self.launcher[copies]]]
        self.blocking = blocking
        return waiting | np.isin(numbers, self.launcher[blocking])

    def _thread_order(self, numbers: Int64s) -> None:
        """Rows are calls and borders: moment that begins it, that ends it, start, stop, thread, kind."""
        events = self.work.events
        border_moments, border_at, main = self._borders()
        begin = np.concatenate([self.moment[numbers], border_moments])
        end = np.concatenate([self.end[numbers], border_moments])
        start = np.concatenate([self.start[numbers], border_at])
        stop = np.concatenate([self.stop[numbers], border_at])
        thread = np.concatenate([events.thread[numbers], np.full(len(border_at), main)])
        moving = np.concatenate([self.is_transfer[numbers], np.zeros(len(border_at), np.bool_)])
        rows = np.lexsort((stop, start, thread))
        begin, end, start, stop, thread, moving = (
            each[rows] for each in (begin, end, start, stop, thread, moving)
        )
        follows = np.flatnonzero(thread[1:] == thread[:-1]) + 1
        # One call inside another (rare) follows its start, not its end.
        nested = stop[follows - 1] > start[follows]
        before = np.where(nested, begin[follows - 1], end[follows - 1])
        from_end = ~nested & (before == begin[follows - 1])
        self.builder.join(before, begin[follows], Why.ORDER, from_end=from_end)
        previous = np.full(len(rows), np.iinfo(np.int64).min)
        previous[follows] = np.minimum(stop[follows - 1], start[follows])
        self._handoffs(begin, end, start, stop, thread, moving, previous)

    def _borders(self) -> tuple[Int64s, Int64s, int]:
        """Moments of the steps' borders, their times, and the thread that marks steps."""
        events, steps = self.work.events, sorted(self.work.steps, key=lambda step: step.start)
        marks = np.flatnonzero(
            events.where_name(lambda name: name.startswith("ProfilerStep")) & (events.stream < 0)
        )
        threads = events.thread[marks] if len(marks) else events.thread[self.host]
        main = int(np.bincount(threads).argmax()) if len(threads) else -1
        at = np.asarray([t for step in steps for t in (step.start, step.stop)], np.int64) + self.work.offset
        made = self.builder.add(Moment.BORDER, self.position, np.full(len(at), -1), at)
        self.borders = tuple(
            (step.number, int(made[2 * i]), int(made[2 * i + 1])) for i, step in enumerate(steps)
        )
        return made, at, main

    def _handoffs(
        self,
        begin: Int64s,
        end: Int64s,
        start: Int64s,
        stop: Int64s,
        thread: Int64s,
        moving: Bools,
        previous: Int64s,
    ) -> None:
        """After a pause a thread waited for the last that another did; a worker for the last begun, too."""
        if len(np.unique(thread)) < 2:
            return
        pause = np.where(moving, _QUEUE, _PAUSE)
        asked = np.flatnonzero(
            (start - np.maximum(previous, start.min() - 1) > pause) & (start > start.min())
        )
        by_stop, by_start = np.argsort(stop, kind="stable"), np.argsort(start, kind="stable")
        source, target, from_end = [], [], []
        for row in asked.tolist():
            found = [_latest(stop, by_stop, thread, row, start[row], previous[row])]
            if moving[row]:
                found.append(_latest(start, by_start, thread, row, start[row], previous[row]))
            for other, is_end in zip(found, (True, False), strict=False):
                if other < 0:
                    continue
                source.append(end[other] if is_end else begin[other])
                target.append(begin[row])
                from_end.append(is_end and end[other] == begin[other])
        self.builder.join(
            np.asarray(source, np.int64),
            np.asarray(target, np.int64),
            Why.HANDOFF,
            from_end=np.asarray(from_end, np.bool_),
        )

    def _edges_of_streams(self) -> None:
        events, numbers = self.work.events, self.device
        rows = np.lexsort((self.start[numbers], events.stream[numbers], events.device[numbers]))
        line = numbers[rows]
        same = (events.stream[line][1:] == events.stream[line][:-1]) & (
            events.device[line][1:] == events.device[line][:-1]
        )
        before, after = line[:-1][same], line[1:][same]
        self._after(before, after, Why.STREAM)
        self.stream_free = np.full(len(events), np.iinfo(np.int64).min)
        self.stream_free[after] = np.minimum(self.stop[before], self.start[after])

    def _after(self, before: Int64s, after: Int64s, why: Why) -> None:
        """Each of ``after`` begins once its ``before`` has ended."""
        moments = self.end[before]
        self.builder.join(moments, self.moment[after], why, from_end=moments == self.moment[before])

    def _edges_of_launches(self) -> None:
        launched = self.device[self.launcher[self.device] >= 0]
        calls = self.launcher[launched]
        latency = self.start[launched] - self.start[calls]
        # What the quickest launches take, nobody does faster; the rest is for the other edges to explain.
        least = int(np.percentile(latency, 2)) if len(latency) else 0
        self.latency = int(np.percentile(latency, 50)) if len(latency) else 0
        self.builder.join(
            self.moment[calls], self.moment[launched], Why.LAUNCH, lag=np.minimum(latency, least)
        )

    def _edges_of_waits(self) -> None:
        self._device_waits()
        self._transfer_inputs()
        self._results_awaited()
        self._host_waits()

    def _device_waits(self) -> None:
        """Device work that begins just after another stream's ended, and nothing else explains when."""
        numbers, events = self.device, self.work.events
        launch = np.where(self.launcher >= 0, self.start[self.launcher] + self.latency, 0)
        ready = np.maximum(self.stream_free, np.where(self.launcher >= 0, launch, np.iinfo(np.int64).min))
        late = numbers[(self.start[numbers] - ready[numbers] > 2_000) & (ready[numbers] > 0)]
        by_stop = numbers[np.argsort(self.stop[numbers], kind="stable")]
        stops = self.stop[by_stop]
        at = np.searchsorted(stops, self.start[late], side="right") - 1
        source, target = [], []
        for event, position in zip(late.tolist(), at.tolist(), strict=True):
            floor = max(self.start[event] - _NEAR, ready[event])
            while position >= 0 and stops[position] > floor:
                other = int(by_stop[position])
                if events.stream[other] != events.stream[event] and self._launched_before(other, event):
                    source.append(other)
                    target.append(event)
                    break
                position -= 1
        self._after(np.asarray(source, np.int64), np.asarray(target, np.int64), Why.EVENT)

    def _launched_before(self, one: int, other: int) -> bool:
        a, b = self.launcher[one], self.launcher[other]
        return bool(a < 0 or b < 0 or self.start[a] <= self.start[b])

    def _transfer_inputs(self) -> None:
        """A transfer on the device waits for the computation that was launched before it."""
        numbers = self.device
        kernels = numbers[
            self.work.compute[numbers] & ~self.is_transfer[numbers] & (self.launcher[numbers] >= 0)
        ]
        moves = numbers[self.is_transfer[numbers] & (self.launcher[numbers] >= 0)]
        if not len(kernels) or not len(moves):
            return
        by_launch = kernels[np.argsort(self.start[self.launcher[kernels]], kind="stable")]
        at = np.searchsorted(self.start[self.launcher[by_launch]], self.start[self.launcher[moves]]) - 1
        self._after(by_launch[at[at >= 0]], moves[at >= 0], Why.EVENT)

    def _results_awaited(self) -> None:
        """After a stream was told to wait, the next that is launched on it needs the last transfer's result."""
        events = self.work.events
        told = np.flatnonzero(events.where_name(lambda name: "StreamWaitEvent" in name) & (events.stream < 0))
        moves = self.device[self.is_transfer[self.device] & (self.launcher[self.device] >= 0)]
        rest = self.device[self.launcher[self.device] >= 0]
        if not len(told) or not len(moves) or len(rest) == len(moves):
            return
        moves = moves[np.argsort(self.start[self.launcher[moves]], kind="stable")]
        begun = self.start[self.launcher[moves]]
        source, target = [], []
        for thread in np.unique(events.thread[told]).tolist():
            mine = rest[events.thread[self.launcher[rest]] == thread]
            mine = mine[np.argsort(self.start[self.launcher[mine]], kind="stable")]
            calls = told[events.thread[told] == thread]
            at = np.searchsorted(self.start[self.launcher[mine]], self.start[calls])
            last = np.searchsorted(begun, self.start[calls]) - 1
            for position, move in zip(at.tolist(), last.tolist(), strict=True):
                if position < len(mine) and move >= 0 and not self.is_transfer[mine[position]]:
                    source.append(moves[move])
                    target.append(mine[position])
        self._after(np.asarray(source, np.int64), np.asarray(target, np.int64), Why.EVENT)

    def _host_waits(self) -> None:
        """A call that waits returns when the device work that it was called for has ended."""
        copies = self.blocking
        source, target = list(copies), list(self.launcher[copies])
        numbers = self.device
        by_stop = numbers[np.argsort(self.stop[numbers], kind="stable")]
        calls = np.flatnonzero(self.waits)
        at = np.searchsorted(self.stop[by_stop], self.stop[calls], side="right") - 1
        for call, position in zip(calls.tolist(), at.tolist(), strict=True):
            while position >= 0 and self.stop[by_stop[position]] > self.start[call]:
                other = int(by_stop[position])
                if self.launcher[other] < 0 or self.start[self.launcher[other]] < self.start[call]:
                    source.append(other)
                    target.append(call)
                    break
                position -= 1
        before, after = np.asarray(source, np.int64), np.asarray(target, np.int64)
        moments = self.end[before]
        self.builder.join(moments, self.end[after], Why.SYNC, from_end=moments == self.moment[before])

    def move_alone(self, alone: Bools) -> None:
        """Transfers whose other ranks are not in the trace take as long as they took."""
        mine = alone & (self.arrive >= 0)
        self.builder.join(
            self.arrive[mine], self.done[mine], Why.MOVE, lag=self.stops[mine] - self.starts[mine]
        )


def _latest(times: Int64s, order: Int64s, thread: Int64s, row: int, before: int, after: int) -> int:
    """The row of another thread whose time is the latest in ``(after, before]``; -1 for none."""
    at = int(np.searchsorted(times, before, side="right", sorter=order)) - 1
    while at >= 0 and times[order[at]] > after:
        other = int(order[at])
        if thread[other] != thread[row]:
            return other
        at -= 1
    return -1


def _is_sync(name: str) -> bool:
    # cudaStreamSynchronize, hipDeviceSynchronize, cuCtxSynchronize, synchronizeStream
    return "ynchronize" in name and "::" not in name


def _outermost(events: Events, wanted: Bools) -> Bools:
    """The wanted events that lie in no other wanted event of their thread."""
    numbers = np.flatnonzero(wanted)
    rows = numbers[np.lexsort((-events.stop[numbers], events.start[numbers], events.thread[numbers]))]
    found = np.zeros(len(events), np.bool_)
    thread, reach = -1, -1
    for event, own, start, stop in zip(
        rows.tolist(),
        events.thread[rows].tolist(),
        events.start[rows].tolist(),
        events.stop[rows].tolist(),
        strict=True,
    ):
        if own != thread or start >= reach:
            found[event] = True
            thread, reach = own, stop
    return found
