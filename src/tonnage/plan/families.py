"""From a Hugging Face ``config.json`` to a :class:`Model`, one small function a family.

The functions state what each family's code allocates: which matrices have a bias, how many norms a
layer has, which layers are routed. Counts are exact for the architectures of ``transformers``, and a
test builds those on the meta device to compare. Defaults of a missing key are those of the family's
configuration class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tonnage.errors import LayoutError
from tonnage.plan.model import Layer, Matrix, Model, attention, mlp, router, runs

Config = Mapping[str, Any]

LARGEST = 2**30
"""Largest size that is believed: beyond it a typing error is likelier than a model."""

DEEPEST = 10_000
"""Most layers that are believed."""


def model_from_config(config: Config, *, name: str) -> Model:
    """The model that a configuration describes.

    Args:
        config: the parsed ``config.json``; of a multimodal model, its ``text_config`` is read.
        name: how to call it in tables and errors.

    Raises:
        LayoutError: the family is unknown or no decoder, or a size is missing.
    """
    family = str(config.get("model_type", ""))
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config, family = inner, str(inner.get("model_type", family))
    if not family:
        raise LayoutError(f"{name} names no model_type", hint="give the config.json of a Hugging Face model")
    if family not in FAMILIES:
        raise LayoutError(
            f"{name} is of family {family!r}, which is not a decoder that the planner knows",
            hint=f"known families: {', '.join(sorted(FAMILIES))}; or pass the live torch module in Python",
        )
    reader = _Reader(config, name)
    model = FAMILIES[family](reader, family)
    if model.num_layers != reader.size("num_hidden_layers", "n_layer", "n_layers"):
        raise AssertionError(f"{name}: layers lost")
    return model


@dataclass(frozen=True, slots=True)
class _Reader:
    config: Config
    name: str

    def size(self, *keys: str, default: int | None = None) -> int:
        """A whole number above zero under the first key that is there."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            return self._whole(key, value, least=1)
        if default is not None:
            return default
        raise LayoutError(
            f"{self.name} lacks {keys[0]!r}", hint="give the whole config.json of a decoder, not a part of it"
        )

    def count(self, key: str) -> int:
        """A whole number that may be zero, and is where the key is missing."""
        value = self.config.get(key)
        return 0 if value is None else self._whole(key, value, least=0)

    def _whole(self, key: str, value: object, *, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            raise LayoutError(
                f"{self.name} has {key} {value!r}",
                hint=f"{key} must be a whole number of {least} or more, and at most {LARGEST:,}",
            )
        return value

    def indices(self, key: str) -> list[int]:
        """Layers named by number; none where the key is missing."""
        value = self.config.get(key) or []
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise LayoutError(f"{self.name} has {key} {value!r}", hint=f"{key} must list numbers of layers")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    @property
    def hidden(self) -> int:
        return self.size("hidden_size", "n_embd", "d_model")

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads", "n_head", "n_heads")

    @property
    def kv_heads(self) -> int:
        kv_heads = self.size("num_key_value_heads", default=self.heads)
        if self.heads % kv_heads:
            raise LayoutError(
                f"{self.name} shares {kv_heads} key heads among {self.heads} heads",
                hint="num_key_value_heads must divide num_attention_heads",
            )
        return kv_heads

    @property
    def depth(self) -> int:
        depth = self.size("num_hidden_layers", "n_layer", "n_layers")
        if depth > DEEPEST:
            raise LayoutError(f"{self.name} has {depth:,} layers", hint=f"use at most {DEEPEST:,}")
        return depth

    @property
    def head_dim(self) -> int:
        dim = self.get("head_dim")
        if dim is None:
            if self.hidden % self.heads:
                raise LayoutError(
                    f"{self.name} has {self.heads} heads on a width of {self.hidden}",
                    hint="the width must be a multiple of the heads, or name head_dim",
                )
            return self.hidden // self.heads
        return self.size("head_dim")


def _model(
    r: _Reader, family: str, layers: list[Layer], *, tied: bool, head: int, embedding: int = 0
) -> Model:
    return Model(
        name=r.name,
        family=family,
        hidden=r.hidden,
        vocab=r.size("vocab_size"),
        layers=runs(layers),
        tied=r.flag("tie_word_embeddings", tied),
        other_embedding=embedding,
        other_head=head,
        max_seq=r.size(
            "max_position_embeddings", "n_positions", "seq_length", "max_seq_len", default=1 << 20
        ),
    )


def _gqa(r: _Reader, **rest: Any) -> dict[str, Any]:
    """The attention core's fields of a layer."""
    return {
        "heads": r.heads,
        "kv_heads": r.kv_heads,
        "qk_dim": r.head_dim,
        "v_dim": r.head_dim,
        "kv_width": 2 * r.kv_heads * r.head_dim,
        **rest,
    }


def _windows(r: _Reader, depth: int) -> list[int]:
    """The sliding window of each layer, 0 where it sees everything."""
    kinds = r.get("layer_types")
    if kinds is None:
        return [0] * depth
    if not isinstance(kinds, list) or len(kinds) != depth:
        raise LayoutError(f"{r.name} has {depth} layers, and layer_types for others", hint="name one a layer")
    window = r.count("sliding_window")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _llama_like(
    r: _Reader,
    family: str,
    *,
    bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    norms: int = 2,
    qk_norm: int = 0,
    tied: bool = False,
    norm_params: int | None = None,
) -> Model:
    h, ffn = r.hidden, r.size("intermediate_size")
    width = h if norm_params is None else norm_params
    matrices = (
        *attention(
            hidden=h, heads=r.heads, kv_heads=r.kv_heads, head_dim=r.head_dim, bias=bias, out_bias=out_bias
        ),
        *mlp(hidden=h, ffn=ffn, gated=True, bias=mlp_bias),
    )
    layers = [
        Layer(
            matrices=matrices,
            vectors=norms * width + qk_norm,
            norms=norms,
            ffn=ffn,
            gated=True,
            **_gqa(r, window=window),
        )
        for window in _windows(r, r.depth)
    ]
    return _model(r, family, layers, tied=tied, head=width)


def _llama(r: _Reader, family: str) -> Model:
    bias = r.flag("attention_bias", False)
    return _llama_like(r, family, bias=bias, out_bias=bias, mlp_bias=r.flag("mlp_bias", False))


def _qwen2(r: _Reader, family: str) -> Model:
    return _llama_like(r, family, bias=True)


def _qwen3(r: _Reader, family: str) -> Model:
    bias = r.flag("attention_bias", False)
    return _llama_like(r, family, bias=bias, out_bias=bias, qk_norm=2 * r.head_dim)


def _mistral(r: _Reader, family: str) -> Model:
    return _llama_like(r, family)


def _gemma(r: _Reader, family: str) -> Model:
    bias = r.flag("attention_bias", False)
    return _llama_like(r, family, bias=bias, out_bias=bias, tied=True)


def _gemma2(r: _Reader, family: str) -> Model:
    bias = r.flag("attention_bias", False)
    return _llama_like(r, family, bias=bias, out_bias=bias, tied=True, norms=4)


def _gemma3(r: _Reader, family: str) -> Model:
    bias = r.flag("attention_bias", False)
    return _llama_like(
        r, family, bias=bias, out_bias=bias, tied=True, norms=4, qk_norm=2 * r.size("head_dim", default=256)
    )


def _phi3(r: _Reader, family: str) -> Model:
    return _llama_like(r, family)


def _olmo(r: _Reader, family: str) -> Model:
    bias = r.flag("attention_bias", False)
    return _llama_like(r, family, bias=bias, out_bias=bias, norm_params=0)


def _olmo2(r: _Reader, family: str) -> Model:
    bias = r.flag("attention_bias", False)
    qk_norm = (r.heads + r.kv_heads) * r.head_dim
    return _llama_like(r, family, bias=bias, out_bias=bias, qk_norm=qk_norm)


def _experts(r: _Reader, *, experts: int, ffn: int, bias: bool = False) -> tuple[Matrix, ...]:
    return (
        router(hidden=r.hidden, experts=experts, bias=bias),
        *mlp(hidden=r.hidden, ffn=ffn, gated=True, part="expert", bias=bias),
    )


def _mixtral(r: _Reader, family: str) -> Model:
    ffn, experts = r.size("intermediate_size"), r.size("num_local_experts", default=8)
    matrices = (
        *attention(hidden=r.hidden, heads=r.heads, kv_heads=r.kv_heads, head_dim=r.head_dim),
        *_experts(r, experts=experts, ffn=ffn),
    )
    layer = Layer(
        matrices=matrices,
        vectors=2 * r.hidden,
        experts=experts,
        top_k=r.size("num_experts_per_tok", default=2),
        expert_ffn=ffn,
        gated=True,
        **_gqa(r),
    )
    return _model(r, family, [layer] * r.depth, tied=False, head=r.hidden)


def _qwen_moe(r: _Reader, family: str) -> Model:
    h, newer = r.hidden, family == "qwen3_moe"
    bias = r.flag("attention_bias", False) if newer else r.flag("qkv_bias", True)
    core = attention(
        hidden=h,
        heads=r.heads,
        kv_heads=r.kv_heads,
        head_dim=r.head_dim,
        bias=bias,
        out_bias=bias and newer,
    )
    vectors = 2 * h + (2 * r.head_dim if newer else 0)
    experts, expert_ffn = r.size("num_experts"), r.size("moe_intermediate_size")
    shared = 0 if newer else r.size("shared_expert_intermediate_size")
    routed = _experts(r, experts=experts, ffn=expert_ffn)
    if shared:
        routed = (
            *routed,
            *mlp(hidden=h, ffn=shared, gated=True, part="shared"),
            router(hidden=h, experts=1, name="shared gate"),
        )
    moe = Layer(
        matrices=(*core, *routed),
        vectors=vectors,
        ffn=shared,
        gated=True,
        experts=experts,
        top_k=r.size("num_experts_per_tok"),
        expert_ffn=expert_ffn,
        **_gqa(r),
    )
    ffn = r.size("intermediate_size")
    dense = Layer(
        matrices=(*core, *mlp(hidden=h, ffn=ffn, gated=True)), vectors=vectors, ffn=ffn, gated=True, **_gqa(r)
    )
    sparse_step, only_dense = r.size("decoder_sparse_step", default=1), r.indices("mlp_only_layers")
    layers = [dense if i in only_dense or (i + 1) % sparse_step else moe for i in range(r.depth)]
    return _model(r, family, layers, tied=False, head=h)


def _deepseek(r: _Reader, family: str) -> Model:
    h, heads = r.hidden, r.heads
    nope, rope = r.size("qk_nope_head_dim"), r.size("qk_rope_head_dim")
    v_dim, kv_rank = r.size("v_head_dim"), r.size("kv_lora_rank")
    q_rank = r.count("q_lora_rank")
    bias = r.flag("attention_bias", False)
    qk_dim = nope + rope
    queries: tuple[Matrix, ...]
    if q_rank:
        queries = (
            Matrix(name="q down", fan_in=h, fan_out=q_rank, part="attention", split="whole", bias=bias),
            Matrix(name="q up", fan_in=q_rank, fan_out=heads * qk_dim, part="attention", split="column"),
        )
    else:
        queries = (Matrix(name="q", fan_in=h, fan_out=heads * qk_dim, part="attention", split="column"),)
    core = (
        *queries,
        Matrix(name="kv down", fan_in=h, fan_out=kv_rank + rope, part="attention", split="whole", bias=bias),
        Matrix(
            name="kv up", fan_in=kv_rank, fan_out=heads * (nope + v_dim), part="attention", split="column"
        ),
        Matrix(name="out", fan_in=heads * v_dim, fan_out=h, part="attention", split="row", bias=bias),
    )
    vectors = 2 * h + kv_rank + q_rank
    fields: dict[str, Any] = {
        "heads": heads,
        "kv_heads": heads,
        "qk_dim": qk_dim,
        "v_dim": v_dim,
        # Context parallelism exchanges keys and values after they were expanded.
        "kv_width": heads * (qk_dim + v_dim),
        "gated": True,
        "vectors": vectors,
    }
    ffn, expert_ffn = r.size("intermediate_size"), r.size("moe_intermediate_size", default=1)
    dense = Layer(matrices=(*core, *mlp(hidden=h, ffn=ffn, gated=True)), ffn=ffn, **fields)
    experts = r.count("n_routed_experts")
    if not experts:
        return _model(r, family, [dense] * r.depth, tied=False, head=h)
    shared = r.count("n_shared_experts") * expert_ffn
    moe = Layer(
        matrices=(
            *core,
            *_experts(r, experts=experts, ffn=expert_ffn),
            *(mlp(hidden=h, ffn=shared, gated=True, part="shared") if shared else ()),
        ),
        ffn=shared,
        experts=experts,
        top_k=r.size("num_experts_per_tok"),
        expert_ffn=expert_ffn,
        **fields,
    )
    first = r.count("first_k_dense_replace")
    return _model(r, family, [dense if i < first else moe for i in range(r.depth)], tied=False, head=h)


def _llama4(r: _Reader, family: str) -> Model:
    h, ffn = r.hidden, r.size("intermediate_size")
    bias = r.flag("attention_bias", False)
    core = attention(
        hidden=h, heads=r.heads, kv_heads=r.kv_heads, head_dim=r.head_dim, bias=bias, out_bias=bias
    )
    experts = r.size("num_local_experts")
    moe = Layer(
        matrices=(
            *core,
            *_experts(r, experts=experts, ffn=ffn),
            *mlp(hidden=h, ffn=ffn, gated=True, part="shared"),
        ),
        vectors=2 * h,
        ffn=ffn,
        gated=True,
        experts=experts,
        top_k=r.size("num_experts_per_tok"),
        expert_ffn=ffn,
        **_gqa(r),
    )
    wide = r.size("intermediate_size_mlp", default=ffn)
    dense = Layer(
        matrices=(*core, *mlp(hidden=h, ffn=wide, gated=True)), vectors=2 * h, ffn=wide, gated=True, **_gqa(r)
    )
    step = r.size("interleave_moe_layer_step", default=1)
    routed = r.indices("moe_layers") or list(range(step - 1, r.depth, step))
    return _model(r, family, [moe if i in routed else dense for i in range(r.depth)], tied=False, head=h)


def _gpt_oss(r: _Reader, family: str) -> Model:
    h, ffn = r.hidden, r.size("intermediate_size")
    experts = r.size("num_local_experts", "num_experts")
    bias = r.flag("attention_bias", True)
    matrices = (
        *attention(
            hidden=h, heads=r.heads, kv_heads=r.kv_heads, head_dim=r.head_dim, bias=bias, out_bias=bias
        ),
        *_experts(r, experts=experts, ffn=ffn, bias=True),
    )
    windows = _windows(r, r.depth)
    if not r.get("layer_types"):
        window = r.size("sliding_window", default=128)
        windows = [0 if i % 2 else window for i in range(r.depth)]
    layers = [
        Layer(
            matrices=matrices,
            # Each head has one learned sink beside the two norms.
            vectors=2 * h + r.heads,
            gated=True,
            experts=experts,
            top_k=r.size("num_experts_per_tok", "experts_per_token", default=4),
            expert_ffn=ffn,
            **_gqa(r, window=window),
        )
        for window in windows
    ]
    return _model(r, family, layers, tied=False, head=h)


def _plain(
    r: _Reader,
    family: str,
    *,
    ffn: int,
    bias: bool,
    norm: int,
    norms: int = 2,
    head: int | None = None,
    embedding: int = 0,
    tied: bool,
    attention_bias: bool | None = None,
    kv_heads: int | None = None,
) -> Model:
    """GPT-like layers: two-matrix MLP, learned or no positions."""
    kv = r.kv_heads if kv_heads is None else kv_heads
    with_bias = bias if attention_bias is None else attention_bias
    layer = Layer(
        matrices=(
            *attention(
                hidden=r.hidden,
                heads=r.heads,
                kv_heads=kv,
                head_dim=r.head_dim,
                bias=with_bias,
                out_bias=with_bias,
            ),
            *mlp(hidden=r.hidden, ffn=ffn, gated=False, bias=bias),
        ),
        vectors=norms * norm,
        norms=norms,
        ffn=ffn,
        **_gqa(r, kv_heads=kv, kv_width=2 * kv * r.head_dim),
    )
    return _model(
        r, family, [layer] * r.depth, tied=tied, head=norm if head is None else head, embedding=embedding
    )


def _gpt2(r: _Reader, family: str) -> Model:
    ffn = r.size("n_inner", default=4 * r.hidden)
    positions = r.size("n_positions", default=1024) * r.hidden
    return _plain(r, family, ffn=ffn, bias=True, norm=2 * r.hidden, embedding=positions, tied=True)


def _gpt_neox(r: _Reader, family: str) -> Model:
    return _plain(
        r,
        family,
        ffn=r.size("intermediate_size"),
        bias=True,
        attention_bias=r.flag("attention_bias", True),
        norm=2 * r.hidden,
        tied=False,
    )


def _bloom(r: _Reader, family: str) -> Model:
    return _plain(
        r, family, ffn=4 * r.hidden, bias=True, norm=2 * r.hidden, embedding=2 * r.hidden, tied=True
    )


def _mpt(r: _Reader, family: str) -> Model:
    ffn = r.size("expansion_ratio", default=4) * r.hidden
    return _plain(r, family, ffn=ffn, bias=False, norm=r.hidden, tied=True)


def _falcon(r: _Reader, family: str) -> Model:
    newer = r.flag("new_decoder_architecture", False)
    older = 1 if r.flag("multi_query", True) else r.heads
    kv = r.size("num_kv_heads", default=r.heads) if newer else older
    # The newer layout norms attention and MLP apart; a parallel block of the older shares one norm.
    norms = r.count("num_ln_in_parallel_attn") or (2 if newer else 0)
    if not newer:
        norms = 1 if r.flag("parallel_attn", True) else 2
    bias = r.flag("bias", False)
    ffn = r.size("ffn_hidden_size", default=4 * r.hidden)
    return _plain(r, family, ffn=ffn, bias=bias, norm=2 * r.hidden, norms=norms, tied=True, kv_heads=kv)


def _phi(r: _Reader, family: str) -> Model:
    return _plain(
        r,
        family,
        ffn=r.size("intermediate_size"),
        bias=True,
        norm=2 * r.hidden,
        norms=1,
        # Phi's head has a bias of its own.
        head=2 * r.hidden + r.size("vocab_size"),
        tied=False,
    )


FAMILIES: dict[str, Callable[[_Reader, str], Model]] = {
    "bloom": _bloom,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "llama4_text": _llama4,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "mpt": _mpt,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "phi": _phi,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen_moe,
}
"""``model_type`` of each family to the function that reads it."""
