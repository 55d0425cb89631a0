r"""Every collective of a step by closed form: what, how often, how many bytes.

Letters: ``s`` sequence, ``B`` micro-batch, ``m`` micro-batches, ``h`` hidden, ``t`` tensor, ``c``
context, ``d`` data, ``e`` expert, ``p`` pipeline degree, ``v`` chunks a stage; ``P`` parameters on a
rank, ``g`` bytes of a sent gradient element, ``b`` 2 bytes (bf16); ``X = s B h b / c`` one activation.

======================= ===================================================== =====================
what                    payload and calls a step                              source
======================= ===================================================== =====================
tp without sp           X; all-reduce, 2 forward + 2 backward, a layer and    1909.08053, section 3
                        micro-batch; full recompute 2 more
tp with sp              X; each all-reduce becomes a reduce-scatter and an    2205.05198, section 4.2
                        all-gather; 2 all-gathers more to have the input
                        of the weight gradient again
vocabulary              X once forward on the first stage, once each way on   1909.08053, section 3
                        the last; 3 reductions of ``s B`` fp32 for the loss
dp, ZeRO 0              P g; all-reduce                                       1910.02054, section 7
ZeRO 1                  P g reduce-scatter, P b all-gather                    the same
ZeRO 2                  the reduce-scatter in each micro-batch                the same
ZeRO 3 (FSDP)           P b all-gather forward and backward, P g              the same
                        reduce-scatter, in each micro-batch
shards over f < d       these over f, and all-reduce of P g / f over d / f    follows
                        once
pp                      X (over t with sp); 2 v m sends, v m fewer ends       2104.04473, section 2.2
cp ring                 keys and values once forward, and they and their      2310.01889
                        gradients backward
cp Ulysses              queries, keys, values, outputs; all-to-all each way   2309.14509
ep                      tokens x top_k x h b; all-to-all, 2 forward + 2 back  2006.16668
======================= ===================================================== =====================

With ``c > 1`` the gradient group is ``d c`` ranks; an expert's is the ranks that hold it too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.plan.cluster import Cluster
from tonnage.plan.collectives import Numbers, Reach, reach
from tonnage.plan.compute import padded_vocab
from tonnage.plan.grid import Grid, kinds
from tonnage.plan.model import Layer, Model

FIRST, FULLEST, LAST = 0, 1, 2
"""The stages that a grid keeps apart."""

PARAM_NBYTES = 2.0

BUCKET_PARAMS = 40e6
"""Parameters in a bucket of gradients: Megatron-LM's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One kind of movement within a layer or a step.

    Attributes:
        kind: of the ledger: activation, gradient, parameter, control.
        op: the collective.
        group: the parallel dimension.
        to: where the group lies.
        nbytes: payload of one call.
        forward: calls in a forward pass (of one layer, or of one step).
        backward: calls in a backward pass, without recomputation.
        redo: calls that recomputation adds.
        label: what a person would call it.
    """

    kind: str
    op: str
    group: str
    to: Reach
    nbytes: Numbers
    forward: Numbers = 0.0
    backward: Numbers = 0.0
    redo: Numbers = 0.0
    label: str = ""

    @property
    def calls(self) -> Numbers:
        """All calls."""
        return self.forward + self.backward + self.redo


def activation_nbytes(model: Model, grid: Grid) -> Numbers:
    """X: one full activation of a micro-batch on a context rank."""
    return grid.tokens * model.hidden * 2.0


def layer_flows(layer: Layer, model: Model, grid: Grid, cluster: Cluster) -> list[Flow]:
    """Movements of one layer and micro-batch: tensor, context and expert parallel."""
    flows = _tensor_flows(layer, model, grid, cluster)
    if layer.heads:
        flows += _context_flows(layer, grid, cluster)
    if layer.experts:
        flows += _expert_flows(layer, model, grid, cluster)
    return flows


def _tensor_flows(layer: Layer, model: Model, grid: Grid, cluster: Cluster) -> list[Flow]:
    to = reach(cluster, size=grid.tp, stride=1)
    split_parts = {m.part for m in layer.matrices if m.split != "whole"}
    # One pair of exchanges around attention, one around the MLP or shared expert; routed experts
    # need their own only where they are cut along with the rest.
    blocks = ("attention" in split_parts) + bool(split_parts & {"mlp", "shared"})
    pairs = blocks + np.where((grid.ep == 1) & (layer.experts > 0) & ("shared" not in split_parts), 1, 0)
    full = np.where(grid.recompute == 2, pairs * grid.again, 0.0)
    x = activation_nbytes(model, grid)
    plain = np.where(grid.sp, 0.0, 1.0)
    seq = 1.0 - plain

    def flow(op: str, label: str, forward: Numbers, backward: Numbers, redo: Numbers) -> Flow:
        return Flow(
            kind="activation",
            op=op,
            group="tp",
            to=to,
            nbytes=x,
            forward=forward,
            backward=backward,
            redo=redo,
            label=label,
        )

    return [
        flow("all-reduce", "tensor parallel", plain * pairs, plain * pairs, plain * full),
        flow("reduce-scatter", "sequence parallel", seq * pairs, seq * pairs, seq * full),
        # Backward gathers the incoming gradient, and the saved input a second time.
        flow("all-gather", "sequence parallel", seq * pairs, seq * pairs * 2, seq * full),
    ]


def context_nbytes(layer: Layer, grid: Grid) -> tuple[Numbers, Numbers]:
    """Payload of a ring's keys and values, and of Ulysses' exchanges, of one forward pass."""
    tokens = grid.micro_batch * float(grid.seq)
    ring = tokens * (layer.kv_width / grid.tp) * 2.0
    queries = layer.heads * layer.qk_dim + layer.heads * layer.v_dim
    # Where fewer key heads than ranks are left, Ulysses must copy them to every rank.
    copies = np.maximum(1.0, grid.cp * grid.tp / layer.kv_heads)
    ulysses = grid.tokens * ((queries + layer.kv_width * copies) / grid.tp) * 2.0
    return ring, ulysses


def uses_ring(layer: Layer, grid: Grid) -> Numbers:
    """Whether context parallelism exchanges by ring: what sends less, unless it is set."""
    if grid.recipe.context != "auto":
        return np.full(grid.size, grid.recipe.context == "ring")
    ring, ulysses = context_nbytes(layer, grid)
    # A ring moves keys and values once forward and twice backward.
    return (3 * ring <= 2 * ulysses) | (layer.heads % (grid.cp * grid.tp) != 0)


def _context_flows(layer: Layer, grid: Grid, cluster: Cluster) -> list[Flow]:
    to = reach(cluster, size=grid.cp, stride=grid.tp)
    ring, ulysses = context_nbytes(layer, grid)
    by_ring = np.where(uses_ring(layer, grid), 1.0, 0.0)
    full = np.where(grid.recompute == 2, grid.again, 0.0)
    return [
        Flow(
            kind="activation",
            op="all-gather",
            group="cp",
            to=to,
            nbytes=ring,
            forward=by_ring,
            backward=by_ring,
            redo=by_ring * full,
            label="ring: keys and values",
        ),
        Flow(
            kind="gradient",
            op="reduce-scatter",
            group="cp",
            to=to,
            nbytes=ring,
            backward=by_ring,
            label="ring: their gradients",
        ),
        Flow(
            kind="activation",
            op="all-to-all",
            group="cp",
            to=to,
            nbytes=ulysses,
            forward=1 - by_ring,
            backward=1 - by_ring,
            redo=(1 - by_ring) * full,
            label="Ulysses: heads",
        ),
    ]


def _expert_flows(layer: Layer, model: Model, grid: Grid, cluster: Cluster) -> list[Flow]:
    own = grid.tokens / np.where(grid.ep > 1, grid.tp, 1)
    to = reach(cluster, size=grid.ep, stride=grid.expert_tp)

    def flow(to: Reach, copies: Numbers, label: str) -> Flow:
        return Flow(
            kind="activation",
            op="all-to-all",
            group="ep",
            to=to,
            nbytes=own * copies * model.hidden * 2.0,
            forward=2.0,
            backward=2.0,
            redo=np.where(grid.recompute == 2, 2.0 * grid.again, 0.0),
            label=label,
        )

    if grid.recipe.dispatch == "each":
        return [flow(to, layer.top_k, "experts: dispatch and combine")]
    # Once to each host, to the rank that stands there where the sender stands here; that one hands it on.
    hosts = to.size / to.local
    between = reach(cluster, size=hosts, stride=grid.expert_tp * to.local)
    inside = reach(cluster, size=to.local, stride=grid.expert_tp)
    return [
        flow(between, distinct(layer, hosts), "experts: dispatch and combine between hosts"),
        flow(inside, distinct(layer, to.size), "experts: dispatch and combine in a host"),
    ]


def distinct(layer: Layer, groups: Numbers) -> Numbers:
    """How many of ``groups`` equal groups of experts a token's ``top_k`` lie in, on average.

    A group is left out when all ``k`` are drawn from the other ``E - E/n`` experts:
    ``n (1 - C(E - E/n, k) / C(E, k))``, as many as 5.4 of 8 ranks for 8 of 128 experts.
    """
    others = layer.experts - layer.experts / np.asarray(groups, dtype=float)
    left_out: Numbers = np.ones_like(others)
    for drawn in range(layer.top_k):
        left_out = left_out * np.maximum(others - drawn, 0.0) / (layer.experts - drawn)
    return groups * (1.0 - left_out)


def vocab_flows(model: Model, grid: Grid, cluster: Cluster, stage: int) -> list[Flow]:
    """Movements of one micro-batch that embedding and head add on their stages."""
    to = reach(cluster, size=grid.tp, stride=1)
    x = activation_nbytes(model, grid)
    alone = grid.pp == 1
    first = 1.0 if stage == FIRST else np.where(alone, 1.0, 0.0)
    last = 1.0 if stage == LAST else np.where(alone, 1.0, 0.0)
    plain = np.where(grid.sp, 0.0, 1.0)
    seq = 1.0 - plain

    def flow(op: str, label: str, forward: Numbers, backward: Numbers, nbytes: Numbers = x) -> Flow:
        kind = "control" if label == "loss" else "activation"
        return Flow(
            kind=kind,
            op=op,
            group="tp",
            to=to,
            nbytes=nbytes,
            forward=forward,
            backward=backward,
            label=label,
        )

    return [
        flow("all-reduce", "embedding", plain * first, 0.0),
        flow("reduce-scatter", "embedding", seq * first, 0.0),
        flow("all-gather", "embedding", 0.0, seq * first),
        flow("all-reduce", "head", 0.0, plain * last),
        flow("all-gather", "head", seq * last, seq * last),
        flow("reduce-scatter", "head", 0.0, seq * last),
        # Largest logit, the target's logit, the sum of exponentials: one fp32 number a token each.
        flow("all-reduce", "loss", 3.0 * last, 0.0, nbytes=grid.tokens * 4.0),
    ]


def rank_params(model: Model, grid: Grid, stage: int) -> tuple[Numbers, Numbers]:
    """Parameters on a rank of a stage: those outside the routed experts, and those within."""
    dense: Numbers = np.zeros(grid.size)
    routed: Numbers = np.zeros(grid.size)
    for i, (layer, _) in enumerate(kinds(model)):
        count = grid.counts[:, stage, i]
        dense = dense + count * layer_params(layer, grid.tp)
        local = layer.experts / grid.ep
        each = sum(m.params for m in layer.matrices if m.part == "expert")
        routed = routed + count * local * each / grid.expert_tp
    vocab = padded_vocab(model.vocab, grid.tp) * model.hidden / grid.tp
    alone = grid.pp == 1
    if stage == FIRST:
        dense = dense + vocab + model.other_embedding
        dense = dense + np.where(alone, model.other_head + (0.0 if model.tied else vocab), 0.0)
    elif stage == LAST:
        # Tied matrices at two ends of a pipeline are two copies.
        dense = dense + vocab + model.other_head
        dense = dense + np.where(alone, model.other_embedding + (0.0 if model.tied else vocab), 0.0)
    else:
        both = vocab * (1.0 if model.tied else 2.0) + model.other_embedding + model.other_head
        dense = dense + np.where(alone, both, 0.0)
    return dense, routed


def layer_params(layer: Layer, tp: Numbers) -> Numbers:
    """Parameters of a layer outside its routed experts, on one tensor-parallel rank."""
    total: Numbers = float(layer.vectors)
    for matrix in layer.matrices:
        if matrix.part == "expert":
            continue
        cut = 1 if matrix.split == "whole" else tp
        bias = 0.0
        if matrix.bias:
            bias = matrix.fan_out / (cut if matrix.split == "column" else 1)
        total = total + matrix.fan_in * matrix.fan_out / cut + bias
    return total


def data_flows(model: Model, grid: Grid, cluster: Cluster, stage: int) -> list[Flow]:
    """Gradients and parameters over the data-parallel ranks of a stage, in one step."""
    dense, routed = rank_params(model, grid, stage)
    layers = grid.counts[:, stage].sum(axis=1)
    flows = _sharded_flows(
        dense,
        grid,
        cluster,
        size=grid.dp * grid.cp,
        shard=grid.shard,
        stride=grid.tp,
        layers=layers,
        of="",
    )
    if model.experts:
        replicas = grid.expert_replicas
        flows += _sharded_flows(
            routed,
            grid,
            cluster,
            size=replicas,
            shard=np.minimum(replicas, grid.shard),
            stride=grid.ep * grid.expert_tp,
            layers=layers,
            of=" of experts",
        )
    if model.tied:
        flows.append(_tied_flow(model, grid, cluster, stage))
    return flows


def _sharded_flows(
    params: Numbers,
    grid: Grid,
    cluster: Cluster,
    *,
    layers: Numbers,
    size: Numbers,
    shard: Numbers,
    stride: Numbers,
    of: str,
) -> list[Flow]:
    recipe = grid.recipe
    gradients = params * recipe.trainable * recipe.sent_grad_nbytes
    zero, m = grid.zero, grid.m
    # Local steps exchange once in that many; what a step moves on average is recorded.
    often = 1.0 / recipe.local_steps
    synced = 1.0 if recipe.local_steps == 1 else 0.0
    # FSDP gathers and reduces layer by layer, the others bucket by bucket.
    parts = np.where(zero == 3, layers + 1, np.ceil(np.maximum(params, 1) / BUCKET_PARAMS))
    per_step = np.where(zero >= 2, m, 1) * parts
    inner = reach(cluster, size=shard, stride=stride, rails=recipe.rails)
    outer = reach(cluster, size=np.maximum(1, size // shard), stride=stride * shard, rails=recipe.rails)
    whole = reach(cluster, size=size, stride=stride, rails=recipe.rails)
    whole_sum = (zero == 0) | (recipe.local_steps > 1) | ((zero == 1) & (not recipe.scatters))
    # ZeRO 1 and 2 send back what was updated; ZeRO 3 needs every weight, frozen ones too.
    gathered = params * np.where(zero == 3, 1.0, recipe.trainable) * PARAM_NBYTES
    return [
        Flow(
            kind="gradient",
            op="all-reduce",
            group="dp",
            to=whole,
            nbytes=gradients * often / parts,
            backward=np.where(whole_sum, parts, 0.0),
            label=f"gradients{of}",
        ),
        Flow(
            kind="gradient",
            op="reduce-scatter",
            group="dp",
            to=inner,
            nbytes=gradients / parts,
            backward=np.where(whole_sum, 0.0, per_step),
            label=f"gradients{of}",
        ),
        Flow(
            kind="gradient",
            op="all-reduce",
            group="dp",
            to=outer,
            nbytes=gradients / shard / parts,
            # Shards add their micro-batches up and meet the other groups once a step.
            backward=np.where(whole_sum, 0.0, parts),
            label=f"gradients{of}, across shards",
        ),
        Flow(
            kind="parameter",
            op="all-gather",
            group="dp",
            to=inner,
            nbytes=gathered / parts,
            forward=parts * np.where(zero == 3, m, np.where(zero >= 1, synced, 0.0)),
            backward=parts * np.where(zero == 3, m, 0.0),
            label=f"parameters{of}",
        ),
    ]


def _tied_flow(model: Model, grid: Grid, cluster: Cluster, stage: int) -> Flow:
    """First and last stage add up the gradients of the matrix that both hold."""
    ends = 1.0 if stage in (FIRST, LAST) else 0.0
    pair = np.where(grid.pp > 1, 2, 1)
    stride = grid.dp * grid.tp * grid.cp * np.maximum(1, grid.pp - 1)
    vocab = padded_vocab(model.vocab, grid.tp) * model.hidden / grid.tp
    return Flow(
        kind="gradient",
        op="all-reduce",
        group="pp",
        to=reach(cluster, size=pair, stride=stride),
        nbytes=vocab * grid.recipe.sent_grad_nbytes,
        backward=np.where(grid.pp > 1, ends, 0.0),
        label="tied embedding",
    )


def pipeline_send_nbytes(model: Model, grid: Grid) -> Numbers:
    """Bytes of one activation that a rank hands to the next stage."""
    cut = grid.sp | grid.recipe.scatter
    return activation_nbytes(model, grid) / np.where(cut, grid.tp, 1)


def pipeline_sends(grid: Grid, stage: int) -> Numbers:
    """Sends of a rank in a step: each chunk forward and backward, but for the pipeline's two ends."""
    both = 2 * grid.virtual * grid.m
    ends = both if stage == FULLEST else both - grid.m
    # Of two stages, each is an end.
    ends = np.where((grid.pp == 2) & (stage == FULLEST), both - grid.m, ends)
    return np.where(grid.pp > 1, ends, 0)
