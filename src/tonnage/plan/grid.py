"""Many layouts side by side: the same fields as :class:`Layout`, each an array.

All formulas of the planner take a grid, so one layout and a search's thousands go through the same
lines. A single prediction is a grid of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tonnage.plan.layout import RECOMPUTES, Batch, Layout, Recipe, chunk_layers
from tonnage.plan.model import Layer, Model

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Layouts as columns; see :class:`Layout` for the meaning of each.

    Attributes:
        m: micro-batches a step.
        shard: ranks that ZeRO's shards are spread over; never 0 here.
        recompute: index into ``RECOMPUTES``.
        again: share of the layers recomputed.
        recipe: one for all.
        seq: tokens a sequence, one for all.
        counts: layers of each kind in the first, the fullest and the last stage:
            ``(layouts, 3, kinds)``.
        mean: layers of each kind in a stage on average: ``(layouts, kinds)``.
    """

    dp: Ints
    tp: Ints
    pp: Ints
    cp: Ints
    ep: Ints
    sp: NDArray[np.bool_]
    virtual: Ints
    zero: Ints
    shard: Ints
    micro_batch: Ints
    recompute: Ints
    again: Floats
    m: Ints
    seq: int
    recipe: Recipe
    counts: Floats
    mean: Floats

    @property
    def size(self) -> int:
        """Layouts in the grid."""
        return len(self.dp)

    @property
    def tokens(self) -> Floats:
        """Tokens of a micro-batch on one rank of the context group."""
        return self.micro_batch * (self.seq / self.cp)

    @property
    def expert_tp(self) -> Ints:
        """Ranks that share one expert's matrices: tensor parallel only where experts aren't spread."""
        return np.where(self.ep > 1, 1, self.tp)

    @property
    def expert_replicas(self) -> Ints:
        """Ranks that hold the same experts."""
        return np.maximum(1, self.dp * self.cp * self.tp // (self.expert_tp * self.ep))


def grid_of(layouts: Sequence[Layout], model: Model, batch: Batch) -> Grid:
    """The layouts as columns; they must share one recipe.

    Raises:
        LayoutError: a layout's micro-batches don't divide the batch.
    """
    recipe = layouts[0].recipe
    assert all(each.recipe is recipe or each.recipe == recipe for each in layouts)

    def column(name: str) -> Ints:
        return np.array([getattr(each, name) for each in layouts], dtype=np.int64)

    shard = column("shard")
    dp, cp = column("dp"), column("cp")
    counts, mean = stage_counts(layouts, model)
    return Grid(
        dp=dp,
        tp=column("tp"),
        pp=column("pp"),
        cp=cp,
        ep=column("ep"),
        sp=np.array([each.sp for each in layouts], dtype=bool),
        virtual=column("virtual"),
        zero=column("zero"),
        shard=np.where(shard == 0, dp * cp, shard),
        micro_batch=column("micro_batch"),
        recompute=np.array([RECOMPUTES.index(each.recompute) for each in layouts], dtype=np.int64),
        again=np.array([each.recompute_share for each in layouts]),
        m=np.array([each.num_micro_batches(batch) for each in layouts], dtype=np.int64),
        seq=batch.seq,
        recipe=recipe,
        counts=counts,
        mean=mean,
    )


def stage_counts(layouts: Sequence[Layout], model: Model) -> tuple[Floats, Floats]:
    """Layers of each kind in the first, fullest and last stage, and on average."""
    cache: dict[tuple[int, int, tuple[int, ...]], tuple[Floats, Floats]] = {}
    picked = []
    for layout in layouts:
        key = (layout.pp, layout.virtual, layout.stages)
        if key not in cache:
            per_stage = stage_layers(layout, model)
            # The fullest stage is the one with most parameters in it; among equals a middle one.
            weights = np.array([layer.active_params for layer, _ in kinds(model)], dtype=np.float64)
            load = per_stage @ weights
            fullest = int(np.argmax(load)) if load.max() > load[len(load) // 2] else len(load) // 2
            cache[key] = (per_stage[[0, fullest, -1]], per_stage.mean(axis=0))
        picked.append(cache[key])
    return np.stack([each for each, _ in picked]), np.stack([each for _, each in picked])


def stage_layers(layout: Layout, model: Model) -> Floats:
    """Layers of each kind on each stage: ``(stages, kinds)``."""
    chunks = chunk_counts(layout, model)
    stages: Floats = chunks.reshape(layout.virtual, layout.pp, -1).sum(axis=0)
    return stages


def chunk_counts(layout: Layout, model: Model) -> Floats:
    """Layers of each kind in each chunk: ``(chunks, kinds)``; chunk ``j`` is on stage ``j % pp``."""
    cut = layout.stages or chunk_layers(model.num_layers, layout.pp * layout.virtual)
    kind_of = kind_order(model)
    ends = np.cumsum(cut)
    counts = np.zeros((len(cut), len(kinds(model))))
    for chunk, (stop, size) in enumerate(zip(ends, cut, strict=True)):
        for kind in kind_of[stop - size : stop]:
            counts[chunk, kind] += 1
    return counts


def kinds(model: Model) -> list[tuple[Layer, int]]:
    """Different kinds of layer with how many there are, in order of appearance."""
    found: list[tuple[Layer, int]] = []
    for layer, count in model.layers:
        for i, (known, total) in enumerate(found):
            if known == layer:
                found[i] = (known, total + count)
                break
        else:
            found.append((layer, count))
    return found


def kind_order(model: Model) -> list[int]:
    """The kind of each layer in order, as its place in :func:`kinds`."""
    known = [layer for layer, _ in kinds(model)]
    return [known.index(layer) for layer, count in model.layers for _ in range(count)]
