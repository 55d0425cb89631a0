"""Two ledgers beside each other: predicted and measured, before and after, ours and another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from tonnage.ledger.table import Ledger

MEASURES = ("calls", "nbytes", "wire_nbytes", "seconds", "exposed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from ``before`` to ``after``, by step and by kind of movement.

    Attributes:
        before: name of the first ledger.
        after: name of the second.
        step_seconds: median step time of each, NaN where no steps were timed.
        movements: per step and rank, a row for each combination of ``by``, with ``<measure>_before``,
            ``<measure>_after`` and ``<measure>_change`` (after - before); zero where one side has none.
    """

    before: str
    after: str
    step_seconds: tuple[float, float]
    movements: pl.DataFrame


def compare(before: Ledger, after: Ledger, *, by: Sequence[str] = ("kind", "op", "link")) -> Comparison:
    """Both ledgers' movements as means a step and rank, so that runs of any length can be compared."""
    names = [
        str(each.facts.get("run") or fallback) for each, fallback in ((before, "before"), (after, "after"))
    ]
    sides = [_per_step(each, by) for each in (before, after)]
    joined = sides[0].join(
        sides[1], on=list(by), how="full", coalesce=True, suffix="_after", nulls_equal=True
    )
    movements = joined.select(
        *by,
        *(
            expr
            for name in MEASURES
            for expr in (
                pl.col(name).fill_null(0.0).alias(f"{name}_before"),
                pl.col(f"{name}_after").fill_null(0.0),
                (pl.col(f"{name}_after").fill_null(0.0) - pl.col(name).fill_null(0.0)).alias(
                    f"{name}_change"
                ),
            )
        ),
    ).sort("wire_nbytes_before", "wire_nbytes_after", *by, descending=[True, True, *[False] * len(by)])
    return Comparison(
        before=names[0],
        after=names[1],
        step_seconds=(median_step_seconds(before), median_step_seconds(after)),
        movements=movements,
    )


def median_step_seconds(ledger: Ledger) -> float:
    """Median over the steps of the slowest rank's step time; NaN where no step was timed."""
    steps = ledger.frame.filter((pl.col("kind") == "step") & (pl.col("step") >= 0))
    if steps.is_empty():
        return float("nan")
    slowest = steps.group_by("step").agg((pl.col("stop") - pl.col("start")).max().alias("seconds"))
    median = slowest["seconds"].drop_nans().median()
    return float(median) if isinstance(median, float) else float("nan")


def _per_step(ledger: Ledger, by: Sequence[str]) -> pl.DataFrame:
    inside = ledger.filter(pl.col("step") >= 0) if ledger.steps else ledger
    share = max(len(inside.steps), 1) * max(len(inside.ranks), 1)
    return inside.summary(by).select(*by, *(pl.col(name).cast(pl.Float64) / share for name in MEASURES))
