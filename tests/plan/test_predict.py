from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.errors import LayoutError
from tonnage.ledger import from_bytes, to_bytes
from tonnage.plan import (
    CONVENTIONS,
    Batch,
    Layout,
    convention,
    convert_mfu,
    device_cluster,
    flops_per_token,
    load_model,
    predict,
    software,
)
from tonnage.plan.document import prediction_json

MODEL = load_model("llama3-70b")
CLUSTER = device_cluster("h100", 512)
LAYOUT = Layout(dp=16, tp=8, pp=4, sp=True, zero=1, recipe=software("megatron-core", grad_nbytes=4))
BATCH = Batch(sequences=512, seq=8192)


def finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(finite(each) for each in value.values())
    if isinstance(value, list | tuple):
        return all(finite(each) for each in value)
    return not isinstance(value, float) or math.isfinite(value)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(
        ["llama3-8b", "deepseek-v2-lite", "gpt-oss-20b", "qwen3-30b-a3b", "bloom-7b1", "gemma2-9b"]
    ),
    card=st.sampled_from(["h100", "a100", "b200", "mi300x", "rtx-4090", "gb200"]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    kind=st.sampled_from(["megatron-2021", "megatron-deepspeed", "megatron-core", "fsdp"]),
    passes=st.integers(1, 3),
)
def test_no_prediction_has_a_nan_a_silent_zero_or_parts_that_do_not_add_up(
    name: str, card: str, tp: int, pp: int, cp: int, zero: int, recompute: str, kind: str, passes: int
) -> None:
    dp = 64 // (tp * pp * cp)
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        sp=tp > 1,
        zero=zero,
        recompute=recompute,
        recipe=software(kind, precision="bf16"),  # type: ignore[arg-type]
    )
    found = predict(
        load_model(name), device_cluster(card, 64), layout, Batch(sequences=dp * passes, seq=4096)
    )
    assert finite(prediction_json(found))
    assert found.seconds > 0
    assert 0 < found.mfu < 1
    assert all(value >= 0 for value in found.parts.values())
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert all(value >= 0 for value in found.memory.values())
    assert found.memory["weights"] > 0
    assert finite(found.ledger.frame.drop("label").to_dict(as_series=False))


def test_the_ledger_of_a_prediction_is_one_like_any_other() -> None:
    found = predict(MODEL, CLUSTER, LAYOUT, BATCH)
    again = from_bytes(to_bytes(found.ledger))
    assert again.frame.equals(found.ledger.frame)
    assert again.ranks == [0, 128, 384]
    assert set(again.movements.frame["group"].to_list()) == {"tp", "dp", "pp"}
    step = again.step_times()
    assert step["seconds"].to_list() == pytest.approx([found.seconds] * 3)


def test_each_group_shows_no_more_than_it_takes() -> None:
    frame = predict(MODEL, CLUSTER, LAYOUT, BATCH).ledger.movements.frame
    assert ((frame["stop"] - frame["start"]) >= frame["exposed"] - 1e-9).all()


@settings(max_examples=30, deadline=None)
@given(faster=st.floats(1.0, 16.0), pp=st.sampled_from([1, 4]), zero=st.sampled_from([1, 3]))
def test_a_faster_network_never_takes_longer(faster: float, pp: int, zero: int) -> None:
    layout = LAYOUT.replace(pp=pp, dp=512 // (8 * pp), zero=zero)
    slow = predict(MODEL, CLUSTER, layout, BATCH).seconds
    fast = predict(MODEL, CLUSTER.with_nic(CLUSTER.nic.rate * faster), layout, BATCH).seconds
    assert fast <= slow * (1 + 1e-9)


@pytest.mark.parametrize(
    "changes",
    [{"tp": 4, "dp": 32}, {"pp": 8, "dp": 8}, {"recompute": "full"}, {"sp": False}],
)
def test_what_moves_less_or_computes_more_is_seen(changes: dict[str, object]) -> None:
    base, changed = (predict(MODEL, CLUSTER, each, BATCH) for each in (LAYOUT, LAYOUT.replace(**changes)))
    assert base.seconds != changed.seconds


def test_a_layout_for_other_cards_is_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        predict(MODEL, device_cluster("h100", 256), LAYOUT, BATCH)
    assert "dp 8" in caught.value.hint


def test_a_precision_that_the_card_lacks_is_refused() -> None:
    layout = LAYOUT.replace(recipe=software("megatron-core", precision="nvfp4"))
    with pytest.raises(LayoutError) as caught:
        predict(MODEL, CLUSTER, layout, BATCH)
    assert "no nvfp4" in caught.value.what


def test_llama3_8b_has_51_and_57_gflop_a_token_by_two_conventions() -> None:
    model = load_model("llama3-8b")
    halved, whole = (
        flops_per_token(model, 8192, convention(name)) / 1e9 for name in ("megatron-bridge", "megatron")
    )
    assert halved == pytest.approx(51.5, abs=0.1)
    assert whole == pytest.approx(57.9, abs=0.1)


def test_narayanans_formula_is_the_convention_of_that_name() -> None:
    # 96 B s l h^2 (1 + s/6h + V/16lh), a token: over B s.
    model = load_model("gpt3-175b")
    s, n, h, v = 2048, 96, 12288, 51200
    ours = flops_per_token(model, s, convention("narayanan"), recompute="full")
    assert ours == pytest.approx(96 * n * h * h * (1 + s / (6 * h) + v / (16 * n * h)), rel=1e-9)


@given(
    value=st.floats(0.01, 1.0),
    there=st.sampled_from(list(CONVENTIONS)),
    back=st.sampled_from(list(CONVENTIONS)),
)
def test_a_utilisation_converted_there_and_back_is_the_same(value: float, there: str, back: str) -> None:
    model = load_model("llama3-8b")
    one = convert_mfu(value, model=model, seq=8192, source=convention(back), target=convention(there))
    assert convert_mfu(
        min(one, 1.5), model=model, seq=8192, source=convention(there), target=convention(back)
    ) == pytest.approx(value if one <= 1.5 else value * 1.5 / one)
