"""Conditions on what changed: read, judged, and never passed when they can't be judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import TonnageError, UsageError
from tonnage.ledger import Ledger, compare
from tonnage.report import comparison_json, holding, parse_condition


def sending(nbytes: int, seconds: float, name: str) -> Ledger:
    return Ledger.from_rows(
        [
            {"step": 0, "kind": "step", "op": "step", "start": 0.0, "stop": seconds},
            {"step": 0, "kind": "gradient", "op": "all-reduce", "nbytes": nbytes, "wire_nbytes": nbytes},
        ],
        {"run": name},
    )


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.integers(-99, 300))
def test_more_and_less_are_never_both_true_and_follow_the_step_times(
    before: float, after: float, percent: int
) -> None:
    comparison = compare(sending(8, before, "a"), sending(8, after, "b"))
    grew = bool(holding(parse_condition(f"step>{percent:+d}%"), comparison))
    shrank = bool(holding(parse_condition(f"step<{percent:+d}%"), comparison))
    assert not (grew and shrank)
    if abs(after / before - 1 - percent / 100) > 1e-9:
        assert grew == (after / before - 1 > percent / 100)
        assert shrank == (not grew)


def test_the_line_says_which_condition_holds_and_by_how_much() -> None:
    comparison = compare(sending(100, 1.0, "a"), sending(200, 1.1, "b"))
    assert (
        holding(parse_condition("step > +3%"), comparison) == "step>+3% holds: step 1.00 s → 1.10 s (+10 %)"
    )
    assert holding(parse_condition("wire>50%"), comparison).endswith("wire 100 B → 200 B (+100 %)")
    assert holding(parse_condition("calls>0%"), comparison) == ""


def test_growth_from_nothing_is_beyond_every_percentage() -> None:
    comparison = compare(sending(0, 1.0, "a"), sending(1, 1.0, "b"))
    assert "from nothing" in holding(parse_condition("nbytes>+100000%"), comparison)
    assert holding(parse_condition("exposed>+0%"), comparison) == ""


def test_what_was_not_measured_is_an_error_and_no_pass() -> None:
    comparison = compare(Ledger.empty({"run": "a"}), sending(1, 1.0, "b"))
    with pytest.raises(TonnageError, match="step can't be compared: the ledger of a has no such measure"):
        holding(parse_condition("step>+3%"), comparison)


@pytest.mark.parametrize(
    "text", ["", "step", "step>3", "step=3%", "steps>3%", "step>+%", "__class__>3%", "step>nan%"]
)
def test_other_text_is_no_condition(text: str) -> None:
    with pytest.raises(UsageError, match="is no condition"):
        parse_condition(text)


def test_the_document_has_every_measure_before_and_after(three: Sequence[Ledger]) -> None:
    document = comparison_json(compare(three[0], three[2]))
    assert document["schema"] == "tonnage.comparison/1"
    assert set(document["measures"]) == {"step", "exposed", "wire", "nbytes", "calls"}
    assert document["measures"]["calls"] == {
        "before": 52.0,
        "after": 30.0,
        "change": pytest.approx(30 / 52 - 1),
    }


def test_a_ledger_beside_itself_has_not_changed(make: Callable[..., Ledger]) -> None:
    document = comparison_json(compare(make("ddp"), make("ddp")))
    assert document["headline"] == "No change from ddp to ddp: 566 ms a step."
    assert all(each["change"] == 0 for each in document["measures"].values())
