"""The layout nearest to one that needs more memory than a card has, and that does fit.

Nearest is what changes fewest things; among equals what is fastest. The degrees keep multiplying to
the same cards, and the batch stays.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import numpy as np

from tonnage.errors import LayoutError
from tonnage.plan.cluster import Cluster
from tonnage.plan.grid import grid_of
from tonnage.plan.layout import Batch, Layout, Recompute, check
from tonnage.plan.memory import worst_memory
from tonnage.plan.model import Model
from tonnage.plan.steptime import step_time

DEGREES = (1, 2, 4, 8, 16)
"""How many times larger a degree may become."""


def nearest_fit(model: Model, cluster: Cluster, layout: Layout, batch: Batch) -> Layout | None:
    """The nearest layout that fits, or nothing where none of those tried does."""
    tried = [each for each in _near(layout, cluster) if _is_legal(each, model, cluster, batch)]
    if not tried:
        return None
    grid = grid_of(tried, model, batch)
    fits = worst_memory(model, grid, cluster)[0] <= cluster.device.memory
    if not fits.any():
        return None
    changed = np.array([len(_changes(layout, each)) for each in tried])
    seconds = step_time(model, grid, cluster).total
    order = np.lexsort((seconds, changed, ~fits))
    return tried[int(order[0])]


def changes_text(old: Layout, new: Layout) -> str:
    """The options that make the one layout the other: ``--zero 3 --recompute full``."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in _changes(old, new))


def _changes(old: Layout, new: Layout) -> list[tuple[str, object]]:
    names = ("tp", "pp", "zero", "micro_batch", "recompute")
    return [(name, getattr(new, name)) for name in names if getattr(new, name) != getattr(old, name)]


def _near(layout: Layout, cluster: Cluster) -> Iterator[Layout]:
    recompute: tuple[Recompute, ...] = ("full",) if layout.recompute == "full" else (layout.recompute, "full")
    micro = sorted({layout.micro_batch, 1, max(1, layout.micro_batch // 2)}, reverse=True)
    sharded = sorted({layout.zero, max(layout.zero, 1), 3})
    for wider, deeper in itertools.product(DEGREES, DEGREES):
        if layout.dp % (wider * deeper) or layout.tp * wider > max(cluster.domain, layout.tp):
            continue
        dp, tp, pp = layout.dp // (wider * deeper), layout.tp * wider, layout.pp * deeper
        for zero, b, again in itertools.product(sharded, micro, recompute):
            # Sharding needs replicas; with a pipeline, weights gathered in each micro-batch cost too much.
            if (dp * layout.cp == 1 and zero > layout.zero) or (zero == 3 and pp > 1 and layout.zero < 3):
                continue
            shard = layout.shard if layout.shard and dp * layout.cp % layout.shard == 0 else 0
            # Experts or chunks may not divide what is left.
            with contextlib.suppress(LayoutError):
                yield layout.replace(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    sp=layout.sp or (tp > 1 and layout.tp == 1),
                    zero=zero,
                    shard=shard,
                    micro_batch=b,
                    recompute=again,
                    stages=layout.stages if deeper == 1 else (),
                )


def _is_legal(layout: Layout, model: Model, cluster: Cluster, batch: Batch) -> bool:
    try:
        check(layout, model, batch, num_devices=cluster.num_devices)
    except LayoutError:
        return False
    return True
