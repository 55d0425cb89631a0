"""Whatever a ledger holds, every kind of report of it comes out whole, and its numbers keep their laws."""

from __future__ import annotations

import io
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tonnage.ledger import KINDS, OPS, Ledger, compare
from tonnage.report import comparison_json, print_comparison, print_report, render_html, report_json
from tonnage.report.run import weigh

TIMES = st.one_of(st.floats(0, 10), st.just(math.nan), st.just(math.inf), st.floats(-5, 0))
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "rank": st.integers(0, 3),
            "step": st.integers(-1, 4),
            "kind": st.sampled_from([*KINDS, "compute", "step", "gradient"]),
            "op": st.sampled_from([*OPS, "forward", "backward"]),
            "calls": st.integers(0, 5),
            "nbytes": st.integers(0, 10**9),
            "wire_nbytes": st.integers(0, 10**9),
            "start": TIMES,
            "stop": TIMES,
            "exposed": TIMES,
            "label": st.text(max_size=8),
        }
    ),
    max_size=25,
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FACT_NAMES = [
    "run",
    "title",
    "world_size",
    "link_rate",
    "link_note",
    "compute_time",
    "loss",
    "num_params",
    "tokens_per_step",
    "notes",
    "wire_counted",
    "warmup",
]
FACTS = st.dictionaries(st.sampled_from(FACT_NAMES), ANYTHING, max_size=12)


SOME = st.lists(st.builds(Ledger.from_rows, ROWS, FACTS), min_size=1, max_size=3)
NO_NUMBER = re.compile(r"\b(nan|inf|infinity|none)\b", re.IGNORECASE)


def printed(show: Any, *values: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    show(*values, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@settings(max_examples=30)
@given(SOME)
def test_any_ledgers_can_be_printed(ledgers: list[Ledger]) -> None:
    text = printed(print_report, ledgers)
    assert text.strip()
    assert "\x1b" not in text


@settings(max_examples=40)
@given(ROWS, ROWS)
def test_no_number_is_missing_in_print(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    ledgers = [Ledger.from_rows([{**row, "label": ""} for row in rows]) for rows in (first, second)]
    text = printed(print_report, ledgers) + printed(print_comparison, compare(*ledgers))
    assert not NO_NUMBER.search(text.replace(" none ", " ").replace("none of it", "")), text


@settings(max_examples=30)
@given(SOME, SOME)
def test_any_two_ledgers_can_be_compared(first: list[Ledger], second: list[Ledger]) -> None:
    comparison = compare(first[0], second[0])
    assert "\x1b" not in printed(print_comparison, comparison)
    json.dumps(comparison_json(comparison), allow_nan=False)


@settings(max_examples=25)
@given(SOME)
def test_any_ledgers_make_a_page(ledgers: list[Ledger]) -> None:
    page = render_html(ledgers)
    assert page.endswith("</html>\n")
    assert page.count("</script>") == 3


@settings(max_examples=60)
@given(ROWS, FACTS)
def test_any_ledger_and_any_facts_give_numbers_that_json_can_hold(
    rows: list[dict[str, Any]], facts: dict[str, Any]
) -> None:
    document = report_json([Ledger.from_rows(rows, facts)])
    assert document["schema"] == "tonnage.report/1"
    json.dumps(document, allow_nan=False)


@settings(max_examples=60)
@given(ROWS)
def test_moving_time_is_either_hidden_or_bare(rows: list[dict[str, Any]]) -> None:
    spent = weigh(Ledger.from_rows(rows), "a").spent
    slack = 1e-9 * (1 + spent.moving)
    assert -slack <= spent.bare <= spent.moving + slack
    assert all(-slack <= hidden <= spent.phases[op] + slack for op, hidden in spent.hidden.items())
    # Phases may overlap one another, so together they hide at least what is not bare.
    assert sum(spent.hidden.values()) + spent.bare >= spent.moving - slack


@settings(max_examples=60)
@given(ROWS, st.floats(1e-3, 10), st.floats(1e6, 1e10))
def test_the_parts_of_the_gap_add_up_to_it(
    rows: list[dict[str, Any]], compute_time: float, rate: float
) -> None:
    run = weigh(Ledger.from_rows(rows, {"compute_time": compute_time, "link_rate": rate}), "a")
    beyond = run.gap
    if run.steps is None:
        assert beyond is None
        return
    assert beyond is not None
    assert run.bound is not None
    assert beyond.standing + (beyond.slowed or 0.0) + beyond.rest == pytest.approx(beyond.seconds, abs=1e-6)
    assert run.bound.seconds >= compute_time
    assert run.bound.seconds >= run.moved.busiest / rate
