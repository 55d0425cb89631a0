from __future__ import annotations

import math
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import LedgerError
from tonnage.ledger import COLUMNS, KINDS, LINKS, OPS, STILL_KINDS, Ledger

Row = dict[str, Any]
nan = float("nan")

rows = st.lists(
    st.fixed_dictionaries(
        {
            "rank": st.integers(0, 3),
            "step": st.integers(-1, 3),
            "kind": st.sampled_from(KINDS),
            "op": st.sampled_from(OPS),
            "link": st.sampled_from(LINKS),
            "calls": st.integers(1, 9),
            "nbytes": st.integers(0, 2**40),
            "wire_nbytes": st.integers(0, 2**40),
            "start": st.integers(0, 50).map(float) | st.just(nan),
            "stop": st.integers(50, 99).map(float) | st.just(nan),
            "exposed": st.integers(0, 9).map(float),
        }
    ),
    max_size=20,
)
by_columns = st.lists(st.sampled_from(["kind", "op", "link", "rank", "step"]), unique=True)


def moving(content: list[Row]) -> list[Row]:
    return [row for row in content if row["kind"] not in STILL_KINDS]


@given(rows, by_columns)
def test_a_summary_adds_up_to_the_columns(content: list[Row], by: list[str]) -> None:
    summary = Ledger.from_rows(content).summary(by)
    for name in ("calls", "nbytes", "wire_nbytes", "exposed"):
        assert summary[name].sum() == sum(row[name] for row in moving(content))
    spans = [row["stop"] - row["start"] for row in moving(content)]
    assert summary["seconds"].sum() == sum(span for span in spans if not math.isnan(span))


@given(rows, by_columns.filter(bool))
def test_a_summary_has_one_row_for_each_combination(content: list[Row], by: list[str]) -> None:
    found = Ledger.from_rows(content).summary(by).select(by).rows()
    assert len(found) == len(set(found))
    assert set(found) == {tuple(row[name] for name in by) for row in moving(content)}


@given(rows, st.sampled_from(KINDS), st.sets(st.integers(0, 3)))
def test_filter_keeps_the_rows_that_meet_every_condition(
    content: list[Row], kind: str, ranks: set[int]
) -> None:
    kept = Ledger.from_rows(content, {"run": "x"}).filter(pl.col("calls") > 4, kind=kind, rank=ranks)
    wanted = [row for row in content if row["kind"] == kind and row["rank"] in ranks and row["calls"] > 4]
    assert [row["nbytes"] for row in kept] == [row["nbytes"] for row in wanted]
    assert kept.facts == {"run": "x"}


@given(rows)
def test_a_row_without_a_value_has_the_default(content: list[Row]) -> None:
    short = Ledger.from_rows([{"kind": row["kind"], "op": row["op"]} for row in content])
    assert list(short.frame.schema.items()) == list(COLUMNS.items())
    for row in short:
        assert (row["rank"], row["step"], row["calls"], row["nbytes"]) == (0, -1, 1, 0)
        assert math.isnan(row["start"])


@given(st.lists(rows, max_size=4))
def test_gather_keeps_every_row_in_order_of_rank_and_time(parts: list[list[Row]]) -> None:
    gathered = Ledger.gather([Ledger.from_rows(part) for part in parts])
    everything = [row for part in parts for row in part]
    # Python's sort is stable, too: rows alike in rank and time stay in the order they were given.
    everything.sort(key=lambda row: (row["rank"], math.inf if math.isnan(row["start"]) else row["start"]))
    assert [(row["rank"], row["nbytes"]) for row in gathered] == [
        (row["rank"], row["nbytes"]) for row in everything
    ]


def test_gather_takes_the_first_ledger_s_facts_and_the_given_ones_before_all() -> None:
    parts = [Ledger.empty({"run": "a"}), Ledger.empty({"run": "b", "world_size": 2})]
    assert Ledger.gather(parts).facts == {"run": "a", "world_size": 2}
    assert Ledger.gather(parts, {"run": "c"}).facts == {"run": "c", "world_size": 2}
    assert Ledger.gather([], {"run": "c"}).facts == {"run": "c"}


@given(rows)
def test_step_times_are_the_cells_of_a_raster(content: list[Row]) -> None:
    ledger = Ledger.from_rows(content)
    times = ledger.step_times()
    pairs = {(row["rank"], row["step"]) for row in content if row["kind"] == "step" and row["step"] >= 0}
    assert times.select("rank", "step").rows() == sorted(pairs)
    for found in times.iter_rows(named=True):
        mine = [row for row in content if (row["rank"], row["step"]) == (found["rank"], found["step"])]
        steps = covered(row for row in mine if row["kind"] == "step")
        compute = covered(row for row in mine if row["kind"] == "compute")
        moved = covered(row for row in moving(mine))
        assert found["compute"] == len(compute)
        assert found["moving"] == len(moved)
        assert found["overlapped"] == len(compute & moved)
        assert found["seconds"] == len(steps) if steps else math.isnan(found["seconds"])
        assert found["wire_nbytes"] == sum(row["wire_nbytes"] for row in mine)


def covered(content: Any) -> set[int]:
    timed = [row for row in content if not math.isnan(row["start"] + row["stop"])]
    return {cell for row in timed for cell in range(int(row["start"]), int(row["stop"]))}


GOOD: Row = {"kind": "gradient", "op": "send"}


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "gradient"},
        {"op": "send"},
        {**GOOD, "kind": None},
        {**GOOD, "nbytes": None},
        {**GOOD, "nbyte": 3},
        {**GOOD, "rank": 2**31},
        {**GOOD, "nbytes": 2**63},
        {**GOOD, "rank": "first"},
        {**GOOD, "label": "broken \ud800 text"},
        {**GOOD, "nbytes": [1]},
    ],
)
def test_a_row_that_does_not_fit_is_refused(row: Row) -> None:
    with pytest.raises(LedgerError):
        Ledger.from_rows([GOOD, row])


def test_a_table_that_does_not_fit_is_refused() -> None:
    for bad in ({"kind": ["a"]}, {**{k: [v] for k, v in GOOD.items()}, "bytes": [1]}):
        with pytest.raises(LedgerError, match="column"):
            Ledger(pl.DataFrame(bad))
    with pytest.raises(LedgerError, match="does not fit"):
        Ledger(pl.DataFrame({**{k: [v] for k, v in GOOD.items()}, "nbytes": ["many"]}))


def test_a_time_that_is_null_is_not_known() -> None:
    [row] = Ledger.from_rows([{**GOOD, "start": None, "stop": 3.0}])
    assert math.isnan(row["start"])


def test_a_column_that_is_none_is_named_with_those_that_are() -> None:
    ledger = Ledger.from_rows([GOOD])
    for call in (lambda: ledger.filter(rnak=0), lambda: ledger.summary(["rnak"])):
        with pytest.raises(LedgerError, match="no column 'rnak'") as caught:
            call()
        assert "rank" in caught.value.hint


def test_intervals_leave_out_rows_without_a_time() -> None:
    ledger = Ledger.from_rows([{**GOOD, "start": 1.0, "stop": 2.0}, GOOD])
    assert ledger.intervals(kind="gradient").tolist() == [[1.0, 2.0]]


def test_a_ledger_tells_its_size() -> None:
    ledger = Ledger.from_rows([{**GOOD, "rank": 1, "step": 4}, GOOD], {"run": "mine"})
    assert repr(ledger) == "<Ledger 'mine': 2 rows, 2 ranks, 1 steps>"
