r"""What a collective puts on the wire, and what its time says of the link.

Letters: ``n`` ranks, ``S`` payload. The payload of an all-reduce, broadcast or reduce is the tensor
that each rank holds; that of an all-gather, reduce-scatter or all-to-all is the *whole*, ``n`` times
a rank's part, as nccl-tests has it.

Bytes that one rank sends, on average over the ranks:

=============== =================== =========================================================
op              bytes               algorithms
=============== =================== =========================================================
all-reduce      ``2 (n-1)/n S``     ring; direct (reduce-scatter + all-gather); tree (mean)
reduce-scatter  ``(n-1)/n S``       ring, direct
all-gather      ``(n-1)/n S``       ring, direct
all-to-all      ``(n-1)/n S``       direct
broadcast       ``(n-1)/n S``       chain or tree (mean): each rank but one receives ``S`` once
reduce          ``(n-1)/n S``       the same, backwards
send            ``S``
recv            ``0``
=============== =================== =========================================================

Ring, direct exchange and trees differ in messages and latency (see :func:`num_steps`), and in who
sends most, but not in the mean. The busiest rank of a single tree sends ``3 S`` in an all-reduce
(up once, down to two children); NCCL's two trees halve that to ``2 S`` by making each rank a leaf
of one of them.

Source: nccl-tests, doc/PERFORMANCE.md (algbw, busbw, factors); Sanders, Speck and Träff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", 2009.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from tonnage.errors import LayoutError

Algorithm = Literal["ring", "direct", "tree"]

_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send": lambda n: 1.0,
    "recv": lambda n: 1.0,
}
_WIRE_FACTORS: dict[str, Callable[[int], float]] = {
    **_BUS_FACTORS,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "send": lambda n: float(n > 1),
    "recv": lambda n: 0.0,
    "barrier": lambda n: 0.0,
    "copy": lambda n: 0.0,
    "read": lambda n: 0.0,
    "write": lambda n: 1.0,
}


def bus_factor(op: str, group_size: int) -> float:
    """``busbw / algbw`` of ``op``: the share of the payload that must cross each rank's link.

    Raises:
        LayoutError: the group is empty, or ``op`` has no bus bandwidth.
    """
    return _factor(_BUS_FACTORS, op, group_size)


def wire_nbytes(op: str, nbytes: int, group_size: int) -> float:
    """Bytes that one rank of the group sends for ``op``, on average over its ranks.

    Args:
        op: a collective of :data:`tonnage.ledger.OPS`.
        nbytes: payload, as defined at the head of this module.
        group_size: ranks that take part; one alone moves nothing, except to a store (``write``).

    Raises:
        LayoutError: the group is empty, or ``op`` puts nothing definite on a wire.
    """
    return _factor(_WIRE_FACTORS, op, group_size) * nbytes


def num_steps(op: str, group_size: int, algorithm: Algorithm = "ring") -> int:
    """Messages that must follow one another: what latency is paid for.

    A ring hands each piece on ``n-1`` times (twice for all-reduce). Direct exchange does a
    reduce-scatter or all-gather in one step. A binary tree is ``ceil(log2 n)`` deep.
    """
    _factor(_WIRE_FACTORS, op, group_size)
    if group_size == 1:
        return 0
    per_pass = {"ring": group_size - 1, "direct": 1, "tree": math.ceil(math.log2(group_size))}[algorithm]
    if op in ("send", "recv"):
        return 1
    return 2 * per_pass if op == "all-reduce" else per_pass


def algbw(nbytes: int, seconds: float) -> float:
    """Algorithm bandwidth: payload over time, bytes per second; NaN without a time."""
    return nbytes / seconds if seconds > 0 else math.nan


def busbw(op: str, nbytes: int, seconds: float, group_size: int) -> float:
    """Bus bandwidth, bytes per second: comparable with a link's speed whatever the group's size."""
    return algbw(nbytes, seconds) * bus_factor(op, group_size)


def _factor(table: Mapping[str, Callable[[int], float]], op: str, group_size: int) -> float:
    if group_size < 1:
        raise LayoutError(f"{op} over {group_size} ranks", hint="use groups of 1 or more")
    if op not in table:
        raise LayoutError(f"no byte formula for {op!r}", hint=f"known: {', '.join(table)}")
    return table[op](group_size)
