"""The terminal: the verdict first, on one screen, and deaf to what a ledger tells it to do."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import polars as pl
import pytest
from rich.console import Console

from tonnage.ledger import STILL_KINDS, Ledger, compare
from tonnage.report import print_comparison, print_report


def screen(ledgers: Sequence[Ledger], *, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_report(ledgers, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_report_fits_forty_lines_with_the_verdict_in_the_first(three: Sequence[Ledger], num: int) -> None:
    lines = screen(three[:num]).splitlines()
    assert len(lines) <= 40
    assert "a step" in lines[0]
    assert all(len(line) <= 100 for line in lines)


def test_the_step_table_has_the_ratios_and_the_bound_its_working(three: Sequence[Ledger]) -> None:
    text = screen(three)
    assert "1.24 x  1.71 x   451 ms  25.6 MB     52  2.8302" in text
    assert "bound of naive, ddp and tonnage: max(compute 252 ms, wire 25.6 MB / 500 Mbit/s = 410 ms)" in text


def test_what_was_not_measured_has_no_column(make: Callable[..., Ledger]) -> None:
    moves = make("naive").filter(~pl.col("kind").is_in(STILL_KINDS))
    text = screen([Ledger(moves.frame, {"run": "a"})])
    assert "/bound" not in text
    assert "loss" not in text


def test_markup_and_escapes_in_names_are_shown_not_obeyed() -> None:
    hostile = "[red]x[/red]\x1b[2J\u202e"
    rows = [{"kind": hostile, "op": hostile, "label": hostile, "nbytes": 4, "exposed": 1.0, "step": 0}]
    text = screen([Ledger.from_rows(rows, {"run": hostile, "notes": [hostile], "link_note": hostile})])
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]x[/red]" in text


def test_the_kernels_count_stands_beside_the_ledgers(make: Callable[..., Ledger]) -> None:
    ledger = make("ddp")
    sent = int(ledger.filter(rank=0).movements.frame["wire_nbytes"].sum())
    counted = Ledger(ledger.frame, {**ledger.facts, "wire_counted": {"0": round(sent * 1.05)}})
    assert "the kernel counted 323 MB on the interfaces, the ledger has 307 MB on the wire: +5.0 %" in screen(
        [counted], width=140
    )


def test_no_ledger_is_no_report() -> None:
    assert "nothing to report" in screen([])


def test_a_comparison_says_what_became_of_the_step(three: Sequence[Ledger]) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_comparison(compare(three[0], three[2]), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.startswith("35 % faster from naive to tonnage: 701 ms → 456 ms a step.")
    assert "52" in text
    assert "-42 %" in text


def test_a_duration_that_nobody_measured_is_no_zero() -> None:
    row = {"step": 0, "kind": "gradient", "op": "all-reduce", "calls": 3, "nbytes": 8, "wire_nbytes": 12}
    line = next(
        line for line in screen([Ledger.from_rows([row], {"run": "plan"})]).splitlines() if "gradient" in line
    )
    assert line.split() == ["plan", "gradient", "all-reduce", "3", "8", "B", "12", "B", "–", "0", "s"]


def test_at_eighty_columns_no_cell_is_cut(three: Sequence[Ledger]) -> None:
    text = screen(three, width=80)
    assert "…" not in text
    assert "reduce-scatter" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert len(text.splitlines()) <= 40
