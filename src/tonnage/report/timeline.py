"""The stretch of a run that its picture shows: one step of median length, and its neighbours.

Time zero is the start of that step, so that runs lie below each other on one scale. Rows are taken by
time, not by step number: the parameters that step 7 gathers may arrive in step 8.

A picture has few pixels. Where a run has more rows in the stretch than ``budget``, the rows of a rank
and op that begin within the same short slice of time become one, which says how many it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from tonnage.ledger import STILL_KINDS, Intervals, difference, intervals, length, overlap, union
from tonnage.report.run import Run

BUDGET = 6_000
"""Rows of one run in the page: some 60 bytes each, and three runs are drawn in well under a second."""

MOST_RANKS = 8
_MOST_LEVELS = 3

_TOGETHER = 0.02
"""Ops that run at once for more than this share of their time get lanes of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Rows to draw.

    Attributes:
        step: number of the step that begins at zero; ``None`` where no step was timed.
        steps: number, start and stop of each step shown, seconds, from its first rank to its last.
        own_steps: the same for each rank by itself: ranks need not keep step.
        ranks: those shown.
        ops: the moving ops that each need a lane, since they overlap; empty where one lane will do.
        rows: columns of the ledger, and ``merged`` (rows it stands for), ``level`` (0 is the topmost of
            the rows that run at once in a lane).
        bare: for each rank with compute rows, the stretches in which it moved bytes beside no compute.
    """

    step: int | None
    steps: tuple[tuple[int, float, float], ...]
    own_steps: dict[int, tuple[tuple[int, float, float], ...]]
    ranks: tuple[int, ...]
    ops: tuple[str, ...]
    rows: pl.DataFrame
    bare: dict[int, Intervals]


def timeline(run: Run, *, budget: int = BUDGET) -> Timeline | None:
    """The rows around ``run``'s step of median length; ``None`` where nothing has a time."""
    ranks = _shown_ranks(run)
    rows = run.ledger.frame.filter(
        pl.col("rank").is_in(ranks) & (pl.col("kind") != "step") & pl.col("start").is_not_nan()
    )
    if rows.is_empty():
        return None
    steps = _steps(run.ledger.frame)
    step = median_step(run)
    start, stop = _window(rows, steps, step, budget)
    origin = next((begin for number, begin, _ in steps if number == step), start)
    rows = _between(rows, start, stop).with_columns(pl.lit(1, pl.Int64).alias("merged"))
    bare = {rank: _bare(rows.filter(pl.col("rank") == rank)) - origin for rank in _computing(rows)}
    if rows.height > budget:
        rows = _merged(rows, (stop - start) * len(ranks) * rows["op"].n_unique() / budget)
    rows = rows.with_columns(pl.col("start", "stop") - origin).sort("rank", "start", "stop")
    ops = _lanes(rows)
    return Timeline(
        step=step,
        steps=_shown_steps(steps, start, stop, origin),
        own_steps={
            rank: _shown_steps(_steps(run.ledger.frame.filter(pl.col("rank") == rank)), start, stop, origin)
            for rank in ranks
        },
        ranks=ranks,
        ops=ops,
        rows=rows.with_columns(_levels(rows, each_op=bool(ops))),
        bare=bare,
    )


def median_step(run: Run) -> int | None:
    """The counted step whose length, that of its slowest rank, lies nearest to the median."""
    if run.steps is None:
        return None
    lengths = (
        run.counted.frame.filter((pl.col("kind") == "step") & (pl.col("stop") > pl.col("start")))
        .group_by("step")
        .agg((pl.col("stop") - pl.col("start")).max().alias("seconds"))
    )
    far = (pl.col("seconds") - run.steps.median).abs()
    return int(lengths.sort(far, "step")["step"][0])


def _shown_ranks(run: Run) -> tuple[int, ...]:
    """The first ranks, and the one that the others wait for."""
    if len(run.ranks) <= MOST_RANKS or run.behind is None or run.behind.rank in run.ranks[:MOST_RANKS]:
        return run.ranks[:MOST_RANKS]
    return (*run.ranks[: MOST_RANKS - 1], run.behind.rank)


def _steps(frame: pl.DataFrame) -> list[tuple[int, float, float]]:
    """Number, first start and last stop of each step, by number."""
    return (
        frame.filter((pl.col("kind") == "step") & (pl.col("stop") > pl.col("start")))
        .group_by("step")
        .agg(pl.col("start").min(), pl.col("stop").max())
        .sort("step")
        .rows()
    )


