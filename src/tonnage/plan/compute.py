r"""Seconds of computation: a roofline for each matrix product, bytes for everything else.

A product of ``(M, K)`` and ``(K, N)`` is cut into tiles, and a card's processors take them in waves:

    ``waves = ceil(tiles / processors)``,
    ``main = waves * processors * tile * 2 K / rate``,
    ``time = max(main, bytes read / memory rate) + bytes written / memory rate``.

Writing is added: a processor writes its tile after the loop over ``K``, with nothing beside it. So
small ``K`` and few tiles cost what they cost without a fitted curve. Of several tile sizes and
splits of ``K`` the fastest counts, as a library's heuristic would have it.

Everything else (norms, residuals, activations, loss, optimizer) moves bytes through memory. Each
kernel also costs a fixed gap, and the host must launch it: a layer takes the larger of the card's
and the host's time.

Letters: ``T`` tokens of a micro-batch on this rank, ``t`` tensor parallel, ``h`` hidden, ``f`` MLP.

Sources: NVIDIA, "Matrix Multiplication Background User's Guide" (tiles and waves); Williams et al.,
"Roofline", 2009; Dao, arXiv 2205.14135, 2307.08691, and Shah et al., 2407.08608 (attention rates).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.plan.cluster import Cluster, Device
from tonnage.plan.collectives import Numbers
from tonnage.plan.grid import Grid
from tonnage.plan.layout import OPTIMIZER_NBYTES
from tonnage.plan.model import Layer, Model

IN_TRAINING = 0.925
"""Share of a large product's sustained rate that products reach inside a training step, between
kernels of all kinds. Tuned on Narayanan, Korthikanti and llm-foundry A100."""

STREAM = 0.80
"""Share of the memory's line rate that element-wise kernels reach. BabelStream reaches about 0.9 on
A100; kernels over several tensors less."""

KERNEL_GAP = 2.5e-6
"""Seconds a kernel costs beside its work: launch, ramp and tail (NVIDIA, "Getting started with CUDA
graphs": about 2 µs between short kernels)."""

DISPATCH = 15e-6
"""Seconds of the host for each kernel of an eager framework. Measured: a Megatron-like GPT layer of width
16 (autograd functions of its own, forks of the random state, recomputation, gradients added by hooks) takes
PyTorch 2.13 on one server core 1263 µs for 118 kernels, 10.7 µs each; a launch on a card costs about 4 µs
more than the tiny computation."""

SMALL_KERNELS = 1.6
"""Kernels launched for each one counted here: the same layer launches 118 for 74 counted. The others
(casts, copies, bias sums, clears) move next to nothing but cost the host as much."""

ROUTER_KERNELS = {"each": 31 / SMALL_KERNELS, "once": 17 / SMALL_KERNELS}
"""Kernels for the router's scores, choice and counts, forward, small ones apart: 31 fused, 17 with DeepEP's
preprocessing (Megatron-LM docs/discussions, "Optimizing DeepSeek-V3 Training Performance on NVIDIA GB200
NVL72", 2.1.4 and 2.2.1)."""

SORT_KERNELS = {"each": 8, "once": 4}
"""Kernels that sort tokens by rank and by expert and bring them back, or by expert alone."""

GRAPH_DISPATCH = 1e-6
"""The same from a recorded graph (same NVIDIA article)."""

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
"""Rows, columns and relative rate of a tile: smaller tiles read more for each FLOP (NVIDIA's guide
above, table of tile efficiencies)."""

K_SPLITS = (1, 2, 4, 8)

ALIGNMENT = ((8, 1.0), (4, 0.5), (2, 0.25), (1, 0.25))
"""Rate of a product whose inner or column size is only a multiple of so many 2-byte elements: matrix
units load 16 bytes at a time (NVIDIA's guide above, section on dimensions and alignment)."""

SEPARATE_GRAD_NBYTES = 8.0
"""Bytes for each weight where gradients are not added up inside the product: written in 2 bytes, then
added to what is there (6)."""

SPARE_GRAD_NBYTES = 20.0
"""Bytes more where a second gradient is kept: cast to fp32 (6), added to the sum (12), cleared (2), as
DeepSpeed's BF16_Optimizer does after each micro-batch."""

EXPERT_BIAS_NBYTES = (28.0, 36.0)
"""Bytes for each result of a biased expert, forward and backward: weighted, added, joined and cast in fp32,
one pass each (Megatron-LM, TEGroupedMLP._apply_bias)."""

ATTENTION_SHARE = {"flash1": (0.36, 0.29), "flash2": (0.60, 0.50), "flash3": (0.62, 0.52)}
"""Share of the bf16 peak that causal flash attention reaches, forward and backward, on counted work:
25-40 % for the first generation, 50-73 % for the second on A100 (2307.08691, section 4), 0.6-0.65 and
0.5-0.55 for the third on H100 (2407.08608, figures 5 and 6)."""

NARROW_HEADS = {"flash3": (0.48, 0.45)}
"""The same for heads of 64 or less, where fewer products stand beside each exponential (same figures)."""

FEW_EXPS = (0.55, 0.46)
"""The third generation's shares where a card computes half as many exponentials a FLOP as H100: cuDNN 9.13 on
B200 at 1613 / 1.3 of 2250 TFLOP/s (FlashAttention-4, arXiv 2603.05451, abstract); backward in the
proportion of H100's. Exponentials take as long there as the products of heads of 128 (section 3): those of
64 reach half."""

LOW_ATTENTION = ("fp8", "fp8-cs", "mxfp8", "nvfp4")
"""Precisions in which attention's products can run in 8 bits."""

LOW_ATTENTION_GAIN = 1.5
"""What 8-bit products gain in an attention kernel, whose exponentials stay as they are (2407.08608, figures
5 and 7: 1.4-1.6 for causal heads of 128 and 256 forward; taken for the backward pass, too)."""

LOW_NBYTES = {"fp8": 1.0, "fp8-cs": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}
"""Bytes of an element that a matrix product reads in each low precision."""

QUANTISE_NBYTES = {"fp8": 4.3, "fp8-cs": 9.3, "mxfp8": 6.2, "nvfp4": 8.8}
"""Bytes moved to quantise an element by rows and by columns: four thirds (two results for one) of what
the autocast and pre-quantised columns of NVIDIA TransformerEngine's docs/examples/gemm_profiling
differ by on B300, at ``STREAM`` of its memory rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Computation of one layer and micro-batch.

    Attributes:
        matmul: seconds of matrix products that tensor-parallel exchange can hide under.
        other: seconds of everything else on the card.
        kernels: how many are launched, but for the routed experts.
        routed: how many of the routed experts.
        experts: the routed experts' part of the seconds.
    """

    matmul: Numbers
    other: Numbers
    kernels: Numbers
    routed: Numbers = 0.0
    experts: Numbers = 0.0

    def __add__(self, more: Work) -> Work:
        return Work(
            matmul=self.matmul + more.matmul,
            other=self.other + more.other,
            kernels=self.kernels + more.kernels,
            routed=self.routed + more.routed,
            experts=self.experts + more.experts,
        )

    def times(self, share: Numbers) -> Work:
        """A share of it."""
        return Work(
            matmul=self.matmul * share,
            other=self.other * share,
            kernels=self.kernels * share,
            routed=self.routed * share,
            experts=self.experts * share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Forward, backward and what recomputation repeats, of one layer and micro-batch."""

    forward: Work
    backward: Work
    redo: Work


def duration(work: Work, grid: Grid, *, waits: bool = False) -> Numbers:
    """Seconds of ``work``: the card's, or the host's where it can't launch fast enough.

    Args:
        work: of one layer, head or embedding.
        grid: the layouts.
        waits: whether the host waits for the card to say how many tokens each expert has got, as it does
            forward. What it launches for the experts can't run ahead then.
    """
    graphs = grid.recipe.graphs
    host = (DISPATCH if graphs == "none" else GRAPH_DISPATCH) * SMALL_KERNELS * work.kernels
    routed = (GRAPH_DISPATCH if graphs == "all" else DISPATCH) * SMALL_KERNELS * work.routed
    card = work.matmul + work.other + KERNEL_GAP * (work.kernels + work.routed)
    if grid.recipe.blocking:
        return work.matmul + work.other + host + routed
    ahead = np.maximum(card, host + routed)
    if not waits or graphs == "all":
        return ahead
    experts = work.experts + KERNEL_GAP * work.routed
    apart = np.maximum(card - experts, host) + np.maximum(experts, routed)
    return np.where(np.asarray(work.routed) > 0, apart, ahead)


def matmul_seconds(
    m: Numbers,
    n: Numbers,
    k: Numbers,
    *,
    device: Device,
    precision: str = "bf16",
    groups: Numbers = 1,
    out_nbytes: float = 2.0,
    in_nbytes: float = 2.0,
) -> Numbers:
    """Seconds of ``groups`` products of ``(m, k)`` and ``(k, n)`` in one kernel.

    Args:
        m: rows; with ``n`` and ``k`` numbers or arrays.
        n: columns.
        k: inner size.
        device: the card.
        precision: format of the products.
        groups: products in the kernel, of the same size.
        out_nbytes: bytes written (and read, when accumulated) for each result.
        in_nbytes: bytes read for each input.
    """
    rate = device.rate(precision) * IN_TRAINING * np.minimum(_aligned(n), _aligned(k))
    hbm = device.hbm * STREAM
    best: Numbers = np.inf
    for rows, columns, relative in TILES:
        tiles = groups * np.ceil(m / rows) * np.ceil(n / columns)
        for parts in K_SPLITS:
            waves = np.ceil(tiles * parts / device.sms)
            main = waves * device.sms * rows * columns * 2 * (k / parts) / (rate * relative)
            # Each part of K leaves a partial fp32 sum that is written and read once more.
            partial = groups * m * n * 8.0 * (parts - 1) / hbm
            best = np.minimum(best, main + partial)
    read = groups * (m * k + k * n) * in_nbytes / hbm
    return np.maximum(best, read) + groups * m * n * out_nbytes / hbm


def _aligned(size: Numbers) -> Numbers:
    """The rate that a size's alignment leaves."""
    whole = np.round(size).astype(np.int64)
    return np.select([whole % multiple == 0 for multiple, _ in ALIGNMENT], [rate for _, rate in ALIGNMENT])


def layer_work(layer: Layer, model: Model, grid: Grid, cluster: Cluster) -> LayerWork:
    """Computation of one micro-batch in one layer, on one rank."""
    device = cluster.device
    products = _products(layer, grid, device)
    core = _attention_core(layer, grid, device)
    rest = _elementwise(layer, model, grid, device)
    forward = products.forward + core.forward + rest.forward
    backward = products.backward + core.backward + rest.backward
    full = forward.times(np.where(grid.recompute == 2, grid.again, 0.0))
    selective = core.forward.times(np.where(grid.recompute == 1, grid.again, 0.0))
    redo = full + selective
    return LayerWork(forward=forward, backward=backward, redo=redo)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Both:
    forward: Work
    backward: Work


def _products(layer: Layer, grid: Grid, device: Device) -> _Both:
    """The layer's matrices: one product forward, two backward (data and weight gradients)."""
    tokens = grid.tokens
    forward: Numbers = 0.0
    backward: Numbers = 0.0
    hbm = device.hbm * STREAM
    quantise: list[Numbers] = [0.0, 0.0]
    biased: list[Numbers] = [0.0, 0.0]
    experts: list[Numbers] = [0.0, 0.0]
    kernels, routed, added = 0, np.zeros(grid.size), 0
    low = grid.recipe.precision in QUANTISE_NBYTES
    # Gradients of a shard that is reduced in each micro-batch are written; others are accumulated.
    grad_out = _gradient_nbytes(grid)
    for matrix in layer.matrices:
        expert = matrix.part == "expert"
        parts = grid.expert_tp if expert else grid.tp
        fan_in = matrix.fan_in / parts if matrix.split == "row" else matrix.fan_in
        fan_out = matrix.fan_out / parts if matrix.split == "column" else matrix.fan_out
        rows, groups = tokens, np.ones(grid.size)
        if expert:
            rows, groups = _expert_rows(layer, grid)
        elif matrix.split == "whole":
            rows = np.where(grid.sp, tokens / grid.tp, tokens)
        precision = "bf16" if matrix.part == "router" else grid.recipe.precision
        size = LOW_NBYTES.get(precision, 2.0)

        def timed(
            m: Numbers,
            n: Numbers,
            k: Numbers,
            out: Numbers,
            p: str = precision,
            s: float = size,
            g: Numbers = groups,
        ) -> Numbers:
            return matmul_seconds(m, n, k, device=device, precision=p, groups=g, out_nbytes=out, in_nbytes=s)

        weight = timed(fan_in, fan_out, rows, grad_out) if grid.recipe.trainable == 1 else 0.0
        ways = (timed(rows, fan_out, fan_in, 2.0), timed(rows, fan_in, fan_out, 2.0) + weight)
        forward, backward = forward + ways[0], backward + ways[1]
        if expert:
            # One product for each expert of the rank.
            routed = routed + (np.ones(grid.size) if grid.recipe.fused_experts else groups)
            experts = [before + more for before, more in zip(experts, ways, strict=True)]
        else:
            kernels += 1
        # A pass of its own adds up each weight's and bias' gradient.
        added += 0 if grid.recipe.fused_grad else 2 if matrix.bias else 1
        if low and precision != "bf16":
            moved = groups * rows * QUANTISE_NBYTES[precision] / hbm
            # A fused kernel quantises what passes between its two products, and the gradient there.
            inside = expert and grid.recipe.fused_experts
            passes = (
                0.0 if inside and matrix.split == "row" else moved * fan_in,
                0.0 if inside and matrix.split == "column" else moved * fan_out,
            )
            quantise = [before + more for before, more in zip(quantise, passes, strict=True)]
            if expert:
                experts = [before + more for before, more in zip(experts, passes, strict=True)]
        if expert and matrix.bias and matrix.split == "row" and not grid.recipe.fused_experts:
            moved = groups * rows * fan_out / hbm
            passes = (EXPERT_BIAS_NBYTES[0] * moved, EXPERT_BIAS_NBYTES[1] * moved)
            biased = [before + more for before, more in zip(biased, passes, strict=True)]
            experts = [before + more for before, more in zip(experts, passes, strict=True)]
    casts = kernels if low else 0
    # Beside each expert's product its input is quantised, and backward the incoming gradient.
    each = (2, 3) if low and not grid.recipe.fused_experts else (1, 2)
    return _Both(
        forward=Work(
            matmul=forward,
            other=quantise[0] + biased[0],
            kernels=kernels + casts,
            routed=each[0] * routed,
            experts=experts[0],
        ),
        backward=Work(
            matmul=backward,
            other=quantise[1] + biased[1],
            kernels=2 * kernels + casts + added,
            routed=each[1] * routed,
            experts=experts[1],
        ),
    )


def _gradient_nbytes(grid: Grid) -> Numbers:
    """Bytes written and read for each element of a weight's gradient in one micro-batch.

    Added up inside the product: read and written. Sharded gradients are only written; their reduction
    follows.
    """
    kept = 2.0 * grid.recipe.grad_nbytes if grid.recipe.fused_grad else SEPARATE_GRAD_NBYTES
    kept += SPARE_GRAD_NBYTES if grid.recipe.spare_grads else 0.0
    return np.where(grid.zero >= 2, 2.0, kept)


def _expert_rows(layer: Layer, grid: Grid) -> tuple[Numbers, Numbers]:
    """Tokens that each expert of this rank gets when routing is even, and how many experts it has."""
    own = grid.tokens / np.where(grid.ep > 1, grid.tp, 1)
    local = layer.experts / grid.ep
    return own * layer.top_k / local, local


def _attention_core(layer: Layer, grid: Grid, device: Device) -> _Both:
    """Scores, softmax and weighted sum: matrices without parameters."""
    if not layer.heads:
        zero = Work(matmul=0.0, other=0.0, kernels=0)
        return _Both(forward=zero, backward=zero)
    heads = layer.heads / grid.tp
    batch = grid.micro_batch
    queries = grid.seq / grid.cp
    seen = min(grid.seq, layer.window) if layer.window else grid.seq
    if grid.recipe.attention == "eager":
        return _eager_core(layer, batch * heads, queries, float(grid.seq), device, grid)
    # Half the scores lie behind the causal mask; flash kernels skip them.
    scores = batch * heads * queries * (seen * (1 - seen / (2.0 * grid.seq)))
    work = 2.0 * scores * (layer.qk_dim + layer.v_dim)
    share_forward, share_backward = _attention_share(grid.recipe.attention, layer.qk_dim, device)
    # Kernels of the first two generations use the A100's instructions, which newer cards run at a
    # part of their peak (2407.08608, section 2: about two thirds on H100).
    peak = device.flops["bf16"] * (1.0 if grid.recipe.attention == "flash3" else device.mma)
    if grid.recipe.low_attention and grid.recipe.precision in LOW_ATTENTION:
        peak *= LOW_ATTENTION_GAIN
    moved = batch * heads * queries * (layer.qk_dim + layer.v_dim) * 2 * 2.0
    hbm = device.hbm * STREAM
    return _Both(
        forward=Work(matmul=0.0, other=np.maximum(work / (peak * share_forward), moved / hbm), kernels=1),
        # Backward computes the scores again: five products for two.
        backward=Work(
            matmul=0.0,
            other=np.maximum(2.5 * work / (peak * share_backward), 2 * moved / hbm),
            kernels=3,
        ),
    )


def _attention_share(attention: str, head: int, device: Device) -> tuple[float, float]:
    if attention == "flash3" and device.exps < 1:
        narrow = 0.5 if head <= 64 else 1.0
        return FEW_EXPS[0] * narrow, FEW_EXPS[1] * narrow
    shares = ATTENTION_SHARE | (NARROW_HEADS if head <= 64 else {})
    return shares[attention]


def _eager_core(
    layer: Layer, groups: Numbers, queries: Numbers, seq: float, device: Device, grid: Grid
) -> _Both:
    scores = matmul_seconds(queries, seq, layer.qk_dim, device=device, groups=groups)
    summed = matmul_seconds(queries, layer.v_dim, seq, device=device, groups=groups)
    size = groups * queries * seq
    hbm = device.hbm * STREAM
    # Softmax reads and writes; dropout reads, writes and keeps a mask. Unfused, the scaling and the
    # mask pass over the scores once more each.
    passes = 4.5 if grid.recipe.fused else 8.5
    moved = groups * queries * (layer.qk_dim + layer.v_dim) * 2 * 2.0
    return _Both(
        forward=Work(
            matmul=0.0,
            other=scores + summed + (size * passes * 2.0 + moved) / hbm,
            kernels=8 if grid.recipe.fused else 12,
        ),
        backward=Work(
            matmul=0.0,
            other=2 * (scores + summed) + (size * (passes + 1) * 2.0 + moved) / hbm,
            kernels=14 if grid.recipe.fused else 20,
        ),
    )


def _elementwise(layer: Layer, model: Model, grid: Grid, device: Device) -> _Both:
    """Norms, residuals, activation, positions and the shuffling of routed tokens, as bytes moved."""
    fused = grid.recipe.fused
    tokens = grid.tokens
    stream = model.hidden * np.where(grid.sp, 1.0 / grid.tp, 1.0)
    # A norm reads and writes; a residual with its dropout reads two and writes one. Unfused, dropout
    # and addition are passes of their own.
    per_norm, per_residual = (2.0, 3.0) if fused else (2.0, 5.5)
    forward = stream * (per_norm * layer.norms + 2 * per_residual)
    backward = stream * (3.0 * layer.norms + 2 * (2.5 if fused else 4.5))
    kernels: Numbers = layer.norms + (2 if fused else 4)
    sorting = 0
    width = layer.ffn / grid.tp
    experts: Numbers = 0.0
    if layer.experts:
        spread = np.where(grid.ep > 1, 1.0 / grid.tp, 1.0)
        inside = layer.top_k * spread * layer.expert_ffn / grid.expert_tp
        width = width + (0.0 if grid.recipe.fused_experts else inside)
        # Sent tokens are sorted by rank and again by expert, and brought back the same way.
        # What was sent once to a rank needs the second alone.
        passes = 8.0 if grid.recipe.dispatch == "each" else 4.0
        shuffled = passes * layer.top_k * spread * model.hidden
        forward, backward = forward + shuffled, backward + shuffled
        experts = tokens * shuffled * 2.0 / (device.hbm * STREAM)
        kernels += ROUTER_KERNELS[grid.recipe.dispatch]
        sorting = SORT_KERNELS[grid.recipe.dispatch]
    if layer.gated:
        forward = forward + (3.0 if fused else 5.0) * width
        backward = backward + (5.0 if fused else 8.0) * width
        # The families with a gate are those with rotary positions.
        rotated = (layer.heads * layer.qk_dim + layer.kv_width / 2) / grid.tp
        forward = forward + (2.0 if fused else 6.0) * rotated
        backward = backward + (2.0 if fused else 6.0) * rotated
        kernels += 3 if fused else 9
    else:
        forward, backward = forward + 2.0 * width, backward + 3.0 * width
        kernels += 1
    hbm = device.hbm * STREAM
    return _Both(
        forward=Work(
            matmul=0.0,
            other=tokens * forward * 2.0 / hbm,
            kernels=kernels,
            routed=sorting,
            experts=experts,
        ),
        backward=Work(
            matmul=0.0,
            other=tokens * backward * 2.0 / hbm,
            kernels=2 * kernels,
            routed=2 * sorting,
            experts=experts,
        ),
    )


def head_work(model: Model, grid: Grid, cluster: Cluster) -> LayerWork:
    """The head's product and the loss, of one micro-batch."""
    device = cluster.device
    vocab = padded_vocab(model.vocab, grid.tp) / grid.tp
    tokens = grid.tokens
    # fp32 logits are cast, reduced, shifted, exponentiated and divided; a fused loss passes once.
    forward_moved, backward_moved = (8.0, 6.0) if grid.recipe.fused_loss else (34.0, 14.0)
    hbm = device.hbm * STREAM
    grad_out = _gradient_nbytes(grid)
    forward = matmul_seconds(tokens, vocab, model.hidden, device=device)
    backward = matmul_seconds(tokens, model.hidden, vocab, device=device) + matmul_seconds(
        model.hidden, vocab, tokens, device=device, out_nbytes=grad_out
    )
    nothing = Work(matmul=np.zeros(grid.size), other=np.zeros(grid.size), kernels=np.zeros(grid.size))
    return LayerWork(
        forward=Work(matmul=forward, other=tokens * vocab * forward_moved / hbm, kernels=8),
        backward=Work(matmul=backward, other=tokens * vocab * backward_moved / hbm, kernels=6),
        redo=nothing,
    )


def embedding_work(model: Model, grid: Grid, cluster: Cluster) -> LayerWork:
    """Looking up the embedding of one micro-batch, and the gradient of its whole table."""
    hbm = cluster.device.hbm * STREAM
    vocab = padded_vocab(model.vocab, grid.tp) / grid.tp
    looked_up = grid.tokens * model.hidden * 6.0 / hbm
    # The gradient is dense: every row of the table is written or added to, whatever was looked up.
    table = vocab * model.hidden * _gradient_nbytes(grid) / hbm
    nothing = np.zeros(grid.size)
    return LayerWork(
        forward=Work(matmul=nothing, other=looked_up, kernels=4),
        backward=Work(matmul=nothing, other=looked_up + table, kernels=6),
        redo=Work(matmul=nothing, other=nothing, kernels=0),
    )


def padded_vocab(vocab: int, tp: Numbers) -> Numbers:
    """The vocabulary as it is padded for tensor parallelism: to a multiple of 128 on each rank.

    Source: Megatron-LM, ``make-vocab-size-divisible-by``, default 128.
    """
    return np.ceil(vocab / (128 * tp)) * 128 * tp


def optimizer_seconds(params: Numbers, held: Numbers, grid: Grid, cluster: Cluster) -> Numbers:
    """Seconds of the update on one rank.

    Args:
        params: parameters that this rank updates.
        held: parameters whose gradients this rank holds, for the norm and the clearing.
        grid: the layouts.
        cluster: for the memory rate.
    """
    states = OPTIMIZER_NBYTES[grid.recipe.optimizer] / 4
    # Gradient, master and states are read, master and states written; the low-precision copy is made.
    updated = 4.0 + 8.0 + 8.0 * states + 6.0
    # Each pass over the gradients: the norm reads, clearing writes, clipping does both, and so does
    # taking fp16's loss scale out again.
    passes = 4 if not grid.recipe.fused or grid.recipe.precision != "fp16" else 6
    walked = passes * grid.recipe.grad_nbytes
    trained = grid.recipe.trainable
    return trained * (params * updated + held * walked) / (cluster.device.hbm * STREAM)
