r"""The best cut of gradients into buckets, exactly, for a link of known latency and bandwidth.

Letters: tensors ``1..n`` in the order in which their gradients become ready; ``r_i`` seconds into the
backward pass at which the first ``i`` are ready; ``p_i`` seconds that the forward pass computes with
the first ``i`` of them (it visits them from ``n`` to ``1``); ``b_i`` their bytes together. A cut is a
list of borders ``0 = i_0 < i_1 < … < i_K = n``; a transfer of ``m`` bytes takes ``α + β m``, one after
the other on one channel.

A bucket leaves when its last gradient is ready and the one before it has left, so the reductions end at

    f_k = max(f_(k-1), r(i_k)) + α + β (b(i_k) - b(i_(k-1)))                                     f_0 = 0

Then, in the sharded schedule, parameters come back, bucket ``K`` first since the forward pass needs it
first, each layer waiting for its bucket alone. Read backwards, that is the same recurrence with ``p``
in place of ``r``; it gives the end of the forward pass, counted from ``f_K``:

    h_k = max(h_(k-1), p(i_k)) + α' + β' (b(i_k) - b(i_(k-1)))                                   h_0 = 0

**Objective**: least ``f_K + h_K``, the seconds from the start of a backward pass to the end of the next
forward pass without the update between; without gathers, least ``f_K``. ``f_K - r_n`` and ``h_K - p_n``
are what computation stands still for. Of all cuts with the same ``f_K`` and ``h_K`` the
fewest buckets are taken.

**Method**: with ``g = f - β b`` the step reads ``g_i = max(g_j, r_i - β b_j) + α``, so a border ``j``
can be forgotten for good when a later one has ``g`` no larger. What is left is a short list, and each
border is compared with it alone. With two sums, ``f`` and ``h``, the list holds all pairs of which none
is better in both (a Pareto front); both recurrences are monotone, so no other pair can win.

Source: the recurrence and the greedy rule are MG-WFBP's (arXiv 1811.11141); the reduction in two halves
is DeAR's (arXiv 2302.12445).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tonnage.errors import LayoutError
from tonnage.plan.cluster import Link

Array = NDArray[np.float64]

DDP_CAP = 25 * 2**20
"""Bytes of torch DDP's buckets by default (``bucket_cap_mb=25``)."""
DDP_FIRST = 2**20
"""Bytes of its first one (``dist._DEFAULT_FIRST_BUCKET_BYTES``)."""

