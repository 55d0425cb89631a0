from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import LedgerError
from tonnage.ledger import Ledger, compare, median_step_seconds

Row = dict[str, Any]


def run(num_steps: int, *, nbytes: int, seconds: float = 1.0, num_ranks: int = 2) -> list[Row]:
    """Each rank of each step sends ``nbytes``; rank r takes ``seconds * (r + 1)`` a step."""
    return [
        row
        for step in range(num_steps)
        for rank in range(num_ranks)
        for row in (
            {
                "kind": "step",
                "op": "step",
                "rank": rank,
                "step": step,
                "start": 0.0,
                "stop": seconds * (rank + 1),
            },
            {"kind": "gradient", "op": "all-reduce", "rank": rank, "step": step, "nbytes": nbytes},
        )
    ]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**40))
def test_runs_of_any_length_that_move_alike_compare_equal(few: int, many: int, nbytes: int) -> None:
    result = compare(*(Ledger.from_rows(run(n, nbytes=nbytes)) for n in (few, many)))
    [row] = result.movements.rows(named=True)
    assert row["nbytes_before"] == row["nbytes_after"] == nbytes
    assert row["nbytes_change"] == 0
    assert result.step_seconds == (2.0, 2.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 99))), st.lists(st.sampled_from("abcd")))
def test_swapping_the_sides_turns_every_change_around(left: list[tuple[str, int]], right: list[str]) -> None:
    ledgers = [
        Ledger.from_rows([{"kind": kind, "op": "send", "nbytes": n} for kind, n in side])
        for side in (left, [(kind, 7) for kind in right])
    ]
    there, back = (compare(*pair, by=["kind"]).movements.sort("kind") for pair in (ledgers, ledgers[::-1]))
    assert there["nbytes_change"].to_list() == [-x for x in back["nbytes_change"]]
    assert there["nbytes_before"].to_list() == back["nbytes_after"].to_list()
    assert set(there["kind"]) == {kind for kind, _ in left} | set(right)


def test_what_one_side_lacks_is_zero_there() -> None:
    after = Ledger.from_rows([{"kind": "chunk", "op": "read", "nbytes": 5}], {"run": "mine"})
    result = compare(Ledger.empty(), after)
    [row] = result.movements.rows(named=True)
    assert (row["nbytes_before"], row["nbytes_after"], row["nbytes_change"]) == (0, 5, 5)
    assert (result.before, result.after) == ("before", "mine")
    assert all(map(math.isnan, result.step_seconds))


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    assert median_step_seconds(Ledger.from_rows(run(3, nbytes=1, seconds=0.5, num_ranks=4))) == 2.0


def test_a_step_without_a_time_has_none() -> None:
    assert math.isnan(median_step_seconds(Ledger.from_rows([{"kind": "step", "op": "step", "step": 0}])))


def test_comparing_by_what_is_no_column_is_refused() -> None:
    with pytest.raises(LedgerError, match="no column 'colour'"):
        compare(Ledger.empty(), Ledger.empty(), by=["colour"])
