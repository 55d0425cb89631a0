"""What bounds this job now, in words made from this rank's own ledger and the measured links."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import polars as pl

from tonnage.engine.schedule import ScheduleName
from tonnage.engine.tune import WARMUP, Tuning
from tonnage.ledger import Ledger
from tonnage.units import format_size, format_time

RECENT = 20
"""Steps that are looked at."""

NEGLIGIBLE = 0.03
"""Share of a step below which waiting is not worth a change."""

BUSY = 0.7
"""Share of a step from which on the link is what sets the pace."""

FAR = 0.25
"""Share of a step that may wait beyond what was predicted; a machine that others use comes near it."""

RECENT_STEPS = 8
"""Steps after a tuning, at least, that a warning rests on."""

LATE = 2.0
"""A transfer that takes this many times what the link needs for it waited for something else."""


def explain(ledger: Ledger, *, schedule: ScheduleName, compress: str | None, tuning: Tuning | None) -> str:
    """A few lines: where the step's time goes, what sets its pace, and what to change.

    Args:
        ledger: of one rank.
        schedule: which one runs.
        compress: what buckets travel through.
        tuning: the last one.
    """
    # What was laid out differently, and what a job does but once, says nothing of the steps to come.
    since = tuning.step if tuning is not None else WARMUP
    steps = ledger.step_times().filter(pl.col("step") >= since).tail(RECENT)
    if steps.height < 2:
        return f"Too few steps yet: ask again some steps after step {since}."
    first = int(steps["step"].to_numpy()[0])
    moves = ledger.movements.frame.filter(pl.col("step") >= first)
    if moves.is_empty():
        return "Nothing moves: this job has one rank."
    seconds, compute, moving, exposed, wire = (
        float(steps[name].to_numpy().mean())
        for name in ("seconds", "compute", "moving", "exposed", "wire_nbytes")
    )
    lines = [
        f"A step takes {format_time(seconds)} (mean of {steps.height}): {format_time(compute)} compute, "
        f"{format_time(exposed)} ({exposed / seconds:.0%}) wait for transfers; {format_size(wire)} leave this rank, "
        f"in {format_time(moving)} of transfers."
    ]
    needed = _needed(moves, tuning, steps.height)
    if exposed <= NEGLIGIBLE * seconds:
        lines.append(
            "Computation sets the pace: what moves hides under it, so a faster link or fewer bytes gain nothing."
        )
    elif needed is not None and needed >= max(BUSY * seconds, compute):
        lines.append(
            f"The link sets the pace: these bytes need {format_time(needed)} on it. {_fewer_bytes(schedule, compress)}"
        )
    elif needed is not None and moving > LATE * needed:
        lines.append(
            f"Transfers take {format_time(moving)} where the link needs {format_time(needed)}: they wait, for a rank "
            "that is late or for processor time. Compare the ranks' computation in model.save_ledger() and "
            "`tonnage report`."
        )
    else:
        lines.append(_largest_wait(moves, exposed * steps.height) + " " + _more_overlap(schedule))
    if tuning is not None:
        lines.append(tuning.text() + ".")
    return "\n".join(lines)


def waits_more_than_predicted(tuning: Tuning, recent: Sequence[tuple[int, float, float]]) -> str:
    """A warning where far less hides than the tuning predicted; empty while it does, or too early to tell.

    Args:
        tuning: the last one.
        recent: number, seconds and exposed seconds of the last steps.
    """
    since = [each for each in recent if each[0] > tuning.step]
    if len(since) < RECENT_STEPS:
        return ""
    seconds, waited = (statistics.median(values) for values in list(zip(*since, strict=True))[1:])
    predicted = max(0.0, tuning.cycle - tuning.compute)
    if waited <= predicted + FAR * seconds:
        return ""
    return (
        f"{format_time(waited)} of each step ({waited / seconds:.0%}) wait for transfers, where "
        f"{format_time(predicted)} were predicted before step {tuning.step}: less hides than could. "
        "model.explain() says what it is that waits."
    )


def _needed(moves: pl.DataFrame, tuning: Tuning | None, num_steps: int) -> float | None:
    """Seconds a step that the measured link needs for its transfers."""
    if tuning is None:
        return None
    total = 0.0
    for op, line in (
        ("reduce-scatter", tuning.way.reduce),
        ("all-reduce", tuning.way.reduce),
        ("all-gather", tuning.way.gather),
    ):
        rows = moves.filter(pl.col("op") == op)
        if line is not None and not rows.is_empty():
            total += rows.height * line.link.latency + float(rows["nbytes"].sum()) / line.link.bandwidth
    return total / num_steps


def _fewer_bytes(schedule: ScheduleName, compress: str | None) -> str:
    ways = [] if compress not in (None, "lossless") else ["compress='auto'"]
    ways += ["gradient accumulation in model.no_sync()", "a larger batch"]
    if compress not in (None, "lossless"):
        ways.append("compress='power:4' with schedule='allreduce'" if schedule != "allreduce" else "")
    ways.append("tonnage.LocalSteps")
    return "Fewer bytes a step help: " + ", ".join(way for way in ways if way) + "."


def _largest_wait(moves: pl.DataFrame, exposed: float) -> str:
    by_op = moves.group_by("op").agg(pl.col("exposed").sum()).sort("exposed", descending=True)
    op, waited = by_op.row(0)
    rows = moves.filter(pl.col("op") == op).group_by("label").agg(pl.col("exposed").sum())
    label, most = rows.sort("exposed", descending=True).row(0)
    what = {
        "reduce-scatter": "gradients that the optimizer waits for",
        "all-gather": "parameters that the forward pass waits for",
        "all-reduce": "gradients that backward() waits for",
    }.get(op, f"a {op}")
    return (
        f"The link has time to spare; what shows is {what}: {waited / exposed:.0%} of the waiting, "
        f"most of it ({most / waited:.0%}) for bucket {label}."
    )


def _more_overlap(schedule: ScheduleName) -> str:
    return {
        "allreduce": "schedule='shard' hides half of the transfers under the next forward pass.",
        "shard": "schedule='early' begins to hand on parameters during the backward pass, if nothing clips or scales.",
        "early": "Nothing of this engine's hides more; gradient accumulation or a larger batch would.",
    }[schedule]
