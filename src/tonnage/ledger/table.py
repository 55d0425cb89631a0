"""The ledger: one row a movement of bytes, and what the run was.

The table is a Polars frame with the columns of :mod:`tonnage.ledger.schema`. ``facts`` says what the
run was, in values that JSON can hold; some have a meaning for every reader:

``run``             a short name, for legends
``world_size``      ranks of the run
``link_rate``       bytes per second that a rank can send over the slow link
``compute_time``    seconds a step would take without any communication
``loss``            the loss after each step, a list
``notes``           lines a reader should see (a list of text)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from tonnage.errors import LedgerError
from tonnage.ledger.intervals import Intervals, intervals, length, overlap
from tonnage.ledger.schema import COLUMNS, DEFAULTS, STILL_KINDS


class Ledger:
    """A table of movements with the facts of its run. Treat both as immutable.

    Args:
        frame: the columns of the schema; those with a default may be missing.
        facts: what the run was.

    Raises:
        LedgerError: a column is missing, unknown or of a type that can't be converted.
    """

    __slots__ = ("facts", "frame")

    def __init__(self, frame: pl.DataFrame, facts: Mapping[str, Any] | None = None) -> None:
        self.frame = _conform(frame)
        self.facts: dict[str, Any] = dict(facts or {})

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], facts: Mapping[str, Any] | None = None) -> Ledger:
        """A ledger of these rows; a row gives ``kind``, ``op`` and whatever differs from the defaults."""
        filled = [{**DEFAULTS, **row} for row in rows]
        unknown = {name for row in filled for name in row} - set(COLUMNS)
        if unknown:
            raise LedgerError(
                f"a row has no column {sorted(unknown)[0]!r}", hint=f"columns: {', '.join(COLUMNS)}"
            )
        try:
            return cls(pl.DataFrame(filled, schema=COLUMNS, orient="row"), facts)
        # A lone surrogate in a label, as broken JSON has them, is a UnicodeEncodeError: a ValueError.
        except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
            raise LedgerError(f"a row does not fit the ledger's columns: {error}") from error

    @classmethod
    def empty(cls, facts: Mapping[str, Any] | None = None) -> Ledger:
        """A ledger without a row."""
        return cls(pl.DataFrame(schema=COLUMNS), facts)

    @classmethod
    def gather(cls, ledgers: Sequence[Ledger], facts: Mapping[str, Any] | None = None) -> Ledger:
        """One ledger of several ranks' rows, by rank and time; facts of the first that has them win."""
        merged: dict[str, Any] = {}
        for each in reversed(ledgers):
            merged |= each.facts
        if not ledgers:
            return cls.empty(facts)
        frame = pl.concat([each.frame for each in ledgers]).sort(
            "rank", "start", nulls_last=True, maintain_order=True
        )
        return cls(frame, merged | dict(facts or {}))

    def __len__(self) -> int:
        return self.frame.height

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.frame.iter_rows(named=True)

    def __repr__(self) -> str:
        name = self.facts.get("run", "ledger")
        return f"<Ledger {name!r}: {len(self)} rows, {len(self.ranks)} ranks, {len(self.steps)} steps>"

    @property
    def ranks(self) -> list[int]:
        """The ranks that have rows, ascending."""
        return sorted(self.frame["rank"].unique().to_list())

    @property
    def steps(self) -> list[int]:
        """The training steps that have rows, ascending; -1 (outside steps) is left out."""
        return sorted(self.frame.filter(pl.col("step") >= 0)["step"].unique().to_list())

    @property
    def movements(self) -> Ledger:
        """The rows that move bytes: without compute and step rows."""
        return self.filter(~pl.col("kind").is_in(STILL_KINDS))

    def filter(self, *conditions: pl.Expr, **equal: Any) -> Ledger:
        """The rows that meet all conditions; ``rank=0`` or ``op=["send", "recv"]`` say it without Polars.

        Raises:
            LedgerError: a name is no column.
        """
        exprs = list(conditions)
        for name, value in equal.items():
            _check_column(name, "to filter by")
            many = isinstance(value, list | tuple | set | range)
            exprs.append(pl.col(name).is_in(list(value)) if many else pl.col(name) == value)
        return Ledger(self.frame.filter(*exprs) if exprs else self.frame, self.facts)

    def summary(self, by: Sequence[str] = ("kind", "op", "group", "link")) -> pl.DataFrame:
        """Movements summed over each combination of ``by``.

        Returns:
            The columns ``by``, then ``calls``, ``nbytes``, ``wire_nbytes``, ``seconds`` (sum of
            durations; parallel ones count twice), ``exposed``, largest wire bytes first.

        Raises:
            LedgerError: a name of ``by`` is no column.
        """
        for name in by:
            _check_column(name, "to sum by")
        rows = self.movements.frame
        return (
            rows.group_by(by, maintain_order=True)
            .agg(
                pl.col("calls").sum(),
                pl.col("nbytes").sum(),
                pl.col("wire_nbytes").sum(),
                (pl.col("stop") - pl.col("start")).fill_nan(0.0).sum().alias("seconds"),
                pl.col("exposed").fill_nan(0.0).sum(),
            )
            .sort("wire_nbytes", "nbytes", descending=True)
        )

    def step_times(self) -> pl.DataFrame:
        """What each step of each rank was spent on.

        Returns:
            ``rank``, ``step``, ``start``, ``seconds`` (the step; NaN if untimed), ``compute`` (union of the compute
            rows), ``moving`` (union of the movements), ``overlapped`` (both at once), ``exposed``
            (sum of the rows' own measure), ``nbytes``, ``wire_nbytes``. One row for each ``step``
            row in the ledger, by rank and step.
        """
        rows = [
            _step_row(rank, step, rows)
            for (rank, step), rows in self.frame.filter(pl.col("step") >= 0).group_by("rank", "step")
            if (rows["kind"] == "step").any()
        ]
        return pl.DataFrame(rows, schema=_STEP_COLUMNS, orient="row").sort("rank", "step")

    def intervals(self, *conditions: pl.Expr, **equal: Any) -> Intervals:
        """Starts and stops of the rows that meet the conditions; those without a time are left out."""
        frame = self.filter(*conditions, **equal).frame
        return intervals(frame["start"].to_numpy(), frame["stop"].to_numpy())


