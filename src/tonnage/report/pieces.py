"""In how many pieces a run sends its bytes: the transfers of one rank in one step, in order of time.

The pieces are drawn as long as what they put on the wire, for that is alike whatever op carried it: an
all-reduce of S bytes and a reduce-scatter with an all-gather of S bytes each send the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from tonnage.report.run import Run
from tonnage.report.timeline import median_step

MOST_PIECES = 2_000
"""Pieces of one run in the page: more than the picture has pixels across."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The transfers of a step of one rank.

    Attributes:
        rank: whose they are: the rank that puts the most bytes on the wire.
        num_calls: transfers.
        merged: transfers that one piece stands for, at least; 1 where none had to be merged.
        rows: ``op``, ``label``, ``calls``, ``nbytes`` (payload), ``wire_nbytes`` of each piece.
    """

    rank: int
    num_calls: int
    merged: int
    rows: pl.DataFrame


def pieces(run: Run) -> Pieces | None:
    """The pieces of the step that the timeline shows; ``None`` where nothing was moved."""
    step = median_step(run)
    rows = run.counted.movements.frame
    if step is None and run.counted.steps:
        step = run.counted.steps[0]
    if step is not None:
        rows = rows.filter(pl.col("step") == step)
    rows = rows.filter(pl.col("calls") > 0)
    if rows.is_empty():
        return None
    most = rows.group_by("rank").agg(pl.col("wire_nbytes", "nbytes").sum())
    rank = int(most.sort("wire_nbytes", "nbytes", "rank", descending=[True, True, False])["rank"][0])
    rows = rows.filter(pl.col("rank") == rank).sort("start", nulls_last=True, maintain_order=True)
    num_calls = int(rows["calls"].sum())
    cut = _merged(rows, -(-rows.height // MOST_PIECES)) if rows.height > MOST_PIECES else _each_call(rows)
    return Pieces(
        rank=rank,
        num_calls=num_calls,
        merged=max(cut["calls"].to_list()),
        rows=cut.select("op", "label", "calls", "nbytes", "wire_nbytes"),
    )


def _each_call(rows: pl.DataFrame) -> pl.DataFrame:
    """A piece a call where they are few enough, else a piece a row."""
    calls = rows["calls"].to_numpy()
    if calls.sum() > MOST_PIECES:
        return rows
    share = pl.col("nbytes", "wire_nbytes") // pl.col("calls")
    return rows.with_columns(share, pl.lit(1, pl.Int64).alias("calls"))[
        np.repeat(np.arange(len(calls)), calls)
    ]


def _merged(rows: pl.DataFrame, together: int) -> pl.DataFrame:
    """One piece for each ``together`` neighbours."""
    return (
        rows.with_row_index("at")
        .group_by(pl.col("at") // together, maintain_order=True)
        .agg(pl.col("op", "label").first(), pl.col("calls", "nbytes", "wire_nbytes").sum())
    )
