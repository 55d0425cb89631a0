"""Ranks on one clock: a collective ends on all of them at once, so the ends say how far clocks are apart.

Of two ranks, the median difference of the ends of the collectives that both took part in is the
difference of their clocks, and the median deviation from it, over the root of how many there were, says
how well it is known. Ranks that share no collective are joined through others: the tree over ranks that
uses the best-known pairs. Ranks of one host share a clock; a difference that the ends' own spread
explains is none.

Source: the alignment of dPRO (Hu et al., MLSys 2022), with collectives in place of sends and receives.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.trace.events import Collectives

_ALIKE = 50_000
"""Nanoseconds within which ends agree on one host: kernels of one collective end up to 10 us apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Nanoseconds to add to a rank's clock, and by how much that may be off."""

    offset: int
    error: int


def clock_offsets(
    ranks: Sequence[Collectives], meets: Sequence[Sequence[tuple[int, int]]]
) -> tuple[Clock, ...]:
    """What to add to each rank's clock so that collectives end at once on all of them."""
    pairs = _pairs(ranks, meets)
    known: dict[int, Clock] = {}
    for root in range(len(ranks)):
        # Ranks that nothing joins to the first ones keep their own clock.
        if root not in known:
            known[root] = Clock(offset=0, error=0)
            _reach(known, root, pairs)
    return tuple(known[position] for position in range(len(ranks)))


def _pairs(
    ranks: Sequence[Collectives], meets: Sequence[Sequence[tuple[int, int]]]
) -> dict[tuple[int, int], Clock]:
    """For ranks that met, what to add to the second's clock to have the first's."""
    apart: dict[tuple[int, int], list[int]] = {}
    for members in meets:
        # Against the first of a collective: all pairs of a thousand ranks would be half a million.
        (first, i), *others = sorted(members)
        end = int(ranks[first].stop[i])
        for rank, k in others:
            if rank != first:
                apart.setdefault((first, rank), []).append(end - int(ranks[rank].stop[k]))
    return {pair: _clock(each) for pair, each in apart.items()}


def _clock(apart: Sequence[int]) -> Clock:
    middle = float(np.median(apart))
    spread = float(np.median(np.abs(np.asarray(apart) - middle)))
    error = round(spread / math.sqrt(len(apart)))
    if abs(middle) < max(4 * spread, _ALIKE):
        return Clock(offset=0, error=error)
    return Clock(offset=round(middle), error=error)


def _reach(known: dict[int, Clock], root: int, pairs: dict[tuple[int, int], Clock]) -> None:
    """Prim's tree over pairs by their error, from ``root``."""
    ways: dict[int, list[tuple[int, int, int]]] = {}
    for (one, other), clock in pairs.items():
        ways.setdefault(one, []).append((clock.error, other, clock.offset))
        ways.setdefault(other, []).append((clock.error, one, -clock.offset))
    heap = [(error, rank, root, offset) for error, rank, offset in ways.get(root, ())]
    heapq.heapify(heap)
    while heap:
        error, rank, via, offset = heapq.heappop(heap)
        if rank in known:
            continue
        known[rank] = Clock(offset=known[via].offset + offset, error=known[via].error + error)
        for further, to, step in ways.get(rank, ()):
            heapq.heappush(heap, (further, to, rank, step))
