"""Interval arithmetic against a raster: times are whole numbers, and a set is the cells it covers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tonnage.ledger import Intervals, difference, exposed, intersection, intervals, length, overlap, union

CELLS = 24

# Ends in either order, touching, nested, empty and repeated ones: whatever a broken trace may hold.
sets = st.lists(st.tuples(st.integers(0, CELLS), st.integers(0, CELLS)), max_size=12).map(
    lambda pairs: np.array(pairs, np.float64).reshape(-1, 2)
)


def raster(a: Intervals) -> set[int]:
    return {cell for start, stop in a for cell in range(int(start), int(stop))}


def assert_normal(a: Intervals) -> None:
    assert a.dtype == np.float64
    assert a.ndim == 2
    assert (a[:, 0] < a[:, 1]).all()
    assert (a[1:, 0] > a[:-1, 1]).all(), "two stretches touch, overlap or are out of order"


@given(sets, sets)
def test_set_operations_cover_the_cells_that_the_raster_does(a: Intervals, b: Intervals) -> None:
    for result, wanted in (
        (union(a, b), raster(a) | raster(b)),
        (union(a), raster(a)),
        (intersection(a, b), raster(a) & raster(b)),
        (difference(a, b), raster(a) - raster(b)),
    ):
        assert_normal(result)
        assert raster(result) == wanted


@given(sets, sets)
def test_lengths_count_the_cells_that_the_raster_does(a: Intervals, b: Intervals) -> None:
    assert length(a) == len(raster(a))
    assert overlap(a, b) == len(raster(a) & raster(b))
    assert exposed(a, b) == len(raster(a) - raster(b))


@given(sets, sets)
def test_a_movement_is_either_overlapped_or_exposed(a: Intervals, b: Intervals) -> None:
    assert overlap(a, b) + exposed(a, b) == length(a)


@given(st.lists(sets, max_size=4))
def test_a_union_takes_any_number_of_sets(many: list[Intervals]) -> None:
    assert raster(union(*many)) == set().union(*map(raster, many))


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), max_size=20), st.randoms())
def test_the_order_of_the_stretches_does_not_matter(pairs: list[tuple[float, float]], random: object) -> None:
    shuffled = list(pairs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    as_set = [np.array(each, np.float64).reshape(-1, 2) for each in (pairs, shuffled)]
    assert np.array_equal(union(as_set[0]), union(as_set[1]))


@given(sets)
def test_no_operation_writes_into_its_arguments(a: Intervals) -> None:
    before = a.copy()
    union(a), intersection(a, a), difference(a, a), length(a)
    assert np.array_equal(a, before)


def test_a_stretch_without_a_time_is_left_out() -> None:
    nan = float("nan")
    assert intervals([0.0, nan, 2.0, 5.0], [1.0, 2.0, nan, 7.0]).tolist() == [[0.0, 1.0], [5.0, 7.0]]
    assert length(np.array([[nan, 3.0], [1.0, 2.0], [0.0, nan]])) == 1.0


def test_a_transfer_half_under_the_backward_pass_is_half_exposed() -> None:
    backward, transfer = intervals([0.0], [10.0]), intervals([8.0], [12.0])
    assert overlap(transfer, backward) == exposed(transfer, backward) == 2.0