_STEP_COLUMNS = {
    "rank": pl.Int32(),
    "step": pl.Int32(),
    "start": pl.Float64(),
    "seconds": pl.Float64(),
    "compute": pl.Float64(),
    "moving": pl.Float64(),
    "overlapped": pl.Float64(),
    "exposed": pl.Float64(),
    "nbytes": pl.Int64(),
    "wire_nbytes": pl.Int64(),
}


def _step_row(rank: object, step: object, rows: pl.DataFrame) -> dict[str, Any]:
    kind = rows["kind"].to_numpy()
    spans = np.stack([rows["start"].to_numpy(), rows["stop"].to_numpy()], axis=1)
    timed = ~np.isnan(spans).any(axis=1)
    whole = spans[(kind == "step") & timed]
    compute = spans[(kind == "compute") & timed]
    moves = ~np.isin(kind, STILL_KINDS)
    moving = spans[moves & timed]
    return {
        "rank": rank,
        "step": step,
        "start": float(whole[:, 0].min()) if len(whole) else float("nan"),
        "seconds": length(whole) if len(whole) else float("nan"),
        "compute": length(compute),
        "moving": length(moving),
        "overlapped": overlap(moving, compute),
        "exposed": float(np.nansum(rows["exposed"].to_numpy()[moves])),
        "nbytes": int(rows["nbytes"].sum()),
        "wire_nbytes": int(rows["wire_nbytes"].sum()),
    }


def _check_column(name: str, purpose: str) -> None:
    if name not in COLUMNS:
        raise LedgerError(f"no column {name!r} {purpose}", hint=f"columns: {', '.join(COLUMNS)}")


def _conform(frame: pl.DataFrame) -> pl.DataFrame:
    for name in frame.columns:
        _check_column(name, "in a ledger")
    missing = [name for name in COLUMNS if name not in frame.columns]
    without_default = [name for name in missing if name not in DEFAULTS]
    if without_default:
        raise LedgerError(
            f"the table has no column {without_default[0]!r}", hint=f"columns: {', '.join(COLUMNS)}"
        )
    if missing:
        frame = frame.with_columns(
            pl.lit(DEFAULTS[name], dtype=COLUMNS[name]).alias(name) for name in missing
        )
    try:
        frame = frame.select(_as_column(name, dtype) for name, dtype in COLUMNS.items())
    except pl.exceptions.PolarsError as error:
        raise LedgerError(f"a column does not fit the ledger: {error}") from error
    for name in COLUMNS:
        if frame[name].null_count():
            raise LedgerError(f"a row has no {name!r}", hint="give every row its kind, op and counts")
    return frame


def _as_column(name: str, dtype: pl.DataType) -> pl.Expr:
    column = pl.col(name).cast(dtype)
    # A time that is not known is NaN; Polars would leave a null out of sums, as if it were zero.
    return column.fill_null(float("nan")) if dtype == pl.Float64() else column
