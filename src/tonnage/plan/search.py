"""The fastest layouts of a model on a cluster that fit in memory.

All legal layouts are listed; those whose states alone don't fit, or whose work alone takes longer
than the best found, are dropped unpriced; the rest go through the closed forms in blocks; the best
are simulated and ranked again. Also asked from the other side: which cluster is the cheapest for a
deadline, and how slow a NIC may be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.errors import LayoutError
from tonnage.plan import flops
from tonnage.plan.cluster import Cluster
from tonnage.plan.compute import IN_TRAINING
from tonnage.plan.grid import Floats, Ints, grid_of
from tonnage.plan.layout import OPTIMIZER_NBYTES, Batch, Layout, Recipe, Recompute
from tonnage.plan.memory import CONTEXT, worst_memory
from tonnage.plan.model import Model
from tonnage.plan.predict import Prediction, predict
from tonnage.plan.steptime import step_time

BLOCK = 2048
"""Layouts priced together."""

HEADROOM = 0.95
"""Share of a card's memory that a layout may plan to use."""

SIMULATED = 24
"""Layouts of the closed forms' ranking that are simulated."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        best: predictions, fastest first.
        considered: legal layouts.
        dropped: layouts dropped by a bound before they were priced.
        too_large: layouts that need more memory than a card has.
        why: what the best gains over the next, in words that a table can show.
    """

    best: list[Prediction]
    considered: int
    dropped: int
    too_large: int
    why: list[Reason]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One part of the step in which two layouts differ.

    Attributes:
        part: name of the part.
        best: its seconds in the best layout.
        other: its seconds in the runner-up.
    """

    part: str
    best: float
    other: float


def search(
    model: Model,
    cluster: Cluster,
    batch: Batch,
    *,
    recipe: Recipe | None = None,
    top: int = 10,
    progress: Progress | None = None,
) -> Found:
    """The fastest layouts that fit.

    Args:
        model: what is trained.
        cluster: on what.
        batch: sequences a step and tokens a sequence.
        recipe: habits of the software; today's Megatron-Core by default.
        top: how many to return.
        progress: told how many layouts of how many are priced.

    Raises:
        LayoutError: none fits, with what is nearest.
    """
    recipe = recipe or Recipe()
    layouts = list(legal_layouts(model, cluster, batch, recipe))
    if not layouts:
        raise LayoutError(
            f"no layout of {model.name} divides {cluster.num_devices} cards and {batch.sequences} sequences",
            hint="use a number of cards and a global batch with more divisors, such as powers of 2",
        )
    limit = cluster.device.memory * HEADROOM
    states = _state_nbytes(layouts, model)
    kept = [layouts[i] for i in np.flatnonzero(states < limit)]
    if not kept:
        raise _nothing_fits(model, cluster, layouts, states)
    # Work alone, cheapest first: once that is longer than the best found, the rest can't win.
    bounds = _work_seconds(kept, model, cluster, batch)
    order = np.argsort(bounds, kind="stable")
    seconds, needed, priced = _price(kept, order, bounds, model, cluster, batch, limit, progress, top)
    fitting = priced[needed[priced] <= limit]
    if not len(fitting):
        smallest = priced[int(np.argmin(needed[priced]))]
        raise _nothing_fits(model, cluster, kept, needed, at=int(smallest))
    ranked = fitting[np.argsort(seconds[fitting], kind="stable")]
    finalists = [predict(model, cluster, kept[i], batch) for i in ranked[: max(SIMULATED, top)]]
    finalists.sort(key=lambda each: each.seconds)
    if progress:
        progress(len(kept), len(kept))
    best = finalists[:top]
    return Found(
        best=best,
        considered=len(layouts),
        dropped=len(layouts) - len(priced),
        too_large=int(len(layouts) - len(kept) + (needed[priced] > limit).sum()),
        why=reasons(best[0], best[1]) if len(best) > 1 else [],
    )


def reasons(best: Prediction, other: Prediction) -> list[Reason]:
    """Parts in which two predictions differ, largest difference first."""
    found = [Reason(part=name, best=best.parts[name], other=other.parts[name]) for name in best.parts]
    found.sort(key=lambda each: -abs(each.other - each.best))
    return [each for each in found if abs(each.other - each.best) > 1e-6]


def legal_layouts(model: Model, cluster: Cluster, batch: Batch, recipe: Recipe) -> Iterator[Layout]:
    """Every layout that the model, the cards and the batch allow, useless ones left out.

    Tensor parallelism stays in a scale-up domain; context parallelism leaves a rank 2048 tokens or
    more; interleaving needs whole groups of micro-batches.
    """
    n = cluster.num_devices
    heads = min((layer.heads for layer, _ in model.layers if layer.heads), default=1)
    for tp in _divisors(heads, min(cluster.domain, n)):
        for pp in _divisors(n // tp if n % tp == 0 else 0, model.num_layers):
            for cp in _context_degrees(n, tp * pp, batch.seq):
                if n % (tp * pp * cp):
                    continue
                dp = n // (tp * pp * cp)
                if batch.sequences % dp:
                    continue
                yield from _with_choices(model, batch, recipe, dp, tp, pp, cp)


def _with_choices(
    model: Model, batch: Batch, recipe: Recipe, dp: int, tp: int, pp: int, cp: int
) -> Iterator[Layout]:
    each = batch.sequences // dp
    micro = [b for b in (1, 2, 4, 8) if each % b == 0]
    zero = [1, 3] if dp * cp > 1 and pp == 1 else [1] if dp * cp > 1 else [0]
    experts = [1]
    if model.experts:
        experts = [e for e in _divisors(model.experts, dp * cp) if (dp * cp) % e == 0]
    recompute: tuple[Recompute, ...] = (
        ("none", "selective", "full") if recipe.attention == "eager" else ("none", "full")
    )
    for b, z, ep, again in itertools.product(micro, zero, experts, recompute):
        for v in _virtual(model.num_layers, pp, each // b, recipe):
            yield Layout(
                dp=dp,
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep,
                sp=tp > 1,
                virtual=v,
                zero=z,
                micro_batch=b,
                recompute=again,
                recipe=recipe,
            )


def _virtual(layers: int, pp: int, micro_batches: int, recipe: Recipe) -> list[int]:
    if pp == 1 or not recipe.interleaves or micro_batches % pp:
        return [1]
    even = [
        v
        for v in range(2, min(layers // pp, 12) + 1)
        if layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0
    ]
    return [1, *even]


def _context_degrees(cards: int, used: int, seq: int) -> list[int]:
    return [c for c in (1, 2, 4, 8, 16, 32, 64) if c == 1 or (cards % (used * c) == 0 and seq // c >= 2048)]


def _divisors(of: int, most: int) -> list[int]:
    return [i for i in range(1, min(of, most) + 1) if of % i == 0]


def _state_nbytes(layouts: Sequence[Layout], model: Model) -> Floats:
    """Least bytes of weights, gradients and optimizer on a card: a bound from below, without activations."""
    dense = sum(layer.dense_params * count for layer, count in model.layers)
    routed = sum(layer.expert_params * count for layer, count in model.layers)
    fields = np.array([(x.dp * x.cp, x.tp, x.pp, x.ep, x.zero) for x in layouts], dtype=np.float64).T
    replicas, tp, pp, ep, zero = fields
    recipe = layouts[0].recipe
    share = recipe.trainable
    states = (4.0 * recipe.master + OPTIMIZER_NBYTES[recipe.optimizer]) * share
    plain = 2.0 + recipe.grad_nbytes * share
    cut = np.where(zero == 3, replicas, 1)
    spread = np.where(zero >= 1, replicas, 1)
    own = dense / (tp * pp) * (plain / cut + states / spread)
    ways = np.where(ep > 1, ep, tp)
    expert = routed / (ways * pp) * (plain / cut + states / np.maximum(1, spread * tp / ways))
    total: Floats = own + expert + CONTEXT
    return total


def _work_seconds(layouts: Sequence[Layout], model: Model, cluster: Cluster, batch: Batch) -> Floats:
    """Least seconds of the products alone: a bound from below."""
    how = flops.CONVENTIONS["megatron-bridge"]
    rate = cluster.device.rate(layouts[0].recipe.precision) * IN_TRAINING
    once = flops.flops_per_token(model, batch.seq, how) * batch.tokens / (cluster.num_devices * rate)
    again = np.array([4 / 3 if x.recompute == "full" else 1.0 for x in layouts])
    bubble = np.array([1 + (x.pp - 1) / (x.virtual * x.num_micro_batches(batch)) for x in layouts])
    # The frozen part of a model has no weight gradients.
    share = (2 + layouts[0].recipe.trainable) / 3 if layouts[0].recipe.trainable == 1 else 2 / 3
    # Attention below the mask runs at another rate than products; half is a safe bound for both.
    bound: Floats = once * share * again * bubble * 0.5
    return bound


def _price(
    kept: Sequence[Layout],
    order: Ints,
    bounds: Floats,
    model: Model,
    cluster: Cluster,
    batch: Batch,
    limit: float,
    progress: Progress | None,
    top: int,
) -> tuple[
    Floats,
    Floats,
    Ints,
]:
    """Seconds and bytes of the layouts in order of their bound, until none that is left can win."""
    seconds = np.full(len(kept), np.inf)
    needed = np.full(len(kept), np.inf)
    done = 0
    while done < len(order):
        block = order[done : done + BLOCK]
        # The slowest that would still be listed: below it, every layout must be looked at.
        found = np.sort(seconds[needed <= limit])[: max(top, SIMULATED)]
        if len(found) == max(top, SIMULATED) and bounds[block[0]] > found[-1]:
            break
        grid = grid_of([kept[i] for i in block], model, batch)
        needed[block], _ = worst_memory(model, grid, cluster)
        seconds[block] = step_time(model, grid, cluster).total
        done += len(block)
        if progress:
            progress(done, len(order))
    return seconds, needed, order[:done]


def _nothing_fits(
    model: Model,
    cluster: Cluster,
    layouts: Sequence[Layout],
    needed: Floats,
    *,
    at: int | None = None,
) -> LayoutError:
    i = int(np.argmin(needed)) if at is None else at
    least, have = float(needed[i]), cluster.device.memory
    cards = cluster.num_devices * 2 ** max(1, math.ceil(math.log2(max(least / (have * HEADROOM), 1.01))))
    layout = layouts[i]
    return LayoutError(
        f"{model.name} fits in no layout on {cluster.num_devices} {cluster.device.name}: the smallest "
        f"(tp {layout.tp}, pp {layout.pp}, zero {layout.zero}) needs {least / 2**30:.1f} of {have / 2**30:.1f} GiB",
        hint=f"use about {cards} cards, a card with more memory, or shorter sequences",
    )


def slowest_nic(prediction: Prediction, *, loss: float = 0.05) -> float:
    """The NIC rate in bytes per second at which this layout takes ``loss`` more time than it does now.

    The answer is exact to a thousandth. A layout that sends nothing between hosts needs none: 0.

    Args:
        prediction: the run as planned.
        loss: share of the step's seconds that may be lost.
    """

    def seconds(rate: float) -> float:
        grid = grid_of([prediction.layout], prediction.model, prediction.batch)
        return float(step_time(prediction.model, grid, prediction.cluster.with_nic(rate)).total[0])

    now = prediction.cluster.nic.rate
    allowed = seconds(now) * (1 + loss)
    low, high = now / 2**20, now
    if seconds(low) <= allowed:
        return 0.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if seconds(middle) <= allowed else (middle, high)
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A cluster that meets a deadline.

    Attributes:
        prediction: the fastest layout on it.
        days: of training.
        device_hours: cards times hours.
        cost: money, 0 where no price is known.
    """

    prediction: Prediction
    days: float
    device_hours: float
    cost: float


