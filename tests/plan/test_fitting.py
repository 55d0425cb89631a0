from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.errors import LayoutError
from tonnage.plan import Batch, Layout, changes_text, device_cluster, load_model, nearest_fit, predict


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["llama3-8b", "llama3-70b", "mixtral-8x7b", "bloom-176b"]),
    cards=st.sampled_from([16, 64, 256]),
    micro_batch=st.sampled_from([1, 2, 8]),
    zero=st.sampled_from([0, 1, 2]),
)
def test_what_is_said_to_fit_does(name: str, cards: int, micro_batch: int, zero: int) -> None:
    model, cluster, batch = load_model(name), device_cluster("h100", cards), Batch(sequences=2048, seq=4096)
    layout = Layout(dp=cards, zero=zero, micro_batch=micro_batch)
    near = nearest_fit(model, cluster, layout, batch)
    if near is not None:
        assert predict(model, cluster, near, batch).fits
        assert near.num_ranks == cards


def test_a_layout_that_fits_is_its_own_nearest() -> None:
    layout = Layout(dp=8, zero=3)
    batch = Batch(sequences=64, seq=4096)
    assert nearest_fit(load_model("llama3-8b"), device_cluster("h100", 8), layout, batch) == layout


def test_experts_that_would_no_longer_divide_the_ranks_are_passed_over() -> None:
    layout = Layout(dp=64, pp=4, ep=64, virtual=4)
    batch = Batch(sequences=4096, seq=4096)
    model, cluster = load_model("deepseek-v3"), device_cluster("gb200", 256)
    near = nearest_fit(model, cluster, layout, batch)
    assert near is not None
    assert predict(model, cluster, near, batch).fits


def test_one_change_is_nearer_than_two() -> None:
    model, cluster, batch = load_model("llama3-8b"), device_cluster("h100", 8), Batch(sequences=64, seq=4096)
    near = nearest_fit(model, cluster, Layout(dp=8), batch)
    assert near is not None
    assert changes_text(Layout(dp=8), near) == "--zero 3"


def test_what_fits_nowhere_near_is_said_to() -> None:
    model, cluster, batch = (
        load_model("llama3.1-405b"),
        device_cluster("h100", 8),
        Batch(sequences=64, seq=4096),
    )
    assert nearest_fit(model, cluster, Layout(dp=8, zero=3), batch) is None
    with pytest.raises(LayoutError) as caught:
        predict(model, cluster, Layout(dp=8, zero=3), batch, must_fit=True)
    assert "more cards" in caught.value.hint
