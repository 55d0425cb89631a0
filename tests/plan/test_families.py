"""Parameter counts against the models that ``transformers`` builds, on the meta device."""

from __future__ import annotations

import warnings

import pytest

from tonnage.errors import LayoutError
from tonnage.plan.families import FAMILIES, model_from_config
from tonnage.plan.load import load_model, preset, presets

# Smaller than real, with every size different, so that a mixed-up dimension shows.
_DENSE = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 333,
    "pad_token_id": 0,
}
_MLA = {
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "kv_lora_rank": 28,
    "q_lora_rank": 44,
    "moe_intermediate_size": 36,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "head_dim": 24}
SMALL: dict[str, dict[str, object]] = {
    "llama": {**_DENSE, "head_dim": 24},
    "llama with biases": {**_DENSE, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama tied": {**_DENSE, "model_type": "llama", "tie_word_embeddings": True},
    "llama4_text": {
        **_DENSE,
        "head_dim": 24,
        "intermediate_size_mlp": 200,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
    },
    "qwen2": {**_DENSE},
    "qwen3": {**_DENSE, "head_dim": 24},
    "qwen2_moe": {**_DENSE, **_MOE, "shared_expert_intermediate_size": 72},
    "qwen3_moe": {**_DENSE, **_MOE, "mlp_only_layers": [1]},
    "mistral": {**_DENSE},
    "mixtral": {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_DENSE, **_MLA, "num_key_value_heads": 6},
    "deepseek_v2 without query rank": {
        **_DENSE,
        **_MLA,
        "model_type": "deepseek_v2",
        "num_key_value_heads": 6,
        "q_lora_rank": None,
    },
    "deepseek_v3": {**_DENSE, **_MLA, "num_key_value_heads": 6},
    "gpt2": {"n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 64, "vocab_size": 333},
    "gpt_neox": {k: v for k, v in _DENSE.items() if k != "num_key_value_heads"},
    "bloom": {"hidden_size": 96, "n_layer": 3, "n_head": 6, "vocab_size": 333},
    "mpt": {"d_model": 96, "n_layers": 3, "n_heads": 6, "vocab_size": 333},
    "falcon": {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "vocab_size": 333,
        "multi_query": True,
    },
    "falcon newer": {
        "model_type": "falcon",
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "vocab_size": 333,
    },
    "gemma": {**_DENSE, "head_dim": 24},
    "gemma2": {**_DENSE, "head_dim": 24},
    "gemma3_text": {**_DENSE, "head_dim": 24},
    "phi": {**_DENSE, "num_key_value_heads": 6},
    "phi3": {**_DENSE},
    "olmo": {**_DENSE},
    "olmo2": {**_DENSE},
    "gpt_oss": {**_DENSE, "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
}
_SLIDING = {"layer_types": ["sliding_attention"] * 3}
BIG = ("llama3-70b", "deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b", "bloom-176b", "mixtral-8x22b")


def _allocated(config: dict[str, object]) -> int:
    """Parameters that ``transformers`` allocates for a configuration."""
    torch = pytest.importorskip("torch", reason="torch is needed to build the peers")
    transformers = pytest.importorskip("transformers", reason="transformers holds the peers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = transformers.AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(built)
        model.tie_weights()
        return sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize("case", SMALL)
def test_a_family_has_the_parameters_that_transformers_allocates(case: str) -> None:
    config = {"model_type": case, **SMALL[case]}
    assert model_from_config(config, name=case).params == _allocated(config)


@pytest.mark.parametrize("name", BIG)
def test_a_well_known_model_has_the_parameters_that_transformers_allocates(name: str) -> None:
    assert preset(name).params == _allocated(presets()[name])


def test_every_family_is_compared_with_transformers() -> None:
    compared = {str(config.get("model_type", case)) for case, config in SMALL.items()}
    assert compared == set(FAMILIES)


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads(name: str) -> None:
    model = load_model(name)
    assert model.params > 1e8
    assert 0 < model.active_params <= model.params


def test_llama3_70b_has_70_554_million_parameters() -> None:
    model = preset("llama3-70b")
    assert model.params == 70_553_706_496
    assert model.main_layer.params == 855_654_400


def test_a_name_is_found_however_it_is_spelled() -> None:
    assert preset("Llama-3_70B").params == preset("llama3-70b").params


def test_a_wrong_name_gets_the_nearest_one() -> None:
    with pytest.raises(LayoutError) as caught:
        preset("lama3-70b")
    assert "llama3-70b" in caught.value.hint


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert", "hidden_size": 768}, "not a decoder"),
        ({"hidden_size": 768}, "model_type"),
        ({"model_type": "llama", "hidden_size": 64}, "lacks"),
        ({"model_type": "llama", **SMALL["llama"], "num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"model_type": "llama", **SMALL["llama"], "vocab_size": "many"}, "vocab_size 'many'"),
        ({"model_type": "llama", **SMALL["qwen2"], "num_attention_heads": 7}, "7 heads"),
        ({"model_type": "llama", **SMALL["llama"], "hidden_size": 10**30}, "hidden_size 1000"),
        ({"model_type": "llama", **SMALL["llama"], "hidden_size": float("nan")}, "hidden_size nan"),
        ({"model_type": "llama", **SMALL["llama"], "num_hidden_layers": 10**9}, "1,000,000,000 layers"),
        ({"model_type": "llama", **SMALL["llama"], "num_key_value_heads": 4}, "4 key heads among 6"),
        ({"model_type": "llama", **SMALL["llama"], "layer_types": ["x"]}, "layer_types"),
        ({"model_type": "mistral", **SMALL["mistral"], **_SLIDING, "sliding_window": -5}, "window -5"),
        ({"model_type": "mixtral", **SMALL["mixtral"], "num_experts_per_tok": 5}, "5 of 4 experts"),
        ({"model_type": "mpt", **SMALL["mpt"], "expansion_ratio": "a"}, "expansion_ratio 'a'"),
        ({"model_type": "qwen3_moe", **SMALL["qwen3_moe"], "mlp_only_layers": 1}, "mlp_only_layers 1"),
        ({"model_type": "deepseek_v3", **SMALL["deepseek_v3"], "n_shared_experts": -1}, "experts -1"),
    ],
)
def test_a_bad_configuration_is_refused_in_one_sentence(config: dict[str, object], said: str) -> None:
    with pytest.raises(LayoutError) as caught:
        model_from_config(config, name="config.json")
    assert said in caught.value.what
    assert caught.value.hint


def test_a_live_module_is_counted_as_it_is() -> None:
    torch = pytest.importorskip("torch", reason="a live module needs torch")
    nn = torch.nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 16)
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(5)]
            )
            self.norm = nn.LayerNorm(16)
            self.head = nn.Linear(16, 100, bias=False)

    net = Net()
    model = load_model(net)
    assert model.params == sum(value.numel() for value in net.parameters())
    assert model.num_layers == 5
    assert [m.fan_out for m in model.main_layer.matrices] == [64, 16]
