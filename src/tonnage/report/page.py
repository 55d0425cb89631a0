"""What the page's scripts draw from: columns, since objects a row would repeat every name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from tonnage.report.document import json_safe
from tonnage.report.facts import clean
from tonnage.report.pieces import Pieces, pieces
from tonnage.report.run import Run
from tonnage.report.sections import summed
from tonnage.report.timeline import Timeline, timeline

MOST_STEP_ROWS = 8_000
"""Rows of the table of single steps, over all runs; beyond it evenly spaced steps are kept."""

_MOST_LOSSES = 20_000


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """All that the pictures and the table of single steps show, as JSON can hold it."""
    data = {"runs": [_run(run, len(runs)) for run in runs]}
    safe: dict[str, Any] = json_safe(data)
    return safe


def _run(run: Run, num_runs: int) -> dict[str, Any]:
    drawn, cut = timeline(run), pieces(run)
    return {
        "name": run.name,
        "warmup": run.facts.warmup,
        "losses": _losses(run),
        "timeline": _timeline(drawn, run) if drawn else None,
        "pieces": _pieces(cut) if cut else None,
        "steps": _single_steps(run, MOST_STEP_ROWS // num_runs),
    }


def _losses(run: Run) -> dict[str, list[float | None] | list[int]]:
    every = -(-len(run.facts.loss) // _MOST_LOSSES) or 1
    return {
        "step": list(range(0, len(run.facts.loss), every)),
        "loss": list(run.facts.loss[::every]),
    }


def _timeline(drawn: Timeline, run: Run) -> dict[str, Any]:
    rows = drawn.rows
    return {
        "step": drawn.step,
        "steps": _borders(drawn.steps),
        "own_steps": {rank: _borders(steps) for rank, steps in drawn.own_steps.items()},
        "ranks": drawn.ranks,
        "all_ranks": len(run.ranks),
        "first": run.behind.rank if run.behind and run.behind.rank in drawn.ranks else drawn.ranks[0],
        "lanes": [clean(op) for op in drawn.ops],
        "rank": rows["rank"].to_list(),
        "compute": rows["kind"].eq("compute").cast(pl.Int8).to_list(),
        "op": _coded(rows["op"]),
        "label": _coded(rows["label"]),
        "start": [_micro(each) for each in rows["start"]],
        "stop": [_micro(each) for each in rows["stop"]],
        "exposed": [_micro(each) for each in rows["exposed"]],
        "calls": rows["calls"].to_list(),
        "nbytes": rows["nbytes"].to_list(),
        "wire": rows["wire_nbytes"].to_list(),
        "merged": rows["merged"].to_list(),
        "level": rows["level"].to_list(),
        "bare": {
            rank: [[_micro(start), _micro(stop)] for start, stop in spans.tolist()]
            for rank, spans in drawn.bare.items()
        },
    }


def _borders(steps: Sequence[tuple[int, float, float]]) -> list[list[float]]:
    return [[number, _micro(start), _micro(stop)] for number, start, stop in steps]


def _pieces(cut: Pieces) -> dict[str, Any]:
    rows = cut.rows
    return {
        "rank": cut.rank,
        "num_calls": cut.num_calls,
        "merged": cut.merged,
        "op": _coded(rows["op"]),
        "label": _coded(rows["label"]),
        "calls": rows["calls"].to_list(),
        "nbytes": rows["nbytes"].to_list(),
        "wire": rows["wire_nbytes"].to_list(),
    }


def _single_steps(run: Run, most: int) -> dict[str, Any]:
    rows = summed(run.ledger.filter(pl.col("step") >= 0), ("step", "rank", "kind", "op"))
    steps = run.ledger.steps
    every = max(-(-rows.height // max(most, 1)), 1)
    kept = steps[::every]
    rows = rows.filter(pl.col("step").is_in(kept)).sort("step", "rank", maintain_order=True)
    return {
        "all": len(steps),
        "kept": kept,
        "step": rows["step"].to_list(),
        "rank": rows["rank"].to_list(),
        "kind": _coded(rows["kind"]),
        "op": _coded(rows["op"]),
        "calls": rows["calls"].to_list(),
        "nbytes": rows["nbytes"].to_list(),
        "wire": rows["wire_nbytes"].to_list(),
        "seconds": [None if each is None else _micro(each) for each in rows["seconds"]],
        "exposed": [_micro(each) for each in rows["exposed"]],
    }


def _coded(column: pl.Series) -> dict[str, list[Any]]:
    """Each different text once, and which one stands in each row."""
    names = column.unique(maintain_order=True)
    position = {name: number for number, name in enumerate(names)}
    return {
        "names": [clean(name, longest=80) for name in names],
        "at": [position[name] for name in column],
    }


def _micro(seconds: float) -> float:
    """Microseconds to a tenth: short in JSON, and finer than any clock that ranks share."""
    return round(seconds * 1e6, 1)
