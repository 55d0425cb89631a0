from __future__ import annotations

from pathlib import Path
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import LayoutError
from tonnage.plan import (
    Batch,
    Layout,
    Model,
    Recipe,
    device_cluster,
    load_model,
    predict,
    read_rows,
    software,
)
from tonnage.plan.families import model_from_config
from tonnage.plan.grid import grid_of
from tonnage.plan.memory import in_flight, layer_activation_nbytes, stage_memory, worst_memory
from tonnage.plan.runs import choose, run_of
from tonnage.plan.traffic import FIRST, FULLEST, LAST

RUNS = Path(__file__).parents[1] / "data" / "published_runs.csv"


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


@pytest.mark.parametrize(
    ("recipe", "zero", "each"),
    [
        # Megatron-LM, docs on the distributed optimizer: 18 and 20 bytes, 6 + 12/d and 4 + 16/d.
        (Recipe(), 0, 18.0),
        (Recipe(grad_nbytes=2), 0, 20.0),
        (Recipe(), 1, 6 + 12 / 16),
        (Recipe(grad_nbytes=2), 1, 4 + 16 / 16),
        # DeepSpeed's BF16_Optimizer keeps gradients in 2 and in 4 bytes.
        (software("megatron-deepspeed"), 1, 8 + 12 / 16),
        # FSDP shards fp32 weights, gradients and two moments, and no 2-byte copy.
        (software("fsdp"), 3, 16 / 16),
        (Recipe(), 3, 18 / 16),
        # Frozen weights stay in 2 bytes, and have no gradient, master or state.
        (Recipe(trainable=0.01), 0, 2 + 0.01 * 16),
        (software("fsdp", trainable=0.01), 3, (2 + 0.01 * 14) / 16),
    ],
)
def test_states_are_those_of_each_software(recipe: Recipe, zero: int, each: float) -> None:
    model, batch = load_model("llama3-70b"), Batch(sequences=512, seq=8192)
    grid = grid_of([Layout(dp=16, tp=8, pp=4, sp=True, zero=zero, recipe=recipe)], model, batch)
    memory = stage_memory(model, grid, device_cluster("h100", 512), FULLEST)
    states = float((memory.weights + memory.gradients + memory.optimizer)[0])
    assert states == pytest.approx(each * 2.139e9, rel=1e-3)


def test_what_no_tensor_lives_in_is_a_share_of_what_the_allocator_holds() -> None:
    model, batch = load_model("llama3-8b"), Batch(sequences=64, seq=4096)
    for expandable, share in ((False, 0.15), (True, 0.05)):
        layout = Layout(dp=8, zero=3, recipe=Recipe(expandable=expandable))
        memory = stage_memory(model, grid_of([layout], model, batch), device_cluster("h100", 8), FIRST)
        assert float(memory.fragmentation[0]) == pytest.approx(share * float(memory.reserved[0]))
        assert float(memory.total[0]) > float(memory.reserved[0]) + 1e9


def test_published_memory_of_bloom_is_met_within_a_tenth_on_the_median_row() -> None:
    runs = [run_of(row) for row in read_rows(RUNS) if row["memory_gb_per_gpu"]]
    errors = []
    for run in runs:
        needed, _ = worst_memory(run.model, grid_of([choose(run)], run.model, run.batch), run.cluster)
        errors.append(float(needed[0]) / run.memory - 1)
    assert len(errors) == 44
    assert median(map(abs, errors)) < 0.10
    assert abs(mean(errors)) < 0.05


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
    # The maintainers' figure is what PyTorch counts as allocated: tensors alone.
    living = paged.memory_reserved - paged.memory["fragmentation"]
    assert living / 1e9 == pytest.approx(51, abs=6)
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
    assert "nearest that fits: --" in caught.value.hint or "--search" in caught.value.hint
