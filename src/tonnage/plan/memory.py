r"""Memory of a card: weights, gradients, optimizer, activations, buffers, and what the allocator loses.

Letters: ``T`` tokens of a micro-batch, ``h`` hidden, ``f`` MLP width, ``a`` heads, ``s`` sequence,
``t`` tensor parallel, ``P`` parameters on a rank, ``d`` shards.

States: ``2 P`` weights, gradients as accumulated, ``4 P`` master copy and the optimizer's states; each
over the shards from the ZeRO stage on that shards it (Rajbhandari et al., 1910.02054, section 3).
Gradients of 2 bytes are made fp32 in the update, on the shard: ``4 + 16/d`` bytes a parameter in all,
against ``6 + 12/d`` with fp32 ones (Megatron-LM, docs on the distributed optimizer).

Activations a layer: what the backward pass needs, op by op; for GPT with dropout and an eager
attention it is the ``T h (34 + 5 a s / h)`` of Korthikanti et al., 2205.05198, section 4.1. A stage
holds them for every micro-batch in flight: ``min(m, p - stage)`` in 1F1B, and by the same paper
``1 + (p - 1) / (p v)`` times as much with interleaving.

What the allocator holds is more than what lives in it, and beside it stand the driver and NCCL.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from tonnage.plan.cluster import Cluster
from tonnage.plan.collectives import Numbers
from tonnage.plan.compute import LOW_NBYTES, padded_vocab
from tonnage.plan.grid import Grid, kinds
from tonnage.plan.layout import OPTIMIZER_NBYTES
from tonnage.plan.model import Layer, Model
from tonnage.plan.traffic import FIRST, LAST, activation_nbytes, rank_params

CONTEXT = 1.3e9
"""Bytes of the CUDA context with PyTorch's kernels: 1-2 GB by Hugging Face's "Model training anatomy", whose
example shows 1343 MB."""

COMMUNICATOR = 16 * 3 * 10.5e6
"""Bytes of NCCL's buffers for one group: 10 MiB a channel and connection (as counted in NVIDIA/nccl issue
1685), 16 channels, one ring and two tree connections in each: 0.5 GB."""

FRAGMENTED = 0.15
"""Share of what PyTorch's caching allocator holds that no tensor lives in: the mean over eight LLM trainings
on A100-80GB in GMLake, 2401.08156."""

EXPANDABLE = 0.05
"""The same where memory is mapped in pieces, GMLake's way and that of ``expandable_segments``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one card of a stage, at the step's peak.

    Attributes:
        weights: parameters as they stay.
        gradients: as accumulated.
        optimizer: master copy, states, and the shard's fp32 gradient where others are shorter.
        activations: kept for the backward pass, all micro-batches in flight.
        buffers: gathered parameters, buckets, logits, what a pipeline keeps of what it sent.
        fragmentation: held by the allocator between the tensors.
        context: driver, kernels and NCCL, which the framework's own figures leave out.
    """

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    buffers: Numbers
    fragmentation: Numbers
    context: Numbers

    @property
    def total(self) -> Numbers:
        """All of it, as ``nvidia-smi`` shows it."""
        return self.reserved + self.context

    @property
    def reserved(self) -> Numbers:
        """What the allocator holds, as ``torch.cuda.max_memory_reserved`` shows it."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.buffers + self.fragmentation


MEMORY_PARTS = tuple(each.name for each in dataclasses.fields(Memory))
"""Names of the parts, in order."""


def stage_memory(model: Model, grid: Grid, cluster: Cluster, stage: int) -> Memory:
    """Memory of a card on the first, fullest or last stage."""
    weights, gradients, optimizer = _states(model, grid, stage)
    activations, buffers = _activations(model, grid, stage), _buffers(model, grid, stage)
    lost = EXPANDABLE if grid.recipe.expandable else FRAGMENTED
    living = weights + gradients + optimizer + activations + buffers
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        buffers=buffers,
        fragmentation=living * lost / (1 - lost),
        context=CONTEXT + COMMUNICATOR * _groups(grid),
    )


