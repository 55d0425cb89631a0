"""Interval arithmetic on many stretches of time at once: union, intersection, difference.

A set of intervals is a float array of shape ``(n, 2)``, a row for ``[start, stop)``. Results are
*normal*: sorted, disjoint, not touching, none empty. Every function accepts sets that are not.
Sorting dominates: O(n log n), all in NumPy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Intervals = NDArray[np.float64]
"""Shape ``(n, 2)``: seconds at which each stretch starts and stops."""


def intervals(start: ArrayLike, stop: ArrayLike) -> Intervals:
    """The set of intervals with these starts and stops; those with a NaN end are left out."""
    pairs = np.stack([np.asarray(start, np.float64), np.asarray(stop, np.float64)], axis=-1).reshape(-1, 2)
    return pairs[~np.isnan(pairs).any(axis=1)]


def union(*sets: Intervals) -> Intervals:
    """The normal set that covers whatever any of ``sets`` covers."""
    pairs = np.concatenate([_pairs(each) for each in sets]) if sets else np.empty((0, 2))
    pairs = pairs[pairs[:, 1] > pairs[:, 0]]
    if len(pairs) == 0:
        return np.empty((0, 2))
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(pairs[:, 1])
    # A new stretch begins where a start lies beyond everything that came before it.
    first = np.concatenate([[True], pairs[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([pairs[first, 0], reach[last]], axis=1)


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """The normal set covered by both ``a`` and ``b``."""
    return _where_depth(union(a), union(b), wanted=(1, 1))


def difference(a: Intervals, b: Intervals) -> Intervals:
    """The normal set covered by ``a`` and not by ``b``."""
    return _where_depth(union(a), union(b), wanted=(1, 0))


def length(a: Intervals) -> float:
    """Seconds covered by ``a``, each counted once however often it is covered."""
    normal = union(a)
    return float((normal[:, 1] - normal[:, 0]).sum())


def overlap(a: Intervals, b: Intervals) -> float:
    """Seconds covered by both."""
    return length(intersection(a, b))


def exposed(movement: Intervals, compute: Intervals) -> float:
    """Seconds of ``movement`` that no ``compute`` runs beside."""
    return length(difference(movement, compute))


def _pairs(a: Intervals) -> Intervals:
    return np.asarray(a, np.float64).reshape(-1, 2)


def _where_depth(a: Intervals, b: Intervals, *, wanted: tuple[int, int]) -> Intervals:
    """The stretches in which a point is covered by ``a`` and ``b`` just as ``wanted``; both normal."""
    edges = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    if len(edges) < 2:
        return np.empty((0, 2))
    left = edges[:-1]
    inside = [
        np.searchsorted(s[:, 0], left, side="right") > np.searchsorted(s[:, 1], left, side="right")
        for s in (a, b)
    ]
    keep = (inside[0] == bool(wanted[0])) & (inside[1] == bool(wanted[1]))
    return union(np.stack([left[keep], edges[1:][keep]], axis=1))
