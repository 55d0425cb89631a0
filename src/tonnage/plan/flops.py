r"""FLOP of a training token, under each convention that published figures use.

All agree on two FLOP for a multiply and add, and on a backward pass of twice the forward pass. They
differ in three things: whether attention counts whole or the half below the causal mask, whether the
embedding's lookup counts as a product, and whether recomputation counts. So the same run has an MFU
that differs by up to 33 %. Compare seconds or tokens per second; where that is not possible, convert.

Letters: ``N`` parameters in matrices that a token meets, ``l`` layers, ``h`` heads times their
width, ``s`` sequence. Whole attention is ``12 l h s`` a token, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.errors import LayoutError
from tonnage.plan.layout import Recompute
from tonnage.plan.model import Layer, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """How FLOP are counted.

    Attributes:
        name: as ``--convention`` takes it.
        halved: attention counts only what the causal mask leaves.
        embedding: the embedding's lookup counts as a product with its matrix.
        recompute: what the backward pass computes again counts too.
        source: who counts so.
    """

    name: str
    halved: bool
    embedding: bool
    recompute: bool
    source: str


CONVENTIONS = {
    each.name: each
    for each in (
        Convention(
            name="megatron-bridge",
            halved=True,
            embedding=False,
            recompute=False,
            source="NVIDIA-NeMo/Megatron-Bridge performance summaries, 25.09 and later",
        ),
        Convention(
            name="megatron",
            halved=False,
            embedding=False,
            recompute=False,
            source="Korthikanti et al., arXiv 2205.05198; Megatron-LM num_floating_point_operations, 2024; "
            "NeMo launcher",
        ),
        Convention(
            name="narayanan",
            halved=False,
            embedding=False,
            recompute=True,
            source="Narayanan et al., arXiv 2104.04473: 96 B s l h^2 (1 + s/6h + V/16lh), recompute counted",
        ),
        Convention(
            name="palm",
            halved=False,
            embedding=True,
            recompute=False,
            source="Chowdhery et al., arXiv 2204.02311, appendix B; mosaicml/llm-foundry: 6 N + 12 l h s",
        ),
    )
}
"""The conventions by name; the first is what ``plan`` prints unless told otherwise."""

DEFAULT = "megatron-bridge"


def convention(name: str) -> Convention:
    """The convention of that name.

    Raises:
        LayoutError: there is none.
    """
    if name not in CONVENTIONS:
        raise LayoutError(f"no FLOP convention {name!r}", hint=f"use {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]


def flops_per_token(model: Model, seq: int, how: Convention, *, recompute: Recompute = "none") -> float:
    """FLOP of training on one token.

    Args:
        model: the decoder.
        seq: tokens a sequence.
        how: the convention.
        recompute: what is computed again; counts only where the convention counts it.
    """
    total = 0.0
    for layer, count in model.layers:
        core = _core(layer, seq, halved=how.halved)
        forward = 2.0 * _weights(layer) + core
        again = {"none": 0.0, "selective": core, "full": forward}[recompute] if how.recompute else 0.0
        total += count * (3 * forward + again)
    head = 6.0 * model.vocab * model.hidden
    return total + head * (2 if how.embedding and not model.tied else 1)


def _weights(layer: Layer) -> int:
    return sum(m.fan_in * m.fan_out * (layer.top_k if m.part == "expert" else 1) for m in layer.matrices)


def _core(layer: Layer, seq: int, *, halved: bool) -> float:
    """FLOP of scores and weighted sum of one token, forward."""
    seen = float(min(seq, layer.window) if layer.window else seq)
    if halved:
        seen *= 1 - seen / (2.0 * seq)
    return 2.0 * layer.heads * seen * (layer.qk_dim + layer.v_dim)


def convert_mfu(
    value: float,
    *,
    model: Model,
    seq: int,
    source: Convention,
    target: Convention,
    recompute: Recompute = "none",
) -> float:
    """The same run's utilisation under another convention.

    Raises:
        LayoutError: the utilisation is not between 0 and 1.
    """
    if not 0 < value <= 1.5:
        raise LayoutError(f"a utilisation of {value}", hint="give a share such as 0.45, or 45%")
    return (
        value
        * flops_per_token(model, seq, target, recompute=recompute)
        / flops_per_token(model, seq, source, recompute=recompute)
    )