def worst_memory(model: Model, grid: Grid, cluster: Cluster) -> tuple[Numbers, Numbers]:
    """Bytes on the fullest card and which of the three stages it is on."""
    totals = np.stack([stage_memory(model, grid, cluster, stage).total for stage in range(3)])
    return totals.max(axis=0), totals.argmax(axis=0)


def _states(model: Model, grid: Grid, stage: int) -> tuple[Numbers, Numbers, Numbers]:
    """Weights, gradients and what the optimizer holds."""
    recipe = grid.recipe
    dense, routed = rank_params(model, grid, stage)
    shard, routed_shard = grid.shard, np.minimum(grid.expert_replicas, grid.shard)

    def spread(per_param: float, from_zero: int) -> Numbers:
        sharded = grid.zero >= from_zero
        whole = dense / np.where(sharded, shard, 1) + routed / np.where(sharded, routed_shard, 1)
        return whole * per_param

    # Frozen weights stay in 2 bytes; a trained one without a 2-byte copy is its own master.
    alone = recipe.master and not recipe.low_copy
    weight = 2.0 + (2.0 * recipe.trainable if alone else 0.0)
    state = float(OPTIMIZER_NBYTES[recipe.optimizer])
    if recipe.master and not alone:
        state += 4.0
    if recipe.master and recipe.grad_nbytes < 4:
        state += 4.0
    gradient = (recipe.grad_nbytes + recipe.spare_grads) * recipe.trainable
    return spread(weight, 3), spread(gradient, 2), spread(state * recipe.trainable, 1)


def _groups(grid: Grid) -> Numbers:
    """Groups that a rank communicates in: the world, and one for each dimension there is."""
    found: Numbers = np.where(grid.dp * grid.tp * grid.pp * grid.cp > 1, 1.0, 0.0)
    for size in (grid.dp * grid.cp, grid.tp, grid.pp, grid.cp, grid.ep):
        found = found + np.where(size > 1, 1.0, 0.0)
    return found


def layer_activation_nbytes(layer: Layer, model: Model, grid: Grid) -> tuple[Numbers, Numbers]:
    """Bytes that a layer keeps of one micro-batch: under the layout's recomputation, and under none."""
    hidden = model.hidden
    along = np.where(grid.sp, 1.0 / grid.tp, 1.0)
    saved = LOW_NBYTES.get(grid.recipe.precision, 2.0)
    # Norms keep their input, matrices theirs, dropout its mask; all along the residual stream.
    dropout = 0.0 if layer.gated else 1.0
    stream = hidden * along * (2.0 * layer.norms + saved * 2 + 2 * dropout)
    heads = (layer.heads * layer.qk_dim + layer.kv_width) * 2.0 + layer.heads * layer.v_dim * 2.0
    per_head = heads / grid.tp + saved * _latents(layer, hidden)
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


def _latents(layer: Layer, hidden: int) -> int:
    """Elements of a token between the two halves of a low-rank projection (DeepSeek's MLA)."""
    return sum(
        m.fan_in
        for m in layer.matrices
        if m.part == "attention" and m.split == "column" and m.fan_in != hidden
    )


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
    sent = np.where((grid.pp > 1) & recipe.keeps_outputs, in_flight(grid, stage), 0.0)
    x = activation_nbytes(model, grid)
    # Sequence parallelism gathers what a matrix reads, and has the whole of what it is to scatter.
    along = np.where(grid.sp, 2 * x, 0.0)
    return logits + gathered + _bucket(model, grid, stage) + sent * x * grid.virtual + along


def _bucket(model: Model, grid: Grid, stage: int) -> Numbers:
    """The buffer that gradients are copied into, where they don't lie in it already."""
    recipe = grid.recipe
    dense, routed = rank_params(model, grid, stage)
    elements = np.minimum((dense + routed) * recipe.trainable, recipe.bucket)
    return np.where((grid.zero < 3) & (grid.dp * grid.cp > 1), elements * recipe.grad_nbytes, 0.0)
