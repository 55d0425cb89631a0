from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import LayoutError
from tonnage.plan import Batch, Layout, Model, Recipe, device_cluster, load_model, predict
from tonnage.plan.families import model_from_config
from tonnage.plan.grid import grid_of
from tonnage.plan.memory import in_flight, layer_activation_nbytes, stage_memory
from tonnage.plan.traffic import FIRST, FULLEST, LAST


def gpt(hidden: int = 12288, heads: int = 96, layers: int = 96) -> Model:
    config = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 2048,
        "vocab_size": 51200,
    }
    return model_from_config(config, name="gpt")


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_a_gpt_layer_are_those_of_korthikanti(tp: int, sp: bool) -> None:
    # arXiv 2205.05198: s b h (10 + 24/t + 5 a s / h t), and all of it over t with sequence parallel.
    model, s, b, h, a = gpt(), 2048, 2, 12288, 96
    layout = Layout(tp=tp, sp=sp and tp > 1, micro_batch=b, recipe=Recipe(attention="eager"))
    kept, _ = layer_activation_nbytes(
        model.main_layer, model, grid_of([layout], model, Batch(sequences=b, seq=s))
    )
    along = 10 / tp if layout.sp else 10
    assert float(kept[0]) == pytest.approx(s * b * h * (along + 24 / tp + 5 * a * s / (h * tp)), rel=1e-6)


def test_selective_recomputation_saves_the_scores_and_full_all_but_the_input() -> None:
    model, s, h = gpt(), 2048, 12288
    batch = Batch(sequences=1, seq=s)
    recipe = Recipe(attention="eager")

    def kept(recompute: str) -> float:
        grid = grid_of([Layout(recompute=recompute, recipe=recipe)], model, batch)  # type: ignore[arg-type]
        return float(layer_activation_nbytes(model.main_layer, model, grid)[0][0])

    assert kept("selective") == pytest.approx(34 * s * h)
    assert kept("full") == pytest.approx(2 * s * h)


@given(p=st.integers(1, 32), m=st.integers(1, 64))
def test_the_first_stage_holds_most_micro_batches_and_the_last_one(p: int, m: int) -> None:
    model = gpt(layers=96)
    grid = grid_of([Layout(pp=p)], model, Batch(sequences=m, seq=128))
    assert float(in_flight(grid, FIRST)[0]) == min(m, p)
    assert float(in_flight(grid, LAST)[0]) == 1


def test_states_of_a_70b_card_are_those_of_the_example() -> None:
    # 18 bytes x 2.139e9 parameters; 6 + 12/16 with the optimizer over 16 replicas.
    model = load_model("llama3-70b")
    batch = Batch(sequences=512, seq=8192)
    for zero, each in ((0, 18.0), (1, 6.75)):
        grid = grid_of([Layout(dp=16, tp=8, pp=4, sp=True, zero=zero)], model, batch)
        memory = stage_memory(model, grid, device_cluster("h100", 512), FULLEST)
        states = float((memory.weights + memory.gradients + memory.optimizer)[0])
        assert states == pytest.approx(each * 2.139e9, rel=1e-3)


@given(
    zero=st.sampled_from([0, 1, 2, 3]),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 2, 4]),
)
def test_no_part_is_negative_and_more_sharding_needs_no_more_states(
    zero: int, tp: int, pp: int, micro_batch: int
) -> None:
    model, batch = load_model("llama3-8b"), Batch(sequences=64, seq=4096)
    cluster = device_cluster("h100", 64)

    def states(stage: int) -> float:
        layout = Layout(dp=64 // (tp * pp), tp=tp, pp=pp, zero=stage, micro_batch=micro_batch)
        grid = grid_of([layout], model, Batch(sequences=layout.dp * micro_batch * 2, seq=batch.seq))
        memory = stage_memory(model, grid, cluster, FIRST)
        assert float(memory.activations[0]) > 0
        return float((memory.weights + memory.gradients + memory.optimizer)[0])

    assert states(zero) <= states(max(zero - 1, 0))


def test_full_tuning_of_70b_fits_eight_cards_only_with_a_paged_optimizer() -> None:
    # torchtune issues 863 and 987: Llama 2 70B on 8 x A100-80GB with paged AdamW, about 51 GB a card.
    model, cluster, batch = load_model("llama2-70b"), device_cluster("a100", 8), Batch(sequences=16, seq=4096)
    paged, whole = (
        predict(
            model,
            cluster,
            Layout(
                dp=8,
                zero=3,
                micro_batch=2,
                recompute="full",
                recipe=Recipe(optimizer=optimizer, master=master, grad_nbytes=2),  # type: ignore[arg-type]
            ),
            batch,
        )
        for optimizer, master in (("adam-paged", False), ("adam", True))
    )
    assert paged.fits
    assert paged.memory_total / 1e9 == pytest.approx(51, abs=6)
    assert not whole.fits


def test_what_does_not_fit_is_refused_with_what_would_help() -> None:
    model = load_model("llama3-70b")
    with pytest.raises(LayoutError) as caught:
        predict(
            model,
            device_cluster("h100", 8),
            Layout(tp=8, sp=True),
            Batch(sequences=8, seq=8192),
            must_fit=True,
        )
    assert "GiB on its fullest card" in caught.value.what
    assert "--recompute full" in caught.value.hint
