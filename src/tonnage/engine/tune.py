"""From what the first steps measured to a cut of buckets that all ranks share.

A link's line is fitted to timed transfers; :func:`tonnage.plan.best_cut` finds the cut for it; a
number of 64 bits says whether all ranks mean the same one; and a new cut is worth making only if it
earns what making it costs. Values in, values out: nothing here measures or communicates.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tonnage.errors import EngineError
from tonnage.plan import Link, Timing

LEAST_GAIN = 0.03
"""Share of the cycle below which a predicted gain is noise: emulated steps repeat to about 2 %."""

HORIZON = 1000
"""Steps within which making new buckets must have paid for itself."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A line through timed transfers.

    Attributes:
        link: latency, and payload bytes a second.
        error: median over the sizes of ``|predicted / median measured - 1|``.
        num_samples: transfers that it rests on.
    """

    link: Link
    error: float
    num_samples: int


def fit_link(samples: Iterable[tuple[int, float]]) -> LinkFit:
    """The line ``seconds = latency + nbytes / bandwidth`` that outliers do not bend.

    Of each size the median counts; the slope is the weighted median of the slopes between all pairs of
    sizes (wider pairs weigh more), the latency that of what is left (short times weigh more), or zero.

    Args:
        samples: bytes and seconds of each transfer, all with the same operation and group.

    Raises:
        EngineError: fewer than two sizes, a time that is none, or times that do not grow with size.

    Source: Theil (1950) and Sen (1968) for the slope.
    """
    by_size: dict[int, list[float]] = {}
    for nbytes, seconds in samples:
        if not (nbytes >= 0 and np.isfinite(seconds) and seconds > 0):
            raise EngineError(f"a transfer of {nbytes} bytes in {seconds} s", hint="measure the link again")
        by_size.setdefault(nbytes, []).append(seconds)
    if len(by_size) < 2:
        raise EngineError(
            f"a link's line needs transfers of two sizes or more, and has {len(by_size)}",
            hint="time transfers of another size as well",
        )
    sizes = np.array(sorted(by_size), dtype=np.float64)
    times = np.array([np.median(by_size[int(size)]) for size in sizes])
    first, second = np.triu_indices(len(sizes), k=1)
    apart = sizes[second] - sizes[first]
    slope = _weighted_median((times[second] - times[first]) / apart, apart)
    if slope <= 0:
        raise EngineError("larger transfers took no longer than small ones", hint="time larger ones as well")
    latency = max(0.0, _weighted_median(times - slope * sizes, 1 / times))
    return LinkFit(
        link=Link(rate=1 / slope, latency=latency),
        error=float(np.median(np.abs((latency + slope * sizes) / times - 1))),
        num_samples=sum(map(len, by_size.values())),
    )


def plan_hash(boundaries: Sequence[int], names: Sequence[str], shapes: Sequence[Sequence[int]]) -> int:
    """A signed 64-bit number that all ranks must agree on before they use a cut.

    Two ranks that exchange unlike buckets of equal size get wrong sums without any error.

    Args:
        boundaries: index after each bucket's last tensor.
        names: of the tensors, in the order in which they are cut.
        shapes: of the same.

    Raises:
        EngineError: the boundaries do not rise to the number of tensors.
    """
    edges = [0, *boundaries]
    if edges[-1] != len(names) or any(a >= b for a, b in itertools.pairwise(edges)):
        raise EngineError(
            f"borders {list(boundaries)} between {len(names)} tensors",
            hint="give rising indices, of which the last is the number of tensors",
        )
    plan = [list(map(int, boundaries)), [[n, *map(int, s)] for n, s in zip(names, shapes, strict=True)]]
    # `repr` quotes names, so that no name can look like the border between two others.
    digest = hashlib.sha256(repr(plan).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def should_replan(
    current: Timing, best: Timing, *, cost: float, least_gain: float = LEAST_GAIN, horizon: int = HORIZON
) -> bool:
    """Whether the best cut is worth changing to.

    Only if its cycle is shorter by ``least_gain`` of the current one, and what ``horizon`` steps gain
    exceeds ``cost``. Both timings must come from the same, latest measurement.

    Args:
        current: of the cut in use.
        best: of the best cut.
        cost: seconds that making the new buckets takes.
        least_gain: share of the cycle.
        horizon: steps.
    """
    gain = current.cycle - best.cycle
    return gain >= least_gain * current.cycle and gain * horizon > cost


def _weighted_median(values: Array, weights: Array) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
