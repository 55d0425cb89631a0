r"""Memory of a card: weights, gradients, optimizer, activations, buffers.

Letters: ``T`` tokens of a micro-batch, ``h`` hidden, ``f`` MLP width, ``a`` heads, ``s`` sequence,
``t`` tensor parallel, ``P`` parameters on a rank, ``f`` shards.

States: ``2 P`` weights, gradients as accumulated, ``4 P`` master copy and the optimizer's states; each
over the shards from the ZeRO stage on that shards it (Rajbhandari et al., 1910.02054, section 3).

Activations a layer: what the backward pass needs, op by op; for GPT with dropout and an eager
attention it is the ``T h (34 + 5 a s / h)`` of Korthikanti et al., 2205.05198, section 4.1. A stage
holds them for every micro-batch in flight: ``min(m, p - stage)`` in 1F1B, and by the same paper
``1 + (p - 1) / (p v)`` times as much with interleaving.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.plan.cluster import Cluster
from tonnage.plan.collectives import Numbers
from tonnage.plan.compute import LOW_NBYTES, padded_vocab
from tonnage.plan.grid import Grid, kinds
from tonnage.plan.layout import OPTIMIZER_NBYTES
from tonnage.plan.model import Layer, Model
from tonnage.plan.traffic import FIRST, LAST, activation_nbytes, rank_params

CONTEXT = 1.2e9
"""Bytes that the driver, libraries and communicators hold beside the framework's allocator: about
0.5 GB of CUDA context and 0.1 GB for each of a handful of NCCL communicators, as nvidia-smi shows."""

FRAGMENTATION = 0.05
"""Share of the activations that a caching allocator loses between blocks."""

BUCKET = 2 * 40e6 * 4
"""Bytes of two gradient buckets in flight: Megatron-LM's default of 40 million elements each, fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one card of a stage, at the step's peak.

    Attributes:
        weights: parameters as they stay.
        gradients: as accumulated.
        optimizer: master copy and states.
        activations: kept for the backward pass, all micro-batches in flight.
        buffers: gathered parameters, buckets, logits, the framework's own.
    """

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    buffers: Numbers

    @property
    def total(self) -> Numbers:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def stage_memory(model: Model, grid: Grid, cluster: Cluster, stage: int) -> Memory:
    """Memory of a card on the first, fullest or last stage."""
    recipe = grid.recipe
    dense, routed = rank_params(model, grid, stage)
    shard, routed_shard = grid.shard, np.minimum(grid.expert_replicas, grid.shard)

    def spread(per_param: float, from_zero: int, share: float = 1.0) -> Numbers:
        sharded = grid.zero >= from_zero
        whole = dense / np.where(sharded, shard, 1) + routed / np.where(sharded, routed_shard, 1)
        return whole * per_param * share

    states = (4.0 if recipe.master else 0.0) + OPTIMIZER_NBYTES[recipe.optimizer]
    return Memory(
        weights=spread(2.0, 3),
        gradients=spread(recipe.grad_nbytes + recipe.spare_grads, 2, recipe.trainable),
        optimizer=spread(states, 1, recipe.trainable),
        activations=_activations(model, grid, stage) * (1 + FRAGMENTATION),
        buffers=_buffers(model, grid, stage),
    )


def worst_memory(model: Model, grid: Grid, cluster: Cluster) -> tuple[Numbers, Numbers]:
    """Bytes on the fullest card and which of the three stages it is on."""
    totals = np.stack([stage_memory(model, grid, cluster, stage).total for stage in range(3)])
    return totals.max(axis=0), totals.argmax(axis=0)


def layer_activation_nbytes(layer: Layer, model: Model, grid: Grid) -> tuple[Numbers, Numbers]:
    """Bytes that a layer keeps of one micro-batch: under the layout's recomputation, and under none."""
    hidden = model.hidden
    along = np.where(grid.sp, 1.0 / grid.tp, 1.0)
    saved = LOW_NBYTES.get(grid.recipe.precision, 2.0)
    # Norms keep their input, matrices theirs, dropout its mask; all along the residual stream.
    dropout = 0.0 if layer.gated else 1.0
    stream = hidden * along * (2.0 * layer.norms + saved * 2 + 2 * dropout)
    heads = (layer.heads * layer.qk_dim + layer.kv_width) * 2.0 + layer.heads * layer.v_dim * 2.0
    per_head = heads / grid.tp
    inner = layer.ffn * ((4.0 if layer.gated else 2.0) + saved) / grid.tp
    if layer.experts:
        spread = np.where(grid.ep > 1, 1.0 / grid.tp, 1.0)
        routed = layer.top_k * spread
        inner = inner + routed * (2.0 * saved * hidden + layer.expert_ffn * (4.0 + saved) / grid.expert_tp)
    scores: Numbers = 0.0
    if grid.recipe.attention == "eager" and layer.heads:
        scores = 5.0 * (layer.heads / grid.tp) * grid.seq
    everything = grid.tokens * (stream + per_head + inner + scores)
    saved_less = np.where(
        grid.recompute == 2,
        grid.tokens * hidden * 2.0 * along,
        everything - np.where(grid.recompute == 1, grid.tokens * scores, 0.0),
    )
    share = np.where(grid.recompute > 0, grid.again, 0.0)
    return saved_less * share + everything * (1 - share), everything


