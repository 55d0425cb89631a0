"""A link's latency and bandwidth from timed transfers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tonnage.errors import EngineError
from tonnage.plan import Link

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


def _weighted_median(values: Array, weights: Array) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