def _shown_steps(
    steps: Sequence[tuple[int, float, float]], start: float, stop: float, origin: float
) -> tuple[tuple[int, float, float], ...]:
    """The steps that reach into the stretch, with times from ``origin``."""
    return tuple((n, begin - origin, end - origin) for n, begin, end in steps if begin < stop and end > start)


def _window(
    rows: pl.DataFrame, steps: Sequence[tuple[int, float, float]], step: int | None, budget: int
) -> tuple[float, float]:
    """The step with its neighbours where they fit the budget, else alone; all where no step was timed."""
    numbers = [number for number, _, _ in steps]
    if step is None or step not in numbers:
        return float(rows["start"].to_numpy().min()), float(rows["stop"].to_numpy().max())
    at = numbers.index(step)
    # A neighbour that does not follow at once (runs may take turns) would squeeze the picture.
    own = steps[at]
    near = [each for each in steps[max(at - 1, 0) : at + 2] if _apart(own, each) < own[2] - own[1]]
    start, stop = near[0][1], near[-1][2]
    if _between(rows, start, stop).height > budget:
        return own[1], own[2]
    return start, stop


def _apart(a: tuple[int, float, float], b: tuple[int, float, float]) -> float:
    """Seconds between two steps; zero or less where they touch."""
    return max(a[1], b[1]) - min(a[2], b[2])


def _between(rows: pl.DataFrame, start: float, stop: float) -> pl.DataFrame:
    return rows.filter((pl.col("start") < stop) & (pl.col("stop") >= start))


def _merged(rows: pl.DataFrame, resolution: float) -> pl.DataFrame:
    """One row for all of a rank, kind and op that begin in the same slice of ``resolution`` seconds."""
    slices = (pl.col("start") / resolution).floor().alias("slice")
    return (
        rows.group_by("rank", "kind", "op", slices)
        .agg(
            pl.col("start").min(),
            pl.col("stop").max(),
            pl.col("calls", "nbytes", "wire_nbytes", "exposed", "merged").sum(),
            pl.col("label", "step", "group", "group_size", "link").first(),
        )
        .select(rows.columns)
    )


def _spans(rows: pl.DataFrame) -> Intervals:
    return intervals(rows["start"].to_numpy(), rows["stop"].to_numpy())


def _computing(rows: pl.DataFrame) -> list[int]:
    return sorted(rows.filter(pl.col("kind") == "compute")["rank"].unique().to_list())


def _bare(rows: pl.DataFrame) -> Intervals:
    """The stretches in which one rank's rows move bytes beside no compute."""
    moves = ~pl.col("kind").is_in(STILL_KINDS)
    return difference(_spans(rows.filter(moves)), _spans(rows.filter(pl.col("kind") == "compute")))


def _lanes(rows: pl.DataFrame) -> tuple[str, ...]:
    """The moving ops by first appearance, where any two of them run at once on a rank."""
    moves = rows.filter(~pl.col("kind").is_in(STILL_KINDS))
    ops = moves["op"].unique(maintain_order=True).to_list()
    by_rank = {
        rank: {op: union(_spans(of_rank.filter(pl.col("op") == op))) for op in ops}
        for rank in moves["rank"].unique().to_list()
        for of_rank in [moves.filter(pl.col("rank") == rank)]
    }
    for spans in by_rank.values():
        for position, op in enumerate(ops):
            others = union(*(spans[other] for other in ops[position + 1 :]))
            if overlap(spans[op], others) > _TOGETHER * min(length(spans[op]), length(others)):
                return tuple(ops)
    return ()


def _levels(rows: pl.DataFrame, *, each_op: bool) -> pl.Series:
    """For each row, by start: the first level of its lane that is free, or the one that is free soonest."""
    free: dict[tuple[int, str], list[float]] = {}
    levels = []
    for rank, kind, op, start, stop in rows.select("rank", "kind", "op", "start", "stop").iter_rows():
        lane = "compute" if kind == "compute" else op if each_op else ""
        ends = free.setdefault((rank, lane), [float("-inf")] * _MOST_LEVELS)
        level = next((n for n, end in enumerate(ends) if end <= start + 1e-9), ends.index(min(ends)))
        ends[level] = max(ends[level], stop)
        levels.append(level)
    return pl.Series("level", levels, dtype=pl.Int32)
