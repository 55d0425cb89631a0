r"""How well data-parallel training scales, from the links alone: the engine's schedules and DDP's.

Letters: ``n`` data-parallel ranks, ``q`` of them in one host (scale-up domain) and ``h`` hosts; a step
computes ``F`` forward and ``B`` backward; buckets ``1..K`` in the order in which they become ready, the
cut and the times ``r`` and ``p`` as :mod:`~tonnage.plan.cut` has them; ``efficiency = (F + B) / step``.
Each rank's batch stays as it is (weak scaling), and the update is left out on both sides: it is the same
or, sharded, ``n`` times shorter.

**Lines.** A bucket of ``m`` bytes takes ``α + β m``, from :mod:`~tonnage.plan.collectives`:

- *flat*, as NCCL runs it: reduce-scatter and all-gather by rings, ``n - 1`` steps one after the other; an
  all-reduce by ring (twice as many) or by tree (twice the depth), whichever starts sooner.
- *two levels*: a reduce-scatter in each host; then one flow leaves each rank for its peers of the same
  place in other hosts, with ``1 / q`` of the bytes and ``h - 1`` steps, or ``log2 h`` by halving; gathers
  run the other way round. Chunks of ``c`` bytes keep both levels at work at once:
  ``α = α_in + α_out + c min(β_in, β_out)``, ``β = max(β_in, β_out)``.

**Schedules.** With ``f_k`` the ends of the reductions (recurrence in :mod:`~tonnage.plan.cut`):

- ``ddp``: ``step = F + f_K``, buckets of 1 MiB and then 25 MiB; ``tuned``: the same with the best cut.
- ``shard``: ``step = f_K + h_K``: the gathers begin when the last reduction has ended.
- ``early``: a gather is ready as soon as its bucket is reduced and updated, but reductions go first: it
  moves in the gaps ``[f_k, start of reduction k + 1)``, the latest bucket first, since the forward pass
  needs that one soonest. What is left of gather ``k`` at ``f_K`` takes ``w_k`` seconds, so
  ``step = f_K + max(Σ w, max_k (p(i_k) + Σ_{j >= k} w_j))``.
- ``levels``: ``early`` over two levels.

What is not in it: stragglers and jitter, other traffic on the links, and what communication takes from
the computation beside it. All of them grow with ``n``, so the figures are upper limits.

Sources: nccl-tests' doc/PERFORMANCE.md (rings); Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005 (halving and doubling, also NCCL's PAT of 2.23);
DeAR, arXiv 2302.12445 (the reduction in two halves).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tonnage.errors import LayoutError
from tonnage.plan.cluster import Cluster, Link
from tonnage.plan.collectives import Numbers, Reach, reach, seconds
from tonnage.plan.compute import STREAM, padded_vocab
from tonnage.plan.cut import Gradients, best_cut, capped_cut, cut_timing
from tonnage.plan.grid import grid_of, kind_order, kinds
from tonnage.plan.layout import COMPRESSED_NBYTES, Batch, Layout
from tonnage.plan.model import Layer, Model
from tonnage.plan.steptime import pieces_of
from tonnage.units import format_time

ScheduleName = Literal["ddp", "tuned", "shard", "early", "levels"]
SCHEDULES: tuple[ScheduleName, ...] = ("ddp", "tuned", "shard", "early", "levels")

SCALING_COLUMNS = (
    "ranks",
    "compute",
    "DDP",
    "DDP, best buckets",
    "shard",
    "early",
    "two levels",
    "step / DDP's",
)
"""Heads of :func:`scaling_rows`."""

DEFAULT_RANKS = tuple(2**i for i in range(3, 15))
"""8 to 16,384."""

CHUNK = 1 << 18
"""Bytes that pass from one level to the other at a time: a frame of the engine's own connections."""

SCALE_NBYTES = 4 / 256
"""Bytes an element for the scales of 8-bit gradients, one of 4 bytes for each block of 256."""

