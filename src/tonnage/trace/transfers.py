r"""The transfers of a replay: who took part, what moved, and how long moving takes by size.

One transfer is a collective of all its ranks. Its time splits at the moment when the last rank comes:
before lies waiting, after it moving. With one rank's trace the split can't be seen; then moving is at
most what the quickest transfers of that kind would need, and the rest may be waiting.

Moving ``b`` bytes takes ``latency + b / bandwidth``. Both come from the trace: for each kind of transfer
(op, group, ranks) the usual time of each size, and the line through them. Where all sizes are alike or
unknown, only a bound on the latency can be had (the quickest call), and it says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tonnage.trace.build import Built, Work
from tonnage.trace.events import BytesBasis
from tonnage.trace.graph import Graph, Why

Floats = NDArray[np.float64]

Kind = tuple[str, str, int]
"""What transfers must share for one line to hold: op, group, ranks of the group."""

_SMALL = 65_536
"""Bytes below which a transfer alone of its size is taken to cost latency only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective (or send, or receive) of all ranks that are in the trace.

    Attributes:
        op: a word of the ledger's ``OPS``.
        group: name of its process group.
        group_size: ranks that take part, 0 if unknown.
        nbytes: payload; -1 if unknown.
        basis: where ``nbytes`` comes from.
        dtype: element type as written.
        step: number of its step.
        label: the name under which a person finds it.
        members: position of each rank that is in the trace, and the transfer's number there.
        edges: number in the graph of the edge that moves each member's bytes.
        is_met: whether several ranks are there, so that waiting and moving can be told apart.
    """

    op: str
    group: str
    group_size: int
    nbytes: int
    basis: BytesBasis
    dtype: str
    step: int
    label: str
    members: tuple[tuple[int, int], ...]
    edges: tuple[int, ...]
    is_met: bool

    @property
    def kind(self) -> Kind:
        """Op, group and size of the group."""
        return self.op, self.group, self.group_size

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of the group are there: only then is what isn't waiting moving."""
        return self.is_met and len(self.members) >= self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What moving takes: ``latency + nbytes * per_byte`` nanoseconds.

    Attributes:
        latency: nanoseconds that a call takes whatever its size.
        per_byte: nanoseconds a byte of payload; NaN where sizes are unknown.
        sizes: how many different sizes it was drawn through.
    """

    latency: float
    per_byte: float
    sizes: int

    def seconds(self, nbytes: float) -> float:
        """Nanoseconds to move this payload; NaN where the line knows no bytes."""
        return self.latency + nbytes * self.per_byte


def transfers(
    ranks: Sequence[Work], built: Built, meets: Sequence[Sequence[tuple[int, int]]]
) -> tuple[Transfer, ...]:
    """All transfers in the graph, by the arrival of their first rank."""
    edge_of = _moving_edges(built.graph)
    seen: set[tuple[int, int]] = set()
    found = []
    for meet, members in zip(built.meet.tolist(), meets, strict=True):
        here = tuple((rank, i) for rank, i in members if built.arrive[rank][i] >= 0)
        if here and meet >= 0:
            found.append(_transfer(ranks, built, here, edge_of, is_met=True))
            seen.update(here)
    for rank, work in enumerate(ranks):
        for i in range(len(work.collectives)):
            if built.arrive[rank][i] >= 0 and (rank, i) not in seen:
                found.append(_transfer(ranks, built, ((rank, i),), edge_of, is_met=False))
    at = built.graph.at
    return tuple(sorted(found, key=lambda t: min(at[built.arrive[rank][i]] for rank, i in t.members)))


def _transfer(
    ranks: Sequence[Work],
    built: Built,
    members: tuple[tuple[int, int], ...],
    edge_of: dict[int, int],
    *,
    is_met: bool,
) -> Transfer:
    rank, i = members[0]
    table = ranks[rank].collectives
    # A receiver may know what a sender's annotation lacks; the largest known payload is the whole.
    known = max(members, key=lambda each: int(ranks[each[0]].collectives.nbytes[each[1]]))
    nbytes = int(ranks[known[0]].collectives.nbytes[known[1]])
    return Transfer(
        op=table.op[i],
        group=table.group[i],
        group_size=int(table.group_size[i]),
        nbytes=nbytes,
        basis=ranks[known[0]].collectives.basis[known[1]],
        dtype=table.dtype[i],
        step=int(table.step[i]),
        label=table.label[i],
        members=members,
        edges=tuple(edge_of[int(built.done[r][n])] for r, n in members),
        is_met=is_met,
    )


def _moving_edges(graph: Graph) -> dict[int, int]:
    edges = np.flatnonzero(graph.why == Why.MOVE)
    return dict(zip(graph.target[edges].tolist(), edges.tolist(), strict=True))


def moving(transfer: Transfer, graph: Graph, by_kind: dict[Kind, Line]) -> tuple[float, ...]:
    """Nanoseconds that each member spends moving bytes, as far as known: at most its edge's lag."""
    lags = [float(max(graph.lag[edge], 0)) for edge in transfer.edges]
    if transfer.is_met:
        return tuple(lags)
    line = by_kind[transfer.kind]
    bound = line.seconds(transfer.nbytes) if transfer.nbytes >= 0 else math.nan
    return tuple(min(lag, bound) if not math.isnan(bound) else lag for lag in lags)


def lines(found: Sequence[Transfer], graph: Graph) -> dict[Kind, Line]:
    """The line of each kind of transfer."""
    kinds: dict[Kind, list[Transfer]] = {}
    for transfer in found:
        kinds.setdefault(transfer.kind, []).append(transfer)
    return {kind: _line(each, graph) for kind, each in kinds.items()}


def _line(found: Sequence[Transfer], graph: Graph) -> Line:
    # Of a meeting the longest member's time is the transfer's; alone, short calls waited least.
    times = np.asarray([max(max(graph.lag[edge], 0) for edge in each.edges) for each in found], np.float64)
    share = 50.0 if all(each.is_met for each in found) else 10.0
    sizes = np.asarray([each.nbytes for each in found])
    known = np.unique(sizes[sizes >= 0])
    if not len(known):
        return Line(latency=float(np.percentile(times, 5)), per_byte=math.nan, sizes=0)
    usual = np.asarray([np.percentile(times[sizes == size], share) for size in known])
    is_met = all(each.is_met for each in found)
    if len(known) == 1 or known[-1] < 2 * known[0] or (known[0] > _SMALL and not is_met):
        if known[-1] <= _SMALL:
            return Line(latency=float(usual.min()), per_byte=0.0, sizes=len(known))
        # Large ones tell no latency: least of all where some of their time may be waiting.
        return Line(latency=0.0, per_byte=float((usual / np.maximum(known, 1)).min()), sizes=len(known))
    counts = np.asarray([float((sizes == size).sum()) for size in known])
    drawn = _through(known.astype(np.float64), usual, counts)
    return replace(drawn, latency=min(drawn.latency, float(usual.min())))


def _through(sizes: Floats, times: Floats, counts: Floats) -> Line:
    """The line of least relative error, neither of whose terms is negative."""
    weight = np.sqrt(counts) / np.maximum(times, 1.0)
    columns = np.stack([weight, weight * sizes], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(columns, weight * times, rcond=None)
    if latency < 0:
        latency = 0.0
        per_byte = float((weight**2 * sizes * times).sum() / (weight**2 * sizes**2).sum())
    if per_byte < 0:
        latency, per_byte = float((weight**2 * times).sum() / (weight**2).sum()), 0.0
    return Line(latency=float(latency), per_byte=float(per_byte), sizes=len(sizes))
