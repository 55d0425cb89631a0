r"""A run as a graph of moments, and the times at which they fall.

A *moment* is the start of an activity (a kernel, a host call), or a moment of its own: the end of a
transfer, the meeting of all ranks of a collective, the border of a step. An edge says that one moment
can't fall before another::

    time(v) = max over edges (u, v) of [ time(u) + span(u) if the edge leaves u's end + lag ]  +  delay(v)

``span`` is how long the activity takes. ``delay`` is what the trace shows and no edge explains: the
Python between two calls, the microseconds between a launch and its kernel. A graph is made from measured
times, so solving it unchanged gives them back; a change of spans, lags or edges gives the times that
would have been. What no edge explains stays as it was, so that a gain is never invented.

Source: the replay of dPRO (Hu et al., MLSys 2022) and Daydream (Zhu et al., ATC 2020), with the meeting
of a collective's ranks as a moment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tonnage.trace.events import Bools, Int64s

Int8s = NDArray[np.int8]
Int32s = NDArray[np.int32]


class Moment(IntEnum):
    """What a moment is."""

    HOST = 0  # a host call begins
    COMPUTE = 1  # a kernel, or an operator that computes on the host, begins
    COPY = 2  # a copy or fill on the device begins
    ARRIVE = 3  # a rank begins a transfer
    MEET = 4  # the last rank of a transfer has begun it
    DONE = 5  # a rank's transfer ends
    RETURN = 6  # a host call that waited ends
    BORDER = 7  # a step begins or ends


class Why(IntEnum):
    """Why one moment can't fall before another."""

    ORDER = 0  # the same host thread
    LAUNCH = 1  # a host call launches device work
    STREAM = 2  # the same device stream
    EVENT = 3  # device work that waits for other device work
    SYNC = 4  # a host call that waits for the device
    HANDOFF = 5  # a host thread that waits for another
    PEERS = 6  # a transfer begins to move when its last rank arrives
    MOVE = 7  # bytes on the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Moments and edges; arrays of one entry a moment, then arrays of one entry an edge.

    Attributes:
        kind: a :class:`Moment`.
        rank: position of the rank in the trace; -1 for the meeting of several.
        event: number of the event in that rank's events; -1 for none.
        at: measured nanoseconds, on the clock that all ranks share.
        span: nanoseconds that the activity takes; 0 for a mere moment.
        delay: nanoseconds that no edge explains.
        source: the moment that must fall first.
        target: the moment that waits for it.
        from_end: whether the edge leaves the end of ``source``'s activity.
        lag: least nanoseconds between the two.
        why: a :class:`Why`.
        order: moments in an order that no edge goes against; empty until it was asked for.
    """

    kind: Int8s
    rank: Int32s
    event: Int64s
    at: Int64s
    span: Int64s
    delay: Int64s
    source: Int32s
    target: Int32s
    from_end: Bools
    lag: Int64s
    why: Int8s
    order: Int32s = field(default_factory=lambda: np.empty(0, np.int32))

    def __len__(self) -> int:
        return len(self.at)

    def without(self, edges: Bools) -> Graph:
        """The graph without these edges; what they explained is not added to any delay."""
        keep = ~edges
        columns = {name: getattr(self, name)[keep] for name in EDGE_COLUMNS}
        return replace(self, **columns)


EDGE_COLUMNS = ("source", "target", "from_end", "lag", "why")


def fitted(graph: Graph) -> Graph:
    """The graph whose solution is its measured times: contradicted edges removed, delays filled in.

    An edge that the measured times contradict is an inference that was wrong, and goes, unless it is
    certain (a thread's or stream's order, a launch, a transfer); then its lag is cut to what was measured.
    """
    reach = graph.at[graph.source] + np.where(graph.from_end, graph.span[graph.source], 0) + graph.lag
    slack = graph.at[graph.target] - reach
    inferred = np.isin(graph.why, (Why.EVENT, Why.SYNC, Why.HANDOFF))
    wrong = (slack < 0) & inferred
    lag = np.where(slack < 0, graph.lag + slack, graph.lag)
    cut = replace(graph, lag=lag).without(wrong)
    left = np.maximum(slack[~wrong], 0)
    delay = np.full(len(graph), np.iinfo(np.int64).max)
    np.minimum.at(delay, cut.target, left)
    # A moment that waits for nothing falls when it was measured.
    roots = np.ones(len(graph), np.bool_)
    roots[cut.target] = False
    return replace(cut, delay=np.where(roots, graph.at, delay))


def ordered(graph: Graph) -> Graph:
    """The graph with its order of moments.

    Raises:
        ValueError: the edges go in a circle.
    """
    by_source = np.argsort(graph.source, kind="stable")
    targets = graph.target[by_source].tolist()
    first = np.searchsorted(graph.source[by_source], np.arange(len(graph) + 1)).tolist()
    waits = np.bincount(graph.target, minlength=len(graph)).tolist()
    ready = [moment for moment, count in enumerate(waits) if count == 0]
    order: list[int] = []
    while ready:
        moment = ready.pop()
        order.append(moment)
        for edge in range(first[moment], first[moment + 1]):
            target = targets[edge]
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    if len(order) < len(graph):
        raise ValueError("the edges of the graph go in a circle")
    return replace(graph, order=np.asarray(order, np.int32))


def solve(graph: Graph) -> Int64s:
    """Nanoseconds at which each moment falls.

    Raises:
        ValueError: the edges go in a circle.
    """
    graph = graph if len(graph.order) == len(graph) else ordered(graph)
    by_target = np.argsort(graph.target, kind="stable")
    source = graph.source[by_target]
    weight = graph.lag[by_target] + np.where(graph.from_end[by_target], graph.span[source], 0)
    first = np.searchsorted(graph.target[by_target], np.arange(len(graph) + 1)).tolist()
    sources, weights, times = source.tolist(), weight.tolist(), graph.delay.tolist()
    for moment in graph.order.tolist():
        start, stop = first[moment], first[moment + 1]
        if start == stop:
            continue
        latest = times[sources[start]] + weights[start]
        for edge in range(start + 1, stop):
            reached = times[sources[edge]] + weights[edge]
            if reached > latest:
                latest = reached
        times[moment] += latest
    return np.asarray(times, np.int64)


class Builder:
    """Collects moments and edges; blocks of arrays, since a graph has a million of them."""

    def __init__(self) -> None:
        self.size = 0
        self._moments: list[tuple[NDArray[np.int64], ...]] = []
        self._edges: list[tuple[NDArray[np.int64], ...]] = []

    def add(
        self, kind: Moment | Int8s, rank: int, event: Int64s, at: Int64s, span: Int64s | int = 0
    ) -> Int64s:
        """Numbers of new moments, one for each entry of ``at``."""
        count = len(at)
        block = [np.broadcast_to(np.asarray(each, np.int64), count) for each in (kind, rank, event, at, span)]
        self._moments.append(tuple(block))
        numbers = np.arange(self.size, self.size + count, dtype=np.int64)
        self.size += count
        return numbers

    def join(
        self,
        source: Int64s,
        target: Int64s,
        why: Why,
        *,
        from_end: Bools | bool = False,
        lag: Int64s | int = 0,
    ) -> None:
        """New edges from each ``source`` to the ``target`` at its place."""
        count = len(source)
        block = [
            np.broadcast_to(np.asarray(each, np.int64), count)
            for each in (source, target, from_end, lag, int(why))
        ]
        self._edges.append(tuple(block))

    def graph(self) -> Graph:
        """The graph, fitted to the measured times."""
        moments = _joined(self._moments, 5)
        edges = _joined(self._edges, 5)
        made = Graph(
            kind=moments[0].astype(np.int8),
            rank=moments[1].astype(np.int32),
            event=moments[2],
            at=moments[3],
            span=moments[4],
            delay=np.zeros(self.size, np.int64),
            source=edges[0].astype(np.int32),
            target=edges[1].astype(np.int32),
            from_end=edges[2].astype(np.bool_),
            lag=edges[3],
            why=edges[4].astype(np.int8),
        )
        return ordered(fitted(made))


def _joined(blocks: list[tuple[NDArray[np.int64], ...]], width: int) -> list[NDArray[np.int64]]:
    if not blocks:
        return [np.empty(0, np.int64)] * width
    return [np.concatenate([block[column] for block in blocks]) for column in range(width)]