_CLOSE = 1e-9
"""Relative difference below which two times are the same: rounding of sums of thousands of terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What one step showed of the trained tensors, in the order in which buckets are cut over them.

    Attributes:
        sizes: bytes of each.
        ready: seconds into the backward pass at which each one's gradient was written.
        forward: seconds that the forward pass computes with each, waiting for it before.
        kinds: dtype and device of each; a bucket never holds two. Empty when all are alike.
    """

    sizes: tuple[int, ...]
    ready: tuple[float, ...]
    forward: tuple[float, ...]
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.sizes)
        if not count or len(self.ready) != count or len(self.forward) != count:
            raise LayoutError(
                f"{count} sizes, {len(self.ready)} times of readiness, {len(self.forward)} of computing",
                hint="give one of each for every tensor, and one tensor or more",
            )
        if self.kinds and len(self.kinds) != count:
            raise LayoutError(f"{count} sizes and {len(self.kinds)} kinds", hint="give one for every tensor")
        numbers = np.array([*self.sizes, *self.ready, *self.forward], dtype=np.float64)
        if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
            raise LayoutError("a size or a time is negative or unknown", hint="observe another step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What a cut leads to, in seconds.

    Attributes:
        reduced: from the start of the backward pass until the last reduction has ended.
        forward: from then until the next forward pass has ended; without gathers, its computation.
        exposed: of both together, how long computation stands still.
        num_buckets: transfers each way.
    """

    reduced: float
    forward: float
    exposed: float
    num_buckets: int

    @property
    def cycle(self) -> float:
        """Backward pass and next forward pass with what they wait for."""
        return self.reduced + self.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Borders between buckets, and what they are predicted to give.

    Attributes:
        boundaries: index after each bucket's last tensor; the last one is the number of tensors.
        timing: of this cut.
        one_bucket: of all tensors together (as few as their kinds and the cap allow).
        per_tensor: of each tensor alone.
        ddp: of torch DDP's default, 1 MiB first and 25 MiB then.
    """

    boundaries: tuple[int, ...]
    timing: Timing
    one_bucket: Timing
    per_tensor: Timing
    ddp: Timing


def best_cut(
    gradients: Gradients, *, reduce: Link, gather: Link | None = None, cap: int | None = None
) -> Cut:
    """The cut with the shortest cycle; exact under the model above.

    Args:
        gradients: as observed.
        reduce: line of a bucket's reduce-scatter, or of its all-reduce. Its latency is all that one
            more bucket costs, the host's work included.
        gather: line of the all-gather under the next forward pass; ``None`` when there is none.
        cap: bytes a bucket may hold; one tensor alone may be larger.

    Raises:
        LayoutError: ``cap`` is not positive.
    """
    model = _Model(gradients, reduce, gather, cap)
    reference = (model.fewest_legal(), tuple(range(1, model.count + 1)), capped_cut(gradients))
    found = model.best()
    one, each, ddp = (model.timing(boundaries) for boundaries in reference)
    return Cut(boundaries=found, timing=model.timing(found), one_bucket=one, per_tensor=each, ddp=ddp)


def cut_timing(
    gradients: Gradients, boundaries: Sequence[int], *, reduce: Link, gather: Link | None = None
) -> Timing:
    """What these borders lead to; see :func:`best_cut`.

    Raises:
        LayoutError: they do not rise to the number of tensors.
    """
    edges = [0, *boundaries]
    if edges[-1] != len(gradients.sizes) or any(a >= b for a, b in itertools.pairwise(edges)):
        raise LayoutError(
            f"borders {list(boundaries)} between {len(gradients.sizes)} tensors",
            hint="give rising indices, of which the last is the number of tensors",
        )
    return _Model(gradients, reduce, gather, None).timing(tuple(boundaries))


def capped_cut(gradients: Gradients, *, cap: int = DDP_CAP, first: int = DDP_FIRST) -> tuple[int, ...]:
    """Borders of buckets that close when they hold ``cap`` bytes, as torch DDP's do.

    Args:
        gradients: for sizes and kinds.
        cap: bytes at which a bucket closes.
        first: bytes at which the first one closes.
    """
    boundaries, held, limit, count = [0], 0, first, len(gradients.sizes)
    for i, size in enumerate(gradients.sizes):
        if gradients.kinds and i > boundaries[-1] and gradients.kinds[i] != gradients.kinds[i - 1]:
            boundaries.append(i)
            held = 0
        held += size
        if held >= limit:
            boundaries.append(i + 1)
            held, limit = 0, cap
    return tuple(boundaries[1:]) if boundaries[-1] == count else (*boundaries[1:], count)


def greedy_cut(gradients: Gradients, *, reduce: Link) -> tuple[int, ...]:
    """Borders by MG-WFBP's rule: take the next tensor in if waiting for it costs less than a latency."""
    free, held, boundaries = 0.0, 0, []
    ready = np.maximum.accumulate(gradients.ready)
    for i, size in enumerate(gradients.sizes[:-1]):
        held += size
        start = max(free, float(ready[i]))
        if ready[i + 1] - start >= reduce.latency:
            boundaries.append(i + 1)
            free, held = start + reduce.latency + held / reduce.bandwidth, 0
    return (*boundaries, len(gradients.sizes))


class _Model:
    """The two recurrences, as arrays that begin with the empty prefix."""

    def __init__(self, gradients: Gradients, reduce: Link, gather: Link | None, cap: int | None) -> None:
        if cap is not None and cap <= 0:
            raise LayoutError(f"a bucket of {cap} bytes holds nothing", hint="give a cap of 1 byte or more")
        self.count = len(gradients.sizes)
        self.held = _prefix(np.cumsum(gradients.sizes, dtype=np.float64))
        self.needs = (
            _prefix(np.maximum.accumulate(np.asarray(gradients.ready, dtype=np.float64))),
            _prefix(np.cumsum(gradients.forward, dtype=np.float64)),
        )
        self.latency = (reduce.latency, gather.latency if gather else 0.0)
        self.slope = (1 / reduce.bandwidth, 1 / gather.bandwidth if gather else 0.0)
        self.earliest = self._earliest(gradients.kinds, cap)

    def _earliest(self, kinds: Sequence[str], cap: int | None) -> NDArray[np.int64]:
        """For each border the first border at which a bucket that ends there may begin."""
        first = np.zeros(self.count + 1, dtype=np.int64)
        if cap is not None:
            first = np.searchsorted(self.held, self.held - cap, side="left")
        for i in range(1, self.count):
            if kinds and kinds[i] != kinds[i - 1]:
                first[i + 1 :] = np.maximum(first[i + 1 :], i)
        return np.minimum(first, np.maximum(np.arange(self.count + 1) - 1, 0))

    def ends(self, boundaries: Sequence[int]) -> tuple[float, float]:
        """``f_K`` and ``h_K``."""
        edges = np.array([0, *boundaries])
        lengths = np.diff(self.held[edges])
        found = []
        for need, latency, slope in zip(self.needs, self.latency, self.slope, strict=True):
            end = 0.0
            for at, seconds in zip(need[edges[1:]], latency + slope * lengths, strict=True):
                end = max(end, at) + seconds
            found.append(float(end))
        return found[0], found[1]

    def timing(self, boundaries: Sequence[int]) -> Timing:
        reduced, forward = self.ends(boundaries)
        computed = float(self.needs[0][-1] + self.needs[1][-1])
        return Timing(
            reduced=reduced,
            forward=forward,
            exposed=max(0.0, reduced + forward - computed),
            num_buckets=len(boundaries),
        )

    def fewest_legal(self) -> tuple[int, ...]:
        """As few buckets as kinds and cap allow."""
        return self._from_the_end(np.inf, np.inf)

    def best(self) -> tuple[int, ...]:
        """The best legal cut, with the fewest buckets that end when it does."""
        least = (
            float(self._search((True, False))[:, 0].min()),
            float(self._search((False, True))[:, 1].min()),
        )
        bound = min(sum(self.ends(cut)) for cut in self._near(*least)) * (1 + _CLOSE)
        found = self._search((True, True), least=least, bound=bound)
        reduced, forward = found[found.sum(axis=1).argmin()]
        return self._from_the_end(reduced * (1 + _CLOSE), forward * (1 + _CLOSE))

    def _near(self, reduced: float, forward: float) -> list[tuple[int, ...]]:
        """Legal cuts that come near both ends: the nearer, the sooner the search gives others up."""
        more = np.concatenate([[0.0], np.geomspace(1e-6, 1.0, 40)]) * (reduced + forward)
        near = [self._from_the_end(reduced + a, forward + a) for a in more]
        near += [self._from_the_end(reduced + a, np.inf) for a in more]
        return near + [self._from_the_end(np.inf, forward + a) for a in more]

    def _search(
        self, legs: tuple[bool, bool], *, least: tuple[float, float] = (0.0, 0.0), bound: float = np.inf
    ) -> Array:
        """All pairs ``(f_n, h_n)`` of legal cuts of which none is better in both, ``(pairs, 2)``.

        Args:
            legs: which of the two count; the other is taken to cost nothing.
            least: the least of each that any cut reaches.
            bound: pairs with a larger sum are of no interest.
        """
        on = np.array(legs, dtype=np.float64)
        need = np.stack(self.needs, axis=1) * on
        latency, slope = np.array(self.latency) * on, np.array(self.slope) * on
        lag = self.held[:, None] * slope
        at, g = np.zeros(1, dtype=np.int64), np.zeros((1, 2))
        new = g
        for i in range(1, self.count + 1):
            if at[0] < self.earliest[i]:
                legal = int(np.searchsorted(at, self.earliest[i]))
                at, g = at[legal:], g[legal:]
            # What a link that has caught up did before is of no more account: so it is forgotten here.
            g = np.maximum(g, need[i] - lag[at])
            new = g + latency
            rest = latency if i < self.count else 0.0
            new = _front(new[np.maximum(new + lag[-1] + rest, least).sum(axis=1) <= bound])
            if len(new):
                ahead = need[min(i + 1, self.count)]
                keep = ~_beaten(np.maximum(g, ahead - lag[at]), _front(np.maximum(new, ahead - lag[i])))
                at = np.concatenate([at[keep], np.full(len(new), i)])
                g = np.concatenate([g[keep], new])
        ends: Array = new + lag[-1]
        return ends

    def _from_the_end(self, reduced: float, forward: float) -> tuple[int, ...]:
        """The fewest buckets that end by these times; some cut must.

        ``f_K`` is the largest of ``r(i_k) + m α + β (b_n - b(i_(k-1)))`` over all buckets, ``m`` of
        them from that one on. Taking as much as that allows from the end leaves the most room.
        """
        stop, boundaries = self.count, []
        while stop:
            boundaries.append(stop)
            begin = int(self.earliest[stop])
            for limit, need, latency, slope in zip(
                (reduced, forward), self.needs, self.latency, self.slope, strict=True
            ):
                room = limit - need[stop] - len(boundaries) * latency
                if slope and np.isfinite(room):
                    begin = max(begin, int(np.searchsorted(self.held, self.held[-1] - room / slope)))
            stop = min(begin, stop - 1)
        return tuple(reversed(boundaries))


def _prefix(values: Array) -> Array:
    return np.concatenate([[0.0], values])


def _front(pairs: Array) -> Array:
    """The pairs of which none is as good in both, by rising first and falling second value."""
    if len(pairs) < 2:
        return pairs
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    before = np.concatenate([[np.inf], np.minimum.accumulate(pairs[:-1, 1])])
    return pairs[pairs[:, 1] < before]


def _beaten(pairs: Array, front: Array) -> NDArray[np.bool_]:
    """Which pairs have one in ``front`` that is at least as good in both."""
    nearest = np.searchsorted(front[:, 0], pairs[:, 0], side="right") - 1
    beaten: NDArray[np.bool_] = (nearest >= 0) & (front[nearest, 1] <= pairs[:, 1])
    return beaten
