"""How a run is laid out on a cluster, and the software's habits that bytes and time depend on.

``n = dp * tp * pp * cp`` ranks. Expert parallelism re-uses the ``dp * cp`` ranks of a stage: it
divides them and multiplies nothing. Ranks are numbered tp first, then cp, dp and pp, as Megatron
does, so that tensor parallelism stays on the fastest links.

Letters: ``m`` micro-batches a step, ``v`` chunks of layers a stage holds (interleaving).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from typing import Literal

from tonnage.errors import LayoutError
from tonnage.plan.model import Model

Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp16", "fp8", "fp8-cs", "mxfp8", "nvfp4"]
Attention = Literal["eager", "flash1", "flash2", "flash3"]
Graphs = Literal["none", "dense", "all"]
Dispatch = Literal["each", "once"]
ContextKind = Literal["auto", "ring", "ulysses"]
Optimizer = Literal["adam", "adam-8bit", "adam-paged", "sgd", "muon"]

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "fp8-cs", "mxfp8", "nvfp4")
"""``fp8`` scales by history (delayed), ``fp8-cs`` by what is there (current scaling)."""

ATTENTIONS: tuple[Attention, ...] = ("eager", "flash1", "flash2", "flash3")
CONTEXTS: tuple[ContextKind, ...] = ("auto", "ring", "ulysses")
GRAPHS: tuple[Graphs, ...] = ("none", "dense", "all")
DISPATCHES: tuple[Dispatch, ...] = ("each", "once")

OPTIMIZER_NBYTES: dict[str, int] = {"adam": 8, "adam-8bit": 2, "adam-paged": 0, "sgd": 4, "muon": 4}
"""Bytes of state a parameter on the card, beside the fp32 master copy: two fp32 moments, two of 8 bits, two
that are paged out to the host, one momentum."""

COMPRESSED_NBYTES: dict[str, float] = {"none": 0.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes that a gradient element is sent as; ``none`` sends it as it is accumulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the training software does that is no parallel degree.

    Attributes:
        precision: format of the matrix products.
        attention: ``eager`` writes the scores to memory; flash generations do not.
        optimizer: which states a parameter has.
        grad_nbytes: bytes of an accumulated and reduced gradient element.
        master: whether fp32 copies of the weights are kept.
        low_copy: whether 2-byte weights stay beside those copies; FSDP shards the fp32 ones alone and casts
            what it gathers.
        scatters: whether ZeRO 1 scatters the reduced gradients; without, every rank gets all of them.
        bucket: elements of the buffer that gradients are copied into to be reduced; 0 where they lie in it.
        expandable: whether the allocator maps memory piece by piece (``expandable_segments``), and so hardly
            fragments.
        compress: format in which gradients are sent.
        keep: share of the gradient elements that are sent (1 all; less for pruned, masked gradients).
        trainable: share of the parameters that train (1 all; LoRA less than a hundredth).
        local_steps: steps between reductions (DiLoCo, local SGD); 1 reduces in each.
        overlap_grad: gradients are reduced while the backward pass runs.
        overlap_param: parameters are gathered while computation runs.
        overlap_tp: tensor-parallel exchange is cut up and runs beside its matrix product.
        overlap_p2p: pipeline sends run beside computation.
        paired: a send and the receipt of the other direction go together; without, each waits its turn.
        interleaves: stages may hold several chunks.
        overlap_ep: token exchange of experts runs beside computation of another micro-batch.
        dispatch: a token goes to the ranks of its experts with a copy for ``each`` expert, by one all-to-all,
            or ``once`` to each host and rank (DeepEP, HybridEP).
        fused_experts: the products of a rank's experts are one kernel, which applies the activation and
            quantises, too.
        low_attention: the attention's products run in the precision of the others.
        scatter: without sequence parallel, a pipeline send is cut over the tensor-parallel ranks and put
            together again on the other side (2104.04473, section 4.1).
        rails: collectives that leave a domain use the NICs of all its cards, as NCCL's rings do; without,
            each rank's bytes go through its own.
        fused: element-wise kernels are fused (compiled, or Transformer Engine).
        fused_loss: the loss passes over the logits once, in low precision.
        fused_grad: a weight's gradient is added up inside its product, not by passes of its own.
        keeps_outputs: a stage keeps what it sent on until its gradient comes back.
        spare_grads: bytes a parameter of a second, low-precision gradient.
        graphs: which kernels are launched from recorded graphs, without the host in between: ``none``,
            ``dense`` (all but the routed experts) or ``all``.
        blocking: the host waits for each kernel before it prepares the next (``CUDA_LAUNCH_BLOCKING=1``).
        context: how context parallelism exchanges, ``auto`` takes the cheaper.
    """

    precision: Precision = "bf16"
    attention: Attention = "flash2"
    optimizer: Optimizer = "adam"
    grad_nbytes: int = 4
    master: bool = True
    low_copy: bool = True
    scatters: bool = True
    bucket: int = 0
    expandable: bool = False
    compress: str = "none"
    keep: float = 1.0
    trainable: float = 1.0
    local_steps: int = 1
    overlap_grad: bool = True
    overlap_param: bool = True
    overlap_tp: bool = True
    overlap_p2p: bool = True
    overlap_ep: bool = False
    dispatch: Dispatch = "each"
    fused_experts: bool = False
    low_attention: bool = False
    paired: bool = True
    interleaves: bool = True
    scatter: bool = True
    rails: bool = True
    fused: bool = True
    fused_loss: bool = True
    fused_grad: bool = True
    keeps_outputs: bool = False
    spare_grads: int = 0
    graphs: Graphs = "none"
    blocking: bool = False
    context: ContextKind = "auto"

    def __post_init__(self) -> None:
        if self.compress not in COMPRESSED_NBYTES:
            raise LayoutError(
                f"no gradient compression {self.compress!r}",
                hint=f"use one of {', '.join(COMPRESSED_NBYTES)}",
            )
        if self.optimizer not in OPTIMIZER_NBYTES:
            raise LayoutError(
                f"no optimizer {self.optimizer!r}", hint=f"use one of {', '.join(OPTIMIZER_NBYTES)}"
            )
        for name, known in (
            ("precision", PRECISIONS),
            ("attention", ATTENTIONS),
            ("context", CONTEXTS),
            ("graphs", GRAPHS),
            ("dispatch", DISPATCHES),
        ):
            value = getattr(self, name)
            if value not in known:
                near = difflib.get_close_matches(str(value), known, n=1)
                meant = f"did you mean {near[0]}? " if near else ""
                raise LayoutError(f"no {name} {value!r}", hint=f"{meant}use one of {', '.join(known)}")
        if self.grad_nbytes not in (1, 2, 4, 8):
            raise LayoutError(f"gradients of {self.grad_nbytes} bytes", hint="use 1, 2, 4 or 8")
        for name in ("keep", "trainable"):
            if not 0 < getattr(self, name) <= 1:
                raise LayoutError(f"{name} is {getattr(self, name)}", hint="use a share above 0 and up to 1")
        if self.local_steps < 1:
            raise LayoutError(f"{self.local_steps} local steps", hint="use 1 or more")

    @property
    def sent_grad_nbytes(self) -> float:
        """Bytes on the wire for each gradient element there is."""
        return (COMPRESSED_NBYTES[self.compress] or self.grad_nbytes) * self.keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step trains on.

    Attributes:
        sequences: sequences a step, over the whole cluster (the global batch).
        seq: tokens a sequence.
    """

    sequences: int
    seq: int

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.seq < 1:
            raise LayoutError(
                f"a batch of {self.sequences} sequences of {self.seq} tokens", hint="use 1 or more of both"
            )

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.sequences * self.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel degrees and what is cut, kept and recomputed.

    Attributes:
        dp: replicas that see different sequences.
        tp: ranks that share each matrix.
        pp: pipeline stages.
        cp: ranks that share each sequence.
        ep: ranks that share the experts.
        sp: whether the parts between tensor-parallel matrices are cut along the sequence.
        virtual: chunks of layers a stage holds.
        zero: 0 nothing is sharded, 1 optimizer states, 2 gradients too, 3 parameters too (FSDP).
        shard: ranks that a ZeRO shard is spread over; 0 for all of dp and cp (less is HSDP).
        micro_batch: sequences of one pass.
        recompute: what the backward pass computes again.
        recompute_share: share of the layers that are recomputed, the others keep all.
        stages: layers of each chunk in order, when they are set by hand.
        recipe: habits of the software.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    virtual: int = 1
    zero: int = 0
    shard: int = 0
    micro_batch: int = 1
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    stages: tuple[int, ...] = ()
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "virtual", "micro_batch"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}", hint=f"use {name} of 1 or more")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"no ZeRO stage {self.zero}", hint="use 0, 1, 2 or 3")
        if self.recompute not in RECOMPUTES:
            raise LayoutError(f"no recompute {self.recompute!r}", hint=f"use {', '.join(RECOMPUTES)}")
        if not 0 < self.recompute_share <= 1:
            raise LayoutError(
                f"{self.recompute_share} of the layers recomputed", hint="use a share above 0 and up to 1"
            )
        if self.virtual > 1 and self.pp == 1:
            raise LayoutError("interleaving without a pipeline", hint="use virtual 1, or pp of 2 or more")
        if (self.dp * self.cp) % self.ep and (self.dp * self.cp * self.tp) % self.ep:
            raise LayoutError(
                f"ep {self.ep} does not divide dp x cp = {self.dp * self.cp}",
                hint=f"use ep {nearest_divisor(self.dp * self.cp, self.ep)}",
            )
        if self.shard and (self.dp * self.cp) % self.shard:
            raise LayoutError(
                f"shards over {self.shard} ranks do not divide dp x cp = {self.dp * self.cp}",
                hint=f"use shard {nearest_divisor(self.dp * self.cp, self.shard)}",
            )

    @property
    def num_ranks(self) -> int:
        """Ranks that the layout needs."""
        return self.dp * self.tp * self.pp * self.cp

    def num_micro_batches(self, batch: Batch) -> int:
        """Passes a step on each replica.

        Raises:
            LayoutError: the global batch can't be cut so.
        """
        each = self.dp * self.micro_batch
        if batch.sequences % each:
            lower = batch.sequences // each * each
            near = max(lower, each)
            raise LayoutError(
                f"a global batch of {batch.sequences} is no multiple of dp {self.dp} x micro-batch {self.micro_batch}",
                hint=f"use a global batch of {near} or {lower + each}",
            )
        return batch.sequences // each

    def replace(self, **changes: object) -> Layout:
        """The same layout with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def check(layout: Layout, model: Model, batch: Batch, *, num_devices: int) -> None:
    """Refuse a layout that the model or cluster can't take.

    Raises:
        LayoutError: with the nearest legal choice.
    """
    if layout.num_ranks != num_devices:
        rest = layout.tp * layout.pp * layout.cp
        if num_devices % rest:
            fitting = nearest_divisor(num_devices, rest)
            hint = f"{num_devices} cards take tp x pp x cp = {fitting}, with dp {num_devices // fitting}"
        else:
            hint = f"use dp {num_devices // rest}"
        raise LayoutError(
            f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {layout.num_ranks} ranks, "
            f"but the cluster has {num_devices} cards",
            hint=hint,
        )
    heads = min((layer.heads for layer, _ in model.layers if layer.heads), default=0)
    if heads and heads % layout.tp:
        raise LayoutError(
            f"tp {layout.tp} does not divide the {heads} heads of {model.name}",
            hint=f"use tp {nearest_divisor(heads, layout.tp)}",
        )
    if layout.pp * layout.virtual > model.num_layers + 2:
        most = max(1, model.num_layers // layout.virtual)
        raise LayoutError(
            f"pp {layout.pp} x {layout.virtual} chunks for the {model.num_layers} layers of {model.name}",
            hint=f"use pp {most} or less, or fewer chunks a stage",
        )
    if layout.ep > 1 and (not model.experts or model.experts % layout.ep):
        raise LayoutError(
            f"ep {layout.ep} with {model.experts or 'no'} experts in {model.name}",
            hint=f"use ep {nearest_divisor(model.experts, layout.ep)}" if model.experts else "use ep 1",
        )
    if batch.seq % layout.cp:
        raise LayoutError(
            f"cp {layout.cp} does not divide the sequence of {batch.seq} tokens",
            hint=f"use cp {nearest_divisor(batch.seq, layout.cp)}",
        )
    if layout.stages and sum(layout.stages) != model.num_layers:
        raise LayoutError(
            f"the stages hold {sum(layout.stages)} layers, {model.name} has {model.num_layers}",
            hint="name as many layers as there are",
        )
    if layout.stages and len(layout.stages) != layout.pp * layout.virtual:
        raise LayoutError(
            f"{len(layout.stages)} chunks for pp {layout.pp} x {layout.virtual}",
            hint=f"name {layout.pp * layout.virtual} of them",
        )
    layout.num_micro_batches(batch)


def chunk_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers of each pipeline chunk, as real runs cut them.

    Even where it divides. Else embedding and head count as one layer each if that makes it even
    (Llama 3 405B: 126 layers in 64 chunks; BLOOM: 70 in 12). Else the middle takes what is over,
    since the ends also hold the embedding and the head.
    """
    if num_layers % num_chunks == 0:
        return (num_layers // num_chunks,) * num_chunks
    if (num_layers + 2) % num_chunks == 0 and num_chunks > 1:
        each = (num_layers + 2) // num_chunks
        return (each - 1, *(each,) * (num_chunks - 2), each - 1)
    low, over = divmod(num_layers, num_chunks)
    first = (num_chunks - over + 1) // 2
    return tuple(low + (first <= i < first + over) for i in range(num_chunks))


def nearest_divisor(of: int, wanted: int) -> int:
    """The divisor of ``of`` nearest to ``wanted``, the smaller of two equally near."""
    divisors = [i for i in range(1, math.isqrt(max(of, 1)) + 1) if of % i == 0]
    candidates = sorted({*divisors, *(of // i for i in divisors)}) or [1]
    return min(candidates, key=lambda d: (abs(d - wanted), d))
