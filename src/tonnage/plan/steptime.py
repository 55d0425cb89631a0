r"""Seconds of a step by closed form, for many layouts at once.

A stage takes ``F`` forward and ``B`` backward for a micro-batch, exchange that nothing hides
included. Then (1F1B, Narayanan et al., 2104.04473, section 2.2)

    ``step = m max(F + B) + (p - 1) / v mean(F + B) + sends + gradients + optimizer + parameters``

where the second term is the bubble. What hides under what:

- tensor parallel: cut into ``t`` pieces beside its product, the first piece shows; without that, all
  does, but for the backward all-reduce, which runs beside the weight gradient.
- ring attention: beside the attention of the block before; the experts' exchange shows, unless the
  recipe runs another micro-batch beside it.
- ZeRO 3: each layer's gather beside the layer before.
- gradients: beside the last backward pass of the stage, but for the last bucket; parameters beside
  the first forward pass.

:mod:`tonnage.plan.overlap` simulates the same step event by event; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.plan.cluster import Cluster
from tonnage.plan.collectives import Numbers, reach, seconds, send_link, send_seconds
from tonnage.plan.compute import (
    LayerWork,
    Work,
    duration,
    embedding_work,
    head_work,
    layer_work,
    optimizer_seconds,
)
from tonnage.plan.grid import Grid, kinds
from tonnage.plan.model import Layer, Model
from tonnage.plan.traffic import (
    BUCKET_PARAMS,
    FIRST,
    FULLEST,
    LAST,
    Flow,
    activation_nbytes,
    data_flows,
    layer_flows,
    pipeline_send_nbytes,
    rank_params,
    vocab_flows,
)

CONTENTION = 0.10
"""Share of the card's processors that a running collective takes from computation beside it: 8-16 of
108 blocks of NCCL on A100 (Calculon's published A100 setting takes 0.15 on NVLink, 0.02 on the NIC)."""

EP_HIDDEN = 0.37
"""Share of the experts' exchange that Megatron-Core's overlap with another micro-batch hides: 36.55 %, on 16
H100 with Qwen3 30B (NVIDIA-NeMo/Megatron-Bridge, skills/nemo-mbridge-perf-moe-comm-overlap). The expert
products, which need what is exchanged, are most of what it could hide under."""

COLLECTIVE_KERNELS = 1.75
"""Kernels whose dispatch a collective of a layer costs the host: an autograd function of its own around
``all_reduce``, 33 µs with PyTorch 2.13 and no backend behind it on one server core, and the launch with its
events, about 9 µs more."""

STEP_OVERHEAD = 5e-3
"""Seconds a step for what belongs to none: loading the batch, the gradient norm's round trip, logging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One micro-batch in one layer (or head) on one rank.

    Attributes:
        forward: seconds of computation forward.
        backward: backward, recomputation included.
        tp: exposed seconds of tensor parallel, forward and backward.
        cp: the same of context parallel.
        ep: the same of experts.
    """

    forward: Numbers
    backward: Numbers
    tp: tuple[Numbers, Numbers]
    cp: tuple[Numbers, Numbers]
    ep: tuple[Numbers, Numbers]

    @property
    def total(self) -> tuple[Numbers, Numbers]:
        """Seconds forward and backward with all that shows."""
        shown = [self.tp[i] + self.cp[i] + self.ep[i] for i in (0, 1)]
        return self.forward + shown[0], self.backward + shown[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage's micro-batch, summed over its layers, and what it does once a step.

    Attributes:
        passes: seconds of one micro-batch.
        gather: seconds of one pass of ZeRO 3's gathers, forward; backward they come with the
            reduce-scatter.
        gather_back: the same backward.
        gathered: exposed seconds of these, forward and backward, with what they slow down.
        slowed: seconds that computation loses to the gathers beside it, forward and backward.
        reduce: seconds of the step's gradient exchange.
        spread: seconds of the step's parameter gather.
        tied: seconds of adding up a tied embedding.
        optimizer: seconds of the update.
        layers: layers on the stage.
        buckets: parts in which gradients are reduced and parameters gathered.
    """

    passes: Pass
    gather: Numbers
    gather_back: Numbers
    gathered: tuple[Numbers, Numbers]
    slowed: tuple[Numbers, Numbers]
    reduce: Numbers
    spread: Numbers
    tied: Numbers
    optimizer: Numbers
    layers: Numbers
    buckets: Numbers

    @property
    def forward(self) -> Numbers:
        """Seconds of one forward pass."""
        return self.passes.total[0] + self.gathered[0]

    @property
    def backward(self) -> Numbers:
        """Seconds of one backward pass."""
        return self.passes.total[1] + self.gathered[1]

    @property
    def both(self) -> Numbers:
        """Seconds of a micro-batch."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step and where they go, on the stage that sets the pace.

    Attributes:
        total: the whole step.
        compute: computation, recomputation included.
        tp: exposed tensor-parallel exchange.
        cp: exposed context-parallel exchange.
        ep: exposed exchange of experts.
        dp: exposed gradients and parameters.
        pp: exposed pipeline sends.
        bubble: waiting for other stages.
        optimizer: the update.
        other: what belongs to none.
    """

    total: Numbers
    compute: Numbers
    tp: Numbers
    cp: Numbers
    ep: Numbers
    dp: Numbers
    pp: Numbers
    bubble: Numbers
    optimizer: Numbers
    other: Numbers


PARTS = ("compute", "tp", "cp", "ep", "dp", "pp", "bubble", "optimizer", "other")
"""Names of what a step's seconds are split into; they add up to its total."""


def layer_pass(layer: Layer, model: Model, grid: Grid, cluster: Cluster) -> Pass:
    """One micro-batch in one layer."""
    work = layer_work(layer, model, grid, cluster)
    return _with_exchange(work, layer_flows(layer, model, grid, cluster), grid, cluster)


def _with_exchange(work: LayerWork, flows: list[Flow], grid: Grid, cluster: Cluster) -> Pass:
    # A collective is a launch for the host, like a kernel.
    calls = [_launches(flows, way, grid) for way in (0, 1)]
    start = work.forward + calls[0]
    again = work.backward + work.redo + calls[1]
    moved = {
        group: [
            sum(
                (
                    seconds(f.op, f.nbytes, f.to, cluster) * calls
                    for f in flows
                    if f.group == group
                    for calls in ((f.forward,) if way == 0 else (f.backward, f.redo))
                ),
                start=np.zeros(grid.size),
            )
            for way in (0, 1)
        ]
        for group in ("tp", "cp", "ep")
    }
    tp = _shown_tp(moved["tp"], start, again, grid)
    cp = _shown_cp(moved["cp"], start, again, grid)
    ep = _shown_ep(moved["ep"], start, again, grid)
    hidden = [
        sum((moved[g][i] - shown[i] for g, shown in (("tp", tp), ("cp", cp), ("ep", ep))), start=0.0)
        for i in (0, 1)
    ]
    return Pass(
        forward=duration(start, grid, waits=True) + CONTENTION * hidden[0],
        backward=duration(again, grid) + CONTENTION * hidden[1],
        tp=tp,
        cp=cp,
        ep=ep,
    )


def _launches(flows: list[Flow], way: int, grid: Grid) -> Work:
    count: Numbers = np.zeros(grid.size)
    for flow in flows:
        number = flow.forward if way == 0 else flow.backward + flow.redo
        count = count + np.where(flow.to.size > 1, number, 0.0)
    return Work(matmul=0.0, other=0.0, kernels=COLLECTIVE_KERNELS * count)


def _shown_tp(moved: list[Numbers], forward: Work, backward: Work, grid: Grid) -> tuple[Numbers, Numbers]:
    if not grid.recipe.overlap_tp:
        return moved[0], moved[1]
    first = 1.0 / grid.tp

    def pieces(time: Numbers, product: Numbers) -> Numbers:
        return time * first + np.maximum(0.0, time * (1 - first) - product)

    # Without sequence parallel an all-reduce has no product to run beside forward; backward half of
    # the products (the weight gradients) do not wait for it.
    plain = (moved[0], np.maximum(0.0, moved[1] - backward.matmul / 2))
    cut = (pieces(moved[0], forward.matmul), pieces(moved[1], backward.matmul))
    return np.where(grid.sp, cut[0], plain[0]), np.where(grid.sp, cut[1], plain[1])


def _shown_cp(moved: list[Numbers], forward: Work, backward: Work, grid: Grid) -> tuple[Numbers, Numbers]:
    under = (grid.cp - 1) / grid.cp
    return (
        np.maximum(0.0, moved[0] - forward.other * under),
        np.maximum(0.0, moved[1] - backward.other * under),
    )


def _shown_ep(moved: list[Numbers], forward: Work, backward: Work, grid: Grid) -> tuple[Numbers, Numbers]:
    if not grid.recipe.overlap_ep:
        return moved[0], moved[1]
    # Another micro-batch is at hand where stages are interleaved, or where there is one stage and more than
    # one micro-batch (Megatron-Core's conditions).
    beside = (grid.virtual > 1) | ((grid.pp == 1) & (grid.m > 1))
    hidden = [
        np.minimum(EP_HIDDEN * time, work.matmul + work.other)
        for time, work in zip(moved, (forward, backward), strict=True)
    ]
    return moved[0] - np.where(beside, hidden[0], 0.0), moved[1] - np.where(beside, hidden[1], 0.0)


def stage_of(model: Model, grid: Grid, cluster: Cluster, stage: int, pieces: Pieces) -> Stage:
    """One of the three stages: its layers, its ends, and what it does once a step."""
    counts = [grid.counts[:, stage, i] for i in range(len(pieces.layers))]
    alone = grid.pp == 1
    ends = [
        (pieces.embedding, np.where(alone | (stage == FIRST), 1.0, 0.0)),
        (pieces.head, np.where(alone | (stage == LAST), 1.0, 0.0)),
    ]
    summed = _sum([*zip(pieces.layers, counts, strict=True), *ends], grid)
    flows = data_flows(model, grid, cluster, stage)

    def timed(kind: str, group: str = "dp") -> Numbers:
        picked = (f for f in flows if f.kind == kind and f.group == group)
        return sum(
            (seconds(f.op, f.nbytes, f.to, cluster) * (f.forward + f.backward) for f in picked),
            start=np.zeros(grid.size),
        )

    reduce, spread = timed("gradient"), timed("parameter")
    layers = sum(counts, start=np.zeros(grid.size))
    every = grid.zero >= 2
    full = grid.zero == 3
    gather = np.where(full, spread / 2 / grid.m, 0.0)
    back = gather + np.where(every, reduce / grid.m, 0.0)
    dense, routed = rank_params(model, grid, stage)
    own = dense / np.where(grid.zero >= 1, grid.shard, 1) + routed / np.where(
        grid.zero >= 1, np.minimum(grid.expert_replicas, grid.shard), 1
    )
    held = (dense + routed) / np.where(every, grid.shard, 1)
    return Stage(
        passes=summed,
        gather=gather,
        gather_back=back,
        gathered=_shown_gathers(gather, back, summed, layers, grid),
        slowed=_slowed(gather, back, summed),
        reduce=np.where(every, 0.0, reduce),
        spread=np.where(full, 0.0, spread),
        tied=timed("gradient", "pp"),
        optimizer=optimizer_seconds(own, held, grid, cluster),
        layers=layers,
        buckets=np.ceil((dense + routed) / BUCKET_PARAMS),
    )


def _shown_gathers(
    gather: Numbers, back: Numbers, passes: Pass, layers: Numbers, grid: Grid
) -> tuple[Numbers, Numbers]:
    """What the layer before can't hide; the first layer's gather and the last one's reduction show."""
    one = np.maximum(layers, 1)
    if not grid.recipe.overlap_param:
        return gather, back
    forward, backward = passes.total
    slowed = _slowed(gather, back, passes)
    return (
        gather / one + np.maximum(0.0, (gather - forward) * (1 - 1 / one)) + slowed[0],
        back / one + np.maximum(0.0, (back - backward) * (1 - 1 / one)) + slowed[1],
    )


def _slowed(gather: Numbers, back: Numbers, passes: Pass) -> tuple[Numbers, Numbers]:
    forward, backward = passes.total
    return CONTENTION * np.minimum(gather, forward), CONTENTION * np.minimum(back, backward)


def _sum(parts: list[tuple[Pass, Numbers]], grid: Grid) -> Pass:
    zero = np.zeros(grid.size)

    def total(pick: str, way: int | None = None) -> Numbers:
        values = ((getattr(p, pick) if way is None else getattr(p, pick)[way]) * n for p, n in parts)
        return sum(values, start=zero)

    return Pass(
        forward=total("forward"),
        backward=total("backward"),
        tp=(total("tp", 0), total("tp", 1)),
        cp=(total("cp", 0), total("cp", 1)),
        ep=(total("ep", 0), total("ep", 1)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """One micro-batch in each kind of layer, in the embedding and in the head."""

    layers: list[Pass]
    embedding: Pass
    head: Pass


def pieces_of(model: Model, grid: Grid, cluster: Cluster) -> Pieces:
    """The pieces that a model's stages consist of."""
    # On the one stage of a run without pipeline both ends' exchanges appear; each is asked for alone.
    head_flows = [f for f in vocab_flows(model, grid, cluster, LAST) if f.label != "embedding"]
    embedding_flows = [f for f in vocab_flows(model, grid, cluster, FIRST) if f.label == "embedding"]
    return Pieces(
        layers=[layer_pass(layer, model, grid, cluster) for layer, _ in kinds(model)],
        embedding=_with_exchange(embedding_work(model, grid, cluster), embedding_flows, grid, cluster),
        head=_with_exchange(head_work(model, grid, cluster), head_flows, grid, cluster),
    )


def stages_of(model: Model, grid: Grid, cluster: Cluster, pieces: Pieces) -> tuple[Stage, Stage, Stage]:
    """First, fullest and last stage."""
    first, fullest, last = (stage_of(model, grid, cluster, stage, pieces) for stage in (FIRST, FULLEST, LAST))
    return first, fullest, last


def mean_both(model: Model, grid: Grid, three: tuple[Stage, Stage, Stage]) -> Numbers:
    """Seconds of a micro-batch averaged over all stages.

    Middle stages are taken at the fullest one's seconds a layer.
    """
    first, fullest, last = three
    per_layer = fullest.both / np.maximum(fullest.layers, 1)
    inner = grid.mean.sum(axis=1) * grid.pp - first.layers - last.layers
    total = first.both + last.both + per_layer * inner
    return np.where(grid.pp > 1, total / grid.pp, fullest.both)


def step_time(model: Model, grid: Grid, cluster: Cluster) -> StepTime:
    """Seconds of a step for each layout of the grid."""
    three = stages_of(model, grid, cluster, pieces_of(model, grid, cluster))
    both = np.stack([each.both for each in three])
    slowest = both.argmax(axis=0)

    def at_slowest(values: list[Numbers]) -> Numbers:
        stacked = np.stack([np.broadcast_to(v, (grid.size,)) for v in values])
        return np.take_along_axis(stacked, slowest[None], axis=0)[0]

    m, p, v = grid.m, grid.pp, grid.virtual
    period = both.max(axis=0)
    mean = mean_both(model, grid, three)
    # The fill and drain wait for the other stages, each for one chunk of its layers.
    # Chunks only shorten it where there are micro-batches for a whole group.
    cut = np.where(m >= p, v, 1)
    bubble = np.where(p > 1, np.maximum(p * mean - period, (p - 1) * mean * 0.5) / cut, 0.0)
    sends = _sends(model, grid, cluster)
    shown_dp = at_slowest([_shown_dp(each, grid) for each in three])
    gathers = at_slowest([each.gathered[0] + each.gathered[1] for each in three]) * m
    optimizer = at_slowest([each.optimizer for each in three])
    tied = at_slowest([each.tied for each in three])

    def passes(pick: str) -> Numbers:
        return at_slowest([getattr(e.passes, pick)[0] + getattr(e.passes, pick)[1] for e in three]) * m

    compute = at_slowest([each.passes.forward + each.passes.backward for each in three]) * m
    parts = {
        "compute": compute,
        "tp": passes("tp"),
        "cp": passes("cp"),
        "ep": passes("ep"),
        "dp": gathers + shown_dp + tied,
        "pp": sends,
        "bubble": bubble,
        "optimizer": optimizer,
        "other": np.full(grid.size, STEP_OVERHEAD),
    }
    total = sum(parts.values(), start=np.zeros(grid.size))
    return StepTime(total=total, **parts)


def send_time(model: Model, grid: Grid, cluster: Cluster) -> Numbers:
    """Seconds of handing one activation to the next stage."""
    size = pipeline_send_nbytes(model, grid)
    stride = grid.dp * grid.tp * grid.cp
    outside = send_link(cluster, stride=stride)
    spine = outside & (cluster.pod > 0) & (stride >= max(cluster.pod, 1))
    far = np.where(spine, send_seconds(size, cluster.spine), send_seconds(size, cluster.nic))
    return np.where(grid.pp > 1, np.where(outside, far, send_seconds(size, cluster.scaleup)), 0.0)


def hop_time(model: Model, grid: Grid, cluster: Cluster) -> Numbers:
    """Seconds that a stage stands still for it, or the next waits.

    A cut activation is put together again over the tensor-parallel ranks. Where sends and receipts are
    not paired, a stage stands still for the other's message too.
    """
    one = send_time(model, grid, cluster) * (1 if grid.recipe.paired else 2)
    if not grid.recipe.scatter:
        return one
    whole = activation_nbytes(model, grid)
    joined = seconds("all-gather", whole, reach(cluster, size=grid.tp, stride=1), cluster)
    return one + np.where(grid.sp | (grid.pp == 1), 0.0, joined)


def _sends(model: Model, grid: Grid, cluster: Cluster) -> Numbers:
    """Exposed pipeline sends: a micro-batch's two a chunk when nothing hides them, and the fill's."""
    one = hop_time(model, grid, cluster)
    fill = 2 * (grid.pp - 1) * one
    if grid.recipe.overlap_p2p:
        return fill
    return fill + 2 * grid.virtual * grid.m * one


def _shown_dp(stage: Stage, grid: Grid) -> Numbers:
    reduce, spread, last = stage.reduce, stage.spread, 1 / stage.buckets
    if grid.recipe.overlap_grad:
        # The stage's own last backward pass hides all buckets but the last.
        under = stage.backward / grid.virtual * (1 - last)
        reduce = np.maximum(reduce * last, reduce - under)
    if grid.recipe.overlap_param:
        under = stage.forward / grid.virtual * (1 - last)
        spread = np.maximum(spread * last, spread - under)
    return reduce + spread
