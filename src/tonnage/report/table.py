"""The report and the comparison in a terminal: the verdict first, then the numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tonnage.ledger import Comparison, Ledger
from tonnage.report import words
from tonnage.report.comparison import changes, headline
from tonnage.report.facts import clean, run_names
from tonnage.report.run import Run, weigh
from tonnage.report.sections import Section, bound_working, movement_section, shared, step_section, wire_check
from tonnage.report.verdict import judge

_MOST_ROWS = 10


def print_report(ledgers: Sequence[Ledger], console: Console) -> None:
    """Print what the ledgers say, in about forty lines."""
    runs = [weigh(ledger, name) for ledger, name in zip(ledgers, run_names(ledgers), strict=True)]
    if not runs:
        console.print(Text("no ledger, so nothing to report"))
        return
    verdict = judge(runs)
    console.print(Text(verdict.headline, style="bold"))
    reasons = Table.grid(padding=(0, 1))
    for reason in verdict.reasons:
        reasons.add_row("·", Text(reason))
    console.print(reasons)
    _print_section(console, "Step time", step_section(runs))
    for working, names in shared(runs, bound_working):
        console.print(Text(f"bound of {names}: {working}", style="dim"))
    _print_section(
        console,
        "Moved, per step and rank (time: sum of the transfers, also of those at once)",
        movement_section(runs),
    )
    _print_notes(console, runs)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print what changed from one ledger to the other."""
    console.print(Text(headline(comparison), style="bold"))
    before, after = clean(comparison.before), clean(comparison.after)
    rows = [
        [measure, show(was), show(now), words.change(ratio)]
        for measure, was, now, ratio, show in changes(comparison)
    ]
    _print_rows(console, "Per step and rank", ["", before, after, "change"], rows)
    rows = [
        [
            clean(row["kind"]),
            clean(row["op"]),
            clean(row.get("link", "")),
            *(
                f"{show(row[f'{name}_before'])} → {show(row[f'{name}_after'])}"
                for name, show in (
                    ("calls", words.count),
                    ("wire_nbytes", words.size),
                    ("seconds", words.seconds),
                    ("exposed", words.seconds),
                )
            ),
        ]
        for row in comparison.movements.head(_MOST_ROWS).iter_rows(named=True)
    ]
    _print_rows(console, "Movements", ["kind", "op", "link", "calls", "wire", "time", "exposed"], rows)


def _print_section(console: Console, title: str, section: Section) -> None:
    _print_rows(
        console, title, section.headers, [[cell.text for cell in row] for row in section.rows[:_MOST_ROWS]]
    )
    if len(section.rows) > _MOST_ROWS:
        console.print(Text(f"… and {len(section.rows) - _MOST_ROWS} more", style="dim"))


def _print_rows(console: Console, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    console.print()
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        title_style="bold",
    )
    for position, header in enumerate(headers):
        table.add_column(Text(header), justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _print_notes(console: Console, runs: Sequence[Run]) -> None:
    """The kernel's count beside the ledger's, and the first note of each run; the page has all."""
    for line in (wire_check, lambda run: run.facts.link_note, lambda run: "; ".join(run.facts.notes)):
        for text, names in shared(runs, line):
            console.print(Text(f"{names}: {text}", style="dim"))
