r"""A decoder as the planner sees it: its matrices, layer by layer, and what else has parameters.

A model is a run of layers between an embedding and a head. A layer is a list of matrices, some
vectors (norm weights), and an attention core without parameters. All that the planner needs follows:
parameters (exact), FLOP, bytes of activations, and how tensor parallelism cuts each matrix.

Letters: ``h`` hidden, ``V`` vocabulary, ``E`` experts, ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tonnage.errors import LayoutError

Split = Literal["column", "row", "whole"]
Part = Literal["attention", "mlp", "expert", "shared", "router"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A weight of ``(fan_in, fan_out)``, and how tensor parallelism cuts it.

    Attributes:
        name: as people say it: ``qkv``, ``up``.
        fan_in: elements of a token that go in.
        fan_out: elements that come out.
        part: where it stands in the layer.
        split: cut along its outputs (``column``), its inputs (``row``) or copied (``whole``).
        bias: whether it adds a bias of ``fan_out``.
    """

    name: str
    fan_in: int
    fan_out: int
    part: Part
    split: Split
    bias: bool = False

    @property
    def params(self) -> int:
        """Weights and bias of one copy."""
        return self.fan_in * self.fan_out + (self.fan_out if self.bias else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer.

    Attributes:
        matrices: every matrix once; an ``expert`` one stands for ``experts`` copies.
        vectors: parameters in no matrix (norms, sinks), copied on every tensor-parallel rank.
        heads: query heads; 0 for a layer without attention.
        kv_heads: key and value heads as stored and sent.
        qk_dim: elements of a query or key head.
        v_dim: elements of a value head.
        kv_width: elements of a token's key and value together, as context parallelism sends them.
        window: tokens that a query sees at most; 0 for all before it.
        norms: norm operations over the hidden width.
        ffn: width of the inner activation of the dense or shared MLP; 0 without one.
        gated: whether the MLP multiplies two branches (SwiGLU) or has one (GELU).
        experts: routed experts; 0 in a dense layer.
        top_k: experts that each token is sent to.
        expert_ffn: inner width of one expert.
    """

    matrices: tuple[Matrix, ...]
    vectors: int = 0
    heads: int = 0
    kv_heads: int = 0
    qk_dim: int = 0
    v_dim: int = 0
    kv_width: int = 0
    window: int = 0
    norms: int = 2
    ffn: int = 0
    gated: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0

    @property
    def dense_params(self) -> int:
        """Parameters outside the routed experts."""
        return self.vectors + sum(m.params for m in self.matrices if m.part != "expert")

    @property
    def expert_params(self) -> int:
        """Parameters of all routed experts together."""
        return self.experts * sum(m.params for m in self.matrices if m.part == "expert")

    @property
    def params(self) -> int:
        """All parameters of the layer."""
        return self.dense_params + self.expert_params

    @property
    def active_params(self) -> int:
        """Parameters that one token meets."""
        return self.dense_params + self.top_k * sum(m.params for m in self.matrices if m.part == "expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder: embedding, layers, head.

    Attributes:
        name: preset, path or class name.
        family: the configuration's ``model_type``.
        hidden: width of the residual stream.
        vocab: rows of the embedding.
        layers: runs of equal layers in order, with how many of each.
        tied: whether the head uses the embedding's matrix.
        other_embedding: parameters beside the token embedding (positions, an embedding norm).
        other_head: parameters beside the head's matrix (final norm, bias).
        max_seq: longest sequence the configuration names; 0 if none.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    layers: tuple[tuple[Layer, int], ...]
    tied: bool = False
    other_embedding: int = 0
    other_head: int = 0
    max_seq: int = 0
    extra: dict[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.hidden < 1 or self.vocab < 1:
            raise LayoutError(
                f"{self.name} has {self.num_layers} layers of width {self.hidden} and {self.vocab} words",
                hint="give a decoder's config.json, with all three at 1 or more",
            )
        for layer, _ in self.layers:
            if layer.top_k > layer.experts:
                raise LayoutError(
                    f"{self.name} sends a token to {layer.top_k} of {layer.experts} experts",
                    hint=f"use at most {layer.experts}",
                )

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return sum(count for _, count in self.layers)

    @property
    def embedding_params(self) -> int:
        """The token embedding and what belongs to it."""
        return self.vocab * self.hidden + self.other_embedding

    @property
    def head_params(self) -> int:
        """The head's own parameters: its matrix is the embedding's when tied."""
        return (0 if self.tied else self.vocab * self.hidden) + self.other_head

    @property
    def params(self) -> int:
        """All parameters, a tied matrix once."""
        inside = sum(layer.params * count for layer, count in self.layers)
        return inside + self.embedding_params + self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token meets, embedding and head included."""
        inside = sum(layer.active_params * count for layer, count in self.layers)
        return inside + self.embedding_params + self.head_params

    @property
    def experts(self) -> int:
        """Routed experts a layer, the largest number met; 0 for a dense model."""
        return max(layer.experts for layer, _ in self.layers)

    @property
    def main_layer(self) -> Layer:
        """The kind of layer that most of the model consists of."""
        return max(self.layers, key=lambda run: run[1] * run[0].params)[0]

    def each_layer(self) -> Iterator[Layer]:
        """The layers one by one, in order."""
        for layer, count in self.layers:
            for _ in range(count):
                yield layer


def runs(layers: list[Layer]) -> tuple[tuple[Layer, int], ...]:
    """Neighbouring equal layers joined into runs."""
    joined: list[tuple[Layer, int]] = []
    for layer in layers:
        if joined and joined[-1][0] == layer:
            joined[-1] = (layer, joined[-1][1] + 1)
        else:
            joined.append((layer, 1))
    return tuple(joined)


def attention(
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bias: bool = False,
    out_bias: bool = False,
) -> tuple[Matrix, Matrix]:
    """The matrices of grouped-query attention: queries, keys and values as one, and the output."""
    width = (heads + 2 * kv_heads) * head_dim
    return (
        Matrix(name="qkv", fan_in=hidden, fan_out=width, part="attention", split="column", bias=bias),
        Matrix(
            name="out", fan_in=heads * head_dim, fan_out=hidden, part="attention", split="row", bias=out_bias
        ),
    )


def mlp(
    *,
    hidden: int,
    ffn: int,
    gated: bool,
    bias: bool = False,
    part: Part = "mlp",
    down_bias: bool | None = None,
) -> tuple[Matrix, ...]:
    """The matrices of an MLP: gate and up as one where gated, and down."""
    name = "gate_up" if gated else "up"
    width = 2 * ffn if gated else ffn
    return (
        Matrix(name=name, fan_in=hidden, fan_out=width, part=part, split="column", bias=bias),
        Matrix(
            name="down",
            fan_in=ffn,
            fan_out=hidden,
            part=part,
            split="row",
            bias=bias if down_bias is None else down_bias,
        ),
    )


def router(*, hidden: int, experts: int, bias: bool = False, name: str = "router") -> Matrix:
    """The matrix that scores each expert for a token."""
    return Matrix(name=name, fan_in=hidden, fan_out=experts, part="router", split="whole", bias=bias)
