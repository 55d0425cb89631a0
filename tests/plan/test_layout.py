from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import LayoutError
from tonnage.plan.layout import Batch, Layout, Recipe, check, chunk_layers, nearest_divisor
from tonnage.plan.load import preset


@given(layers=st.integers(1, 200), chunks=st.integers(1, 64))
def test_every_layer_lands_in_one_chunk_and_chunks_differ_little(layers: int, chunks: int) -> None:
    cut = chunk_layers(layers, chunks)
    assert sum(cut) == layers
    assert len(cut) == chunks
    assert max(cut) - min(cut) <= 1


def test_uneven_stages_are_cut_as_real_runs_cut_them() -> None:
    assert chunk_layers(126, 64) == (1, *(2,) * 62, 1)
    assert chunk_layers(70, 12) == (5, *(6,) * 10, 5)
    assert chunk_layers(61, 4) == (15, 15, 16, 15)


@given(of=st.integers(1, 5000), wanted=st.integers(1, 5000))
def test_the_nearest_divisor_divides_and_none_is_nearer(of: int, wanted: int) -> None:
    found = nearest_divisor(of, wanted)
    assert of % found == 0
    assert all(abs(d - wanted) >= abs(found - wanted) for d in range(1, of + 1) if of % d == 0)


@pytest.mark.parametrize(
    ("layout", "cards", "said", "do"),
    [
        (Layout(dp=16, tp=8, pp=4), 256, "512 ranks, but the cluster has 256 cards", "dp 8"),
        (Layout(dp=1, tp=3, pp=1), 8, "but the cluster has 8 cards", "dp"),
        (Layout(dp=1, tp=3), 3, "does not divide the 64 heads", "tp 2"),
        (Layout(dp=1, pp=128), 128, "for the 80 layers", "pp 80"),
        (Layout(dp=4, ep=4), 4, "no experts", "ep 1"),
        (Layout(cp=3), 3, "does not divide the sequence", "cp 2"),
        (Layout(pp=2, stages=(40, 41)), 2, "hold 81 layers", "as many"),
        (Layout(dp=7), 7, "no multiple of dp 7", "504 or 511"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_choice(
    layout: Layout, cards: int, said: str, do: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        check(layout, preset("llama3-70b"), Batch(sequences=508, seq=8192), num_devices=cards)
    assert said in caught.value.what
    assert do in caught.value.hint


@pytest.mark.parametrize(
    "make",
    [
        lambda: Layout(tp=0),
        lambda: Layout(zero=4),
        lambda: Layout(virtual=2),
        lambda: Layout(dp=4, ep=3),
        lambda: Layout(dp=8, shard=3),
        lambda: Layout(recompute="some"),  # type: ignore[arg-type]
        lambda: Recipe(compress="zip"),
        lambda: Recipe(optimizer="adamm"),  # type: ignore[arg-type]
        lambda: Recipe(keep=0.0),
        lambda: Recipe(trainable=1.5),
        lambda: Recipe(local_steps=0),
        lambda: Batch(sequences=0, seq=1),
    ],
)
def test_an_impossible_value_never_comes_into_being(make: object) -> None:
    with pytest.raises(LayoutError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.hint