def cheapest_cluster(
    model: Model,
    clusters: Sequence[Cluster],
    batch: Batch,
    *,
    tokens: float,
    days: float,
    recipe: Recipe | None = None,
    progress: Progress | None = None,
) -> list[Offer]:
    """Clusters on which ``tokens`` take at most ``days``, cheapest first.

    Cost is money where every cluster has a price, card hours otherwise.

    Raises:
        LayoutError: none is fast enough; the fastest is named.
    """
    offers: list[Offer] = []
    for i, cluster in enumerate(clusters):
        try:
            best = search(model, cluster, batch, recipe=recipe, top=1).best[0]
        except LayoutError:
            continue
        hours = best.device_hours(tokens)
        offers.append(
            Offer(
                prediction=best,
                days=hours / cluster.num_devices / 24,
                device_hours=hours,
                cost=hours * cluster.price,
            )
        )
        if progress:
            progress(i + 1, len(clusters))
    if not offers:
        raise LayoutError(
            f"{model.name} fits on none of the clusters asked about", hint="ask about larger ones"
        )
    in_time = [offer for offer in offers if offer.days <= days]
    if not in_time:
        fastest = min(offers, key=lambda offer: offer.days)
        raise LayoutError(
            f"no cluster trains {tokens:.3g} tokens in {days:g} days; "
            f"{fastest.prediction.cluster.name} comes nearest with {fastest.days:.1f}",
            hint="allow more days, or more cards by --cards",
        )
    priced = all(offer.cost > 0 for offer in in_time)
    return sorted(in_time, key=lambda offer: (offer.cost if priced else offer.device_hours, offer.days))


def sizes_of(cluster: Cluster, *, most: int) -> list[Cluster]:
    """The cluster in every size from one scale-up domain, doubling, up to ``most`` cards."""
    sizes = []
    count = min(cluster.domain, most)
    while count <= most:
        sizes.append(cluster.with_devices(count))
        count *= 2
    return sizes
