"""The numbers of one run, and its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.ledger import Ledger
from tonnage.report import after_warmup
from tonnage.report.facts import clean, run_names
from tonnage.report.run import weigh


def ledger_of(rows: list[dict[str, Any]], **facts: Any) -> Ledger:
    return Ledger.from_rows(rows, facts)


def step(number: int, start: float, stop: float, rank: int = 0) -> dict[str, Any]:
    return {"rank": rank, "step": number, "kind": "step", "op": "step", "start": start, "stop": stop}


def test_the_three_ways_are_bound_by_the_same_bytes(three: list[Ledger]) -> None:
    naive, ddp, ours = (weigh(ledger, "a") for ledger in three)
    assert naive.moved.wire_nbytes == pytest.approx(ours.moved.wire_nbytes, rel=1e-4)
    assert naive.spent.hidden["backward"] == pytest.approx(0, abs=1e-9)
    assert 0 < ddp.spent.hidden["backward"] < ours.spent.hidden["backward"] + ours.spent.hidden["forward"]
    assert naive.step is not None
    assert ours.step is not None
    assert naive.step > ours.step > 0.4


def test_what_a_step_sends_may_hide_under_the_next_steps_forward_pass() -> None:
    run = weigh(
        ledger_of(
            [
                step(0, 0.0, 1.0),
                step(1, 1.0, 2.0),
                {"step": 1, "kind": "compute", "op": "forward", "start": 1.0, "stop": 1.4},
                {"step": 0, "kind": "parameter", "op": "all-gather", "start": 0.9, "stop": 1.2, "nbytes": 8},
            ]
        ),
        "a",
    )
    assert run.spent.hidden["forward"] == pytest.approx(0.2 / 2)
    assert run.spent.bare == pytest.approx(0.1 / 2)


def test_a_step_is_as_long_as_its_slowest_rank_and_warm_up_is_left_out() -> None:
    rows = [
        step(n, n * 10.0, n * 10.0 + seconds + rank, rank)
        for n, seconds in enumerate([9, 1, 2, 3])
        for rank in (0, 1)
    ]
    run = weigh(ledger_of(rows, warmup=1), "a")
    assert run.steps is not None
    assert (run.steps.num_steps, run.steps.median) == (3, 3.0)
    assert run.steps.p10 == pytest.approx(2.2)
    assert run.steps.p90 == pytest.approx(3.8)


def test_a_warm_up_longer_than_the_run_leaves_all_steps() -> None:
    ledger = ledger_of([step(0, 0, 1), step(1, 1, 2)], warmup=5)
    assert after_warmup(ledger).steps == [0, 1]


def test_rows_outside_steps_do_not_count_as_a_steps_bytes() -> None:
    send = {"kind": "gradient", "op": "send", "nbytes": 10, "wire_nbytes": 10}
    run = weigh(
        ledger_of([{**send, "step": -1, "wire_nbytes": 10**9}, {**send, "step": 0}, {**send, "step": 1}]), "a"
    )
    assert run.moved.wire_nbytes == 10


def test_a_rank_is_behind_only_when_clearly_so(make: Callable[..., Ledger]) -> None:
    assert weigh(make("ddp"), "a").behind is None
    late = weigh(make("ddp", slow={2: 1.3}), "a").behind
    assert late is not None
    assert late.rank == 2
    assert late.seconds / late.others == pytest.approx(1.3, rel=0.01)


def test_names_are_never_twice_the_same() -> None:
    named = [Ledger.empty({"run": name}) for name in ("ddp", "ddp", "ddp", "", 7, "a\x1b[31m\nb")]
    assert run_names(named) == ["ddp", "ddp (2)", "ddp (3)", "run 4", "run 5", "a�[31m b"]


@given(st.lists(st.sampled_from(["a", "a (2)", "a (3)", "run 1", "run 3", ""]), max_size=6))
def test_names_differ_even_from_made_up_ones(names: list[str]) -> None:
    assert len(set(run_names([Ledger.empty({"run": name}) for name in names]))) == len(names)


def test_clean_text_has_no_character_that_a_terminal_obeys() -> None:
    assert clean("a\x1b]0;x\x07\u202eb\x9b") == "a�]0;x��b�"
    assert clean("x" * 700) == "x" * 599 + "…"
    assert clean(None) == ""
