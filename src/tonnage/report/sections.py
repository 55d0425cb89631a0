"""The report's tables, which the terminal and the page both show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from tonnage.ledger import Ledger
from tonnage.report import words
from tonnage.report.facts import clean
from tonnage.report.run import Run
from tonnage.report.verdict import baseline, to_baseline


@dataclass(frozen=True, slots=True)
class Cell:
    """What a table shows, and the bare number behind it in base units."""

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table: its headers, and rows as long as them."""

    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


MEASURES: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("calls", "calls", words.count),
    ("payload", "nbytes", words.size),
    ("wire", "wire_nbytes", words.size),
    ("time", "seconds", words.seconds),
    ("exposed", "exposed", words.seconds),
)
"""The measures of a movement: header, column, and how it is printed."""


def step_section(runs: Sequence[Run]) -> Section:
    """A row a run: step time, its ratios, and what it moved. Columns that nobody measured are left out."""
    against = "/ddp" if baseline(runs) else ""
    columns: list[tuple[str, list[Cell]]] = [
        ("run", [Cell(run.name) for run in runs]),
        ("step", [Cell(words.seconds(run.step), run.step) for run in runs]),
        ("p10", [_cell(words.seconds, run.steps.p10 if run.steps else None) for run in runs]),
        ("p90", [_cell(words.seconds, run.steps.p90 if run.steps else None) for run in runs]),
        (against, [_cell(words.times, to_baseline(run, runs)) for run in runs]),
        ("/bound", [_cell(words.times, run.to_bound) for run in runs]),
        ("exposed", [_cell(words.seconds, run.spent.exposed) for run in runs]),
        ("wire", [_cell(words.size, run.moved.wire_nbytes) for run in runs]),
        ("calls", [_cell(words.count, run.moved.calls) for run in runs]),
        ("loss", [_cell(words.number, run.final_loss) for run in runs]),
    ]
    kept = [
        (name, cells) for name, cells in columns if name and any(cell.text != words.UNKNOWN for cell in cells)
    ]
    return Section(
        headers=tuple(name for name, _ in kept), rows=tuple(zip(*(cells for _, cells in kept), strict=True))
    )


def movement_section(runs: Sequence[Run]) -> Section:
    """A row for each kind of movement of each run, as means a step and rank; the link where it differs."""
    rows = [(run, row) for run in runs for row in per_step(run).iter_rows(named=True)]
    several_links = len({row["link"] for _, row in rows}) > 1
    names = ("kind", "op", "link") if several_links else ("kind", "op")
    return Section(
        headers=("run", *names, *(header for header, _, _ in MEASURES)),
        rows=tuple(
            (Cell(run.name), *(Cell(clean(row[name])) for name in names), *_measures(row))
            for run, row in rows
        ),
    )


def rank_section(runs: Sequence[Run]) -> Section:
    """A row for each rank and kind of movement of each run, as means a step."""
    return Section(
        headers=("run", "rank", "kind", "op", *(header for header, _, _ in MEASURES)),
        rows=tuple(
            (
                Cell(run.name),
                Cell(str(row["rank"]), row["rank"]),
                Cell(clean(row["kind"])),
                Cell(clean(row["op"])),
                *_measures(row),
            )
            for run in runs
            for row in per_step(run, each_rank=True).sort("rank", maintain_order=True).iter_rows(named=True)
        ),
    )


def per_step(run: Run, *, each_rank: bool = False) -> pl.DataFrame:
    """The counted movements by kind, op and link as means a step and rank, or a step of each rank."""
    share = 1 / (max(run.num_steps, 1) * (1 if each_rank else max(len(run.ranks), 1)))
    by = ("rank", "kind", "op") if each_rank else ("kind", "op", "link")
    return summed(run.counted, by).with_columns(pl.col([column for _, column, _ in MEASURES]) * share)


def summed(ledger: Ledger, by: Sequence[str]) -> pl.DataFrame:
    """The ledger's summary, with null seconds where no row has a time.

    The ledger sums an unknown duration as zero; where all are unknown, so is their sum.
    """
    timed = ledger.movements.frame.group_by(by).agg(pl.col("start").is_not_nan().any().alias("timed"))
    return (
        ledger.summary(by)
        .join(timed, on=list(by), how="left", nulls_equal=True, maintain_order="left")
        .with_columns(pl.when("timed").then("seconds").alias("seconds"))
        .drop("timed")
    )


def bound_working(run: Run) -> str:
    """How the bound comes about, term by term; empty where neither term is known."""
    bound = run.bound
    if bound is None:
        return ""
    compute = words.seconds(bound.compute) if bound.compute else "unknown"
    if bound.link is None:
        link = "unknown, no link rate" if run.moved.busiest else "nothing sent"
    else:
        link = (
            f"{words.size(run.moved.busiest)} / {words.rate(run.facts.link_rate)} = "
            f"{words.seconds(bound.link)}"
        )
    return f"max(compute {compute}, wire {link}) = {words.seconds(bound.seconds)}"


def shared(runs: Sequence[Run], line: Callable[[Run], str]) -> list[tuple[str, str]]:
    """Each different non-empty ``line`` once, with the names of the runs that have it."""
    names: dict[str, list[str]] = {}
    for run in runs:
        if text := line(run):
            names.setdefault(text, []).append(run.name)
    return [(text, words.listed(having)) for text, having in names.items()]


def wire_check(run: Run) -> str:
    """The kernel's count of bytes beside the ledger's, over the ranks that have both; empty without."""
    by_rank = run.ledger.movements.frame.group_by("rank").agg(pl.col("wire_nbytes").sum())
    ours = {rank: nbytes for rank, nbytes in by_rank.iter_rows() if rank in run.facts.wire_counted}
    total = sum(ours.values())
    if not total:
        return ""
    counted = sum(run.facts.wire_counted[rank] for rank in ours)
    return (
        f"the kernel counted {words.size(counted)} on the interfaces, the ledger has {words.size(total)} "
        f"on the wire: {words.change(counted / total - 1)}"
    )


def _measures(row: dict[str, Any]) -> list[Cell]:
    return [_cell(show, row[column]) for _, column, show in MEASURES]


def _cell(show: Callable[[float | None], str], value: float | None) -> Cell:
    return Cell(show(value), value)