def in_flight(grid: Grid, stage: int) -> Numbers:
    """Micro-batches whose activations a stage holds at once, counted in whole stages."""
    position: Numbers = {FIRST: 0, LAST: grid.pp - 1}.get(stage, np.minimum(1, grid.pp - 1))
    plain = np.minimum(grid.m, grid.pp - position)
    chunks = 2 * (grid.pp - position - 1) + (grid.virtual - 1) * grid.pp + 1
    interleaved = np.minimum(chunks, grid.m * grid.virtual) / grid.virtual
    return np.where(grid.virtual > 1, interleaved, plain)


def _activations(model: Model, grid: Grid, stage: int) -> Numbers:
    kept: Numbers = np.zeros(grid.size)
    largest: Numbers = np.zeros(grid.size)
    for i, (layer, _) in enumerate(kinds(model)):
        per_layer, whole = layer_activation_nbytes(layer, model, grid)
        kept = kept + grid.counts[:, stage, i] * per_layer
        largest = np.maximum(largest, whole)
    # Recomputing a layer needs all of it once.
    again = np.where(grid.recompute == 2, largest, 0.0)
    return kept * in_flight(grid, stage) + again


def _buffers(model: Model, grid: Grid, stage: int) -> Numbers:
    recipe = grid.recipe
    vocab = padded_vocab(model.vocab, grid.tp) / grid.tp
    has_head = np.where(grid.pp == 1, 1.0, 1.0 if stage == LAST else 0.0)
    # bf16 logits, their fp32 copy and its gradient; a fused loss keeps two in bf16.
    logits = grid.tokens * vocab * has_head * (6.0 if recipe.fused_loss else 12.0)
    most = max((layer for layer, _ in kinds(model)), key=lambda layer: layer.params)
    one = most.dense_params / grid.tp + most.expert_params / (grid.ep * grid.expert_tp)
    # Two gathered layers and one reduced: the one at work, the next, and the gradient on its way.
    gathered = np.where(grid.zero == 3, one * (2 * 2.0 + recipe.grad_nbytes), 0.0)
    bucket = np.where((grid.zero < 3) & (grid.dp * grid.cp > 1), BUCKET, 0.0)
    sent = np.where((grid.pp > 1) & recipe.keeps_outputs, in_flight(grid, stage), 0.0)
    outputs = sent * activation_nbytes(model, grid) * grid.virtual
    return logits + gathered + bucket + outputs + CONTEXT