_Op = Literal["reduce-scatter", "all-gather", "all-reduce"]
_HALVES: tuple[_Op, _Op] = ("reduce-scatter", "all-gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What one byte of gradients becomes on its way.

    Attributes:
        share: bytes sent for it.
        encode: seconds that a reduce-scatter spends on it encoding and adding up.
        decode: seconds that an all-gather spends on it.
    """

    share: float = 1.0
    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledStep:
    """A schedule's step.

    Attributes:
        seconds: of the whole step.
        moving: seconds of it that the link is at work.
        num_buckets: transfers each way.
    """

    seconds: float
    moving: float
    num_buckets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """All schedules at one number of ranks.

    Attributes:
        ranks: data-parallel ranks.
        compute: seconds of a step that nothing waits in.
        steps: by schedule.
    """

    ranks: int
    compute: float
    steps: dict[ScheduleName, ScaledStep]

    def efficiency(self, schedule: ScheduleName) -> float:
        """Share of the step that computes."""
        return self.compute / self.steps[schedule].seconds


def gradient_profile(model: Model, layout: Layout, cluster: Cluster, batch: Batch) -> Gradients:
    """When each gradient of one rank is ready, as the planner's compute model has it.

    A layer's seconds are shared out over its matrices by the work that each does.

    Args:
        model: what is trained.
        layout: data and tensor parallel, with ZeRO 0 or 1.
        cluster: the card and its links.
        batch: gives a micro-batch its size.

    Raises:
        LayoutError: the layout has other parallel degrees, or shards gradients.
    """
    others = {name: getattr(layout, name) for name in ("pp", "cp", "ep") if getattr(layout, name) > 1}
    if others or layout.zero > 1:
        told = ", ".join(f"{name} {degree}" for name, degree in others.items()) or f"ZeRO {layout.zero}"
        raise LayoutError(
            f"the engine's scaling is that of data and tensor parallel ranks, not of {told}",
            hint="leave out --pp, --cp and --ep, and use --zero 0 or 1",
        )
    grid = grid_of([layout], model, batch)
    pieces = pieces_of(model, grid, cluster)
    tp, nbytes = layout.tp, layout.recipe.grad_nbytes
    table = int(padded_vocab(model.vocab, tp)) // tp * model.hidden
    tensors: list[_Tensor] = []

    def add(shares: Sequence[tuple[float, float]], total: tuple[float, float]) -> None:
        work = sum(each for _, each in shares) or 1.0
        tensors.extend(
            _Tensor(round(params * nbytes), total[0] * each / work, total[1] * each / work)
            for params, each in shares
        )

    head = [(0 if model.tied else table, 1.0), (model.other_head, 0.0)]
    add(head, _total(pieces.head.total))
    known = [
        (_shares(layer, tp), _total(each.total))
        for (layer, _), each in zip(kinds(model), pieces.layers, strict=True)
    ]
    for kind in reversed(kind_order(model)):
        add(*known[kind])
    add([(table + model.other_embedding, 1.0)], _total(pieces.embedding.total))
    ready = itertools.accumulate(each.backward for each in tensors)
    return Gradients(
        sizes=tuple(each.nbytes for each in tensors),
        ready=tuple(ready),
        forward=tuple(each.forward for each in tensors),
    )


def wire(compress: str, *, grad_nbytes: int, cluster: Cluster) -> Wire:
    """What compression makes of a byte, and what it costs the card: its passes over memory.

    Encoding reads a gradient and what is still owed of it and writes both what is owed now and what is
    sent; adding up reads what was sent. Decoding reads that and writes the values.

    Raises:
        LayoutError: no such compression.
    """
    if compress not in COMPRESSED_NBYTES:
        raise LayoutError(
            f"no gradient compression {compress!r}", hint=f"use one of {', '.join(COMPRESSED_NBYTES)}"
        )
    if compress == "none":
        return Wire()
    sent = COMPRESSED_NBYTES[compress] + (SCALE_NBYTES if compress.startswith("int") else 0.0)
    if sent >= grad_nbytes:
        return Wire()
    passed = 1 / (grad_nbytes * cluster.device.hbm * STREAM)
    return Wire(
        share=sent / grad_nbytes,
        encode=(grad_nbytes + 8 + 2 * sent) * passed,
        decode=(sent + grad_nbytes) * passed,
    )


def scale(
    gradients: Gradients,
    cluster: Cluster,
    ranks: int,
    *,
    stride: int = 1,
    rails: bool = True,
    passes: int = 1,
    sent: Wire | None = None,
) -> Scaled:
    """The step of each schedule on ``ranks`` data-parallel ranks.

    Args:
        gradients: of one rank's backward pass.
        cluster: the links; its number of cards does not matter.
        ranks: data-parallel ranks.
        stride: cards between neighbouring ranks: the tensor-parallel degree.
        rails: whether flat rings use the NICs of all cards of a host.
        passes: micro-batches of a step, of which the last one communicates.
        sent: what ours sends; DDP sends gradients as they are.

    Raises:
        LayoutError: ``ranks`` or ``passes`` is below 1.
    """
    if ranks < 1 or passes < 1:
        raise LayoutError(f"{passes} micro-batches on {ranks} ranks", hint="use 1 or more of both")
    forward, backward = sum(gradients.forward), max(gradients.ready)
    before = (passes - 1) * (forward + backward)
    compute = before + forward + backward
    if ranks == 1:
        idle = ScaledStep(seconds=compute, moving=0.0, num_buckets=0)
        return Scaled(ranks=1, compute=compute, steps=dict.fromkeys(SCHEDULES, idle))
    sent = sent or Wire()
    size = sum(gradients.sizes)

    def step(cycle: float, links: Sequence[Link], cut: Sequence[int]) -> ScaledStep:
        moving = sum(len(cut) * link.latency + size / link.bandwidth for link in links)
        return ScaledStep(
            seconds=before + max(cycle, forward + backward), moving=moving, num_buckets=len(cut)
        )

    flat = reach(cluster, size=ranks, stride=stride, rails=rails)
    reduce_all = _flat_line("all-reduce", flat, cluster)
    capped, best = capped_cut(gradients), best_cut(gradients, reduce=reduce_all).boundaries
    steps: dict[ScheduleName, ScaledStep] = {}
    cuts: tuple[tuple[ScheduleName, Sequence[int]], ...] = (("ddp", capped), ("tuned", best))
    for name, cut in cuts:
        ended = cut_timing(gradients, cut, reduce=reduce_all).reduced
        steps[name] = step(forward + ended, [reduce_all], cut)
    pair = [_sent(_flat_line(op, flat, cluster), op, sent) for op in _HALVES]
    found = best_cut(gradients, reduce=pair[0], gather=pair[1])
    steps["shard"] = step(found.timing.cycle, pair, found.boundaries)
    cut = early_cut(gradients, [found.boundaries, best], *pair)
    steps["early"] = step(early_cycle(gradients, cut, *pair), pair, cut)
    pair = [_sent(level_line(op, ranks, cluster, stride=stride), op, sent) for op in _HALVES]
    found = best_cut(gradients, reduce=pair[0], gather=pair[1])
    cut = early_cut(gradients, [found.boundaries, best], *pair)
    steps["levels"] = step(early_cycle(gradients, cut, *pair), pair, cut)
    return Scaled(ranks=ranks, compute=compute, steps=steps)


def scaling_json(gradients: Gradients, found: Sequence[Scaled]) -> dict[str, Any]:
    """All figures in base units."""
    return {
        "profile": {
            "num_tensors": len(gradients.sizes),
            "nbytes": sum(gradients.sizes),
            "forward_seconds": sum(gradients.forward),
            "backward_seconds": max(gradients.ready),
        },
        "scaling": [
            {
                "ranks": each.ranks,
                "compute_seconds": each.compute,
                "schedules": {
                    name: {
                        "step_seconds": step.seconds,
                        "efficiency": each.efficiency(name),
                        "moving_seconds": step.moving,
                        "num_buckets": step.num_buckets,
                    }
                    for name, step in each.steps.items()
                },
            }
            for each in found
        ],
    }


def scaling_rows(found: Sequence[Scaled]) -> list[tuple[str, ...]]:
    """For a table under :data:`SCALING_COLUMNS`."""
    return [
        (
            f"{each.ranks:,}",
            format_time(each.compute),
            *(f"{each.efficiency(name):.1%}" for name in SCHEDULES),
            f"{each.steps['levels'].seconds / each.steps['ddp'].seconds:.2f}",
        )
        for each in found
    ]


def early_cycle(gradients: Gradients, boundaries: Sequence[int], reduce: Link, gather: Link) -> float:
    """Seconds of a backward and the next forward pass when gathers begin during the backward pass."""
    edges = [0, *boundaries]
    sizes = [sum(gradients.sizes[a:b]) for a, b in itertools.pairwise(edges)]
    ready = list(itertools.accumulate(gradients.ready, max))
    left: list[float] = []
    end = 0.0
    for last, size in zip(boundaries, sizes, strict=True):
        start = max(end, ready[last - 1])
        gap = start - end
        for k in reversed(range(len(left))):
            moved = min(gap, left[k])
            left[k] -= moved
            gap -= moved
        end = start + reduce.latency + size / reduce.bandwidth
        left.append(gather.latency + size / gather.bandwidth)
    computed = list(itertools.accumulate(gradients.forward))
    arrives, latest = 0.0, 0.0
    for last, rest in zip(reversed(boundaries), reversed(left), strict=True):
        arrives += rest
        latest = max(latest, arrives + computed[last - 1])
    return end + latest


def early_cut(
    gradients: Gradients, known: Sequence[Sequence[int]], reduce: Link, gather: Link
) -> Sequence[int]:
    """The quickest of the ``known`` cuts and of buckets of equal sizes, each half of the one before.

    What is best for ``shard`` is not for ``early``: more and smaller buckets leave gathers more gaps.
    """
    total = sum(gradients.sizes)
    caps = {max(1, total >> i) for i in range(12)}
    cuts = [*known, *(capped_cut(gradients, cap=cap, first=cap) for cap in sorted(caps, reverse=True))]
    return min(cuts, key=lambda cut: early_cycle(gradients, cut, reduce, gather))


def level_line(op: _Op, ranks: int, cluster: Cluster, *, stride: int = 1) -> Link:
    """The line of a reduce-scatter or an all-gather over two levels."""
    local = int(reach(cluster, size=ranks, stride=stride).local)
    hosts = -(-ranks // local)
    inside = reach(cluster, size=local, stride=stride)
    if hosts == 1:
        return _flat_line(op, inside, cluster)
    outside = reach(cluster, size=hosts, stride=stride * local)
    near = _flat_line(op, inside, cluster)
    far = _flat_line(op, outside, cluster)
    hop = cluster.nic.hop
    halving = hop * (float(np.ceil(np.log2(hosts))) - (hosts - 1))
    slopes = (1 / near.bandwidth, 1 / (local * far.bandwidth))
    return Link(
        latency=near.latency + far.latency + min(0.0, halving) + CHUNK * min(slopes), rate=1 / max(slopes)
    )


def _flat_line(op: _Op, to: Reach, cluster: Cluster) -> Link:
    """The line of a collective of which all ranks take part at once."""
    if int(to.size) == 1:
        return Link(rate=float("inf"))
    latency = float(seconds(op, 0.0, to, cluster))
    slope = (float(seconds(op, 1e9, to, cluster)) - latency) / 1e9
    if op == "all-reduce":
        # By ring it is a reduce-scatter and an all-gather that starts at once.
        start = cluster.nic.latency if to.size > to.local else cluster.scaleup.latency
        latency = min(latency, 2 * float(seconds("all-gather", 0.0, to, cluster)) - start)
    return Link(latency=latency, rate=1 / slope)


def _sent(line: Link, op: _Op, sent: Wire) -> Link:
    work = sent.encode if op == "reduce-scatter" else sent.decode
    return Link(latency=line.latency, rate=1 / (sent.share / line.bandwidth + work))


@dataclass(frozen=True, slots=True)
class _Tensor:
    nbytes: int
    forward: float
    backward: float


def _total(both: tuple[Numbers, Numbers]) -> tuple[float, float]:
    forward, backward = (float(np.ravel(each)[0]) for each in both)
    return forward, backward


def _shares(layer: Layer, tp: int) -> list[tuple[float, float]]:
    """Parameters on a rank, and relative work, of each tensor of a layer, last one first."""
    found = [(float(layer.vectors), 0.0)]
    for matrix in layer.matrices:
        expert = matrix.part == "expert"
        copies, used = (layer.experts, layer.top_k) if expert else (1, 1)
        held = matrix.params / (1 if matrix.split == "whole" else tp)
        found.append((held * copies, held * used))
    return found[::-1]
