"""What the two pictures show: the right step, the right stretch, few enough rows and no byte lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.ledger import STILL_KINDS, Ledger, length
from tonnage.report.pieces import MOST_PIECES, pieces
from tonnage.report.run import Run, weigh
from tonnage.report.timeline import MOST_RANKS, median_step, timeline


def moving(rows: list[tuple[str, float, float]], **more: Any) -> Run:
    return weigh(
        Ledger.from_rows(
            [
                {
                    "step": 0,
                    "kind": "gradient",
                    "op": op,
                    "start": a,
                    "stop": b,
                    "nbytes": 8,
                    "wire_nbytes": 8,
                    **more,
                }
                for op, a, b in rows
            ]
        ),
        "a",
    )


def test_zero_is_the_start_of_the_step_of_median_length(make: Callable[..., Ledger]) -> None:
    run = weigh(make("tonnage"), "a")
    drawn = timeline(run)
    assert drawn is not None
    assert drawn.step == median_step(run)
    assert [number for number, _, _ in drawn.steps] == [drawn.step - 1, drawn.step, drawn.step + 1]
    assert {number: start for number, start, _ in drawn.steps}[drawn.step] == 0
    assert run.step == pytest.approx(drawn.steps[1][2] - drawn.steps[1][1], rel=0.02)


def test_bytes_that_arrive_in_the_next_step_are_in_its_picture(make: Callable[..., Ledger]) -> None:
    drawn = timeline(weigh(make("tonnage"), "a"))
    assert drawn is not None
    late = drawn.rows.filter(
        (pl.col("op") == "all-gather") & (pl.col("step") == drawn.step - 1) & (pl.col("stop") > 0)
    )
    assert late.height > 0


def test_what_is_bare_is_what_no_compute_runs_beside(make: Callable[..., Ledger]) -> None:
    run = weigh(make("naive"), "a")
    drawn = timeline(run)
    assert drawn is not None
    assert length(drawn.bare[0]) == pytest.approx(3 * run.spent.bare, rel=0.01)


def test_ops_share_a_lane_unless_they_run_at_once() -> None:
    alone = timeline(moving([("all-gather", 0, 1), ("reduce-scatter", 1, 2)]))
    at_once = timeline(moving([("all-gather", 0, 1), ("reduce-scatter", 0.5, 2)]))
    assert alone is not None
    assert at_once is not None
    assert alone.ops == ()
    assert at_once.ops == ("all-gather", "reduce-scatter")


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), min_size=1, max_size=30))
def test_rows_on_one_level_overlap_only_where_all_levels_are_taken(spans: list[tuple[float, float]]) -> None:
    drawn = timeline(moving([("send", start, start + long) for start, long in spans]))
    assert drawn is not None
    for level in (0, 1, 2):
        own = drawn.rows.filter(pl.col("level") == level).sort("start")
        for stop, start in zip(own["stop"][:-1], own["start"][1:], strict=True):
            if stop > start + 1e-6:
                at_once = drawn.rows.filter(
                    (pl.col("start") <= start + 1e-9) & (pl.col("stop") > start + 1e-9)
                )
                assert at_once.height > 3


@settings(max_examples=50)
@given(st.integers(1, 400), st.integers(20, 100))
def test_merged_rows_keep_every_byte_and_the_budget(num: int, budget: int) -> None:
    run = moving([("send", 0.01 * n, 0.01 * n + 0.005) for n in range(num)])
    drawn = timeline(run, budget=budget)
    assert drawn is not None
    assert drawn.rows.height <= budget + 1
    assert drawn.rows["merged"].sum() == num
    assert drawn.rows["nbytes"].sum() == 8 * num


def test_of_many_ranks_the_first_are_drawn_and_the_one_behind() -> None:
    rows = [
        {
            "rank": rank,
            "step": 0,
            "kind": "compute",
            "op": "forward",
            "start": 0.0,
            "stop": 2.0 if rank == 40 else 1.0,
        }
        for rank in range(64)
    ]
    drawn = timeline(weigh(Ledger.from_rows(rows), "a"))
    assert drawn is not None
    assert drawn.ranks == (*range(MOST_RANKS - 1), 40)


def test_totals_without_times_make_no_timeline_but_pieces() -> None:
    nan = float("nan")
    run = moving([("all-reduce", nan, nan)], calls=4)
    assert timeline(run) is None
    cut = pieces(run)
    assert cut is not None
    assert (cut.num_calls, cut.rows["nbytes"].to_list()) == (4, [2, 2, 2, 2])


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 10**6)), min_size=1, max_size=20))
def test_pieces_are_few_and_stand_for_every_call(rows: list[tuple[int, int]]) -> None:
    made = [
        {"step": 0, "kind": "gradient", "op": "send", "calls": calls, "nbytes": calls * n}
        for calls, n in rows
    ]
    cut = pieces(weigh(Ledger.from_rows(made), "a"))
    assert cut is not None
    assert cut.rows.height <= MOST_PIECES
    assert cut.rows["calls"].sum() == cut.num_calls == sum(calls for calls, _ in rows)
    assert cut.rows["nbytes"].sum() == sum(calls * n for calls, n in rows)


def test_the_pieces_of_the_three_ways_put_the_same_bytes_on_the_wire(make: Callable[..., Ledger]) -> None:
    cuts = [pieces(weigh(make(name), name)) for name in ("naive", "ddp", "tonnage")]
    assert [cut.num_calls for cut in cuts if cut] == [52, 2, 30]
    totals = [cut.rows["wire_nbytes"].sum() for cut in cuts if cut]
    assert max(totals) - min(totals) < 100


def test_still_rows_are_no_pieces(make: Callable[..., Ledger]) -> None:
    still = make("ddp").filter(pl.col("kind").is_in(STILL_KINDS))
    assert pieces(weigh(still, "a")) is None


def test_a_transfer_that_began_before_the_picture_is_in_it() -> None:
    rows = [
        {"step": 0, "kind": "step", "op": "step", "start": 1.0, "stop": 2.0},
        {"step": 0, "kind": "parameter", "op": "all-gather", "start": 0.5, "stop": 1.5, "nbytes": 8},
        {"step": 0, "kind": "parameter", "op": "all-gather", "start": 2.5, "stop": 2.6, "nbytes": 8},
    ]
    drawn = timeline(weigh(Ledger.from_rows(rows), "a"))
    assert drawn is not None
    assert drawn.rows["start"].to_list() == [-0.5]


def test_a_neighbour_that_does_not_follow_at_once_is_left_out() -> None:
    rows = [
        {"step": number, "kind": kind, "op": op, "start": start, "stop": start + 1.0}
        for number, start in enumerate([0.0, 1.0, 50.0])
        for kind, op in (("step", "step"), ("compute", "forward"))
    ]
    drawn = timeline(weigh(Ledger.from_rows(rows), "a"))
    assert drawn is not None
    assert [number for number, _, _ in drawn.steps] == [0, 1]
    assert drawn.rows.height == 2
