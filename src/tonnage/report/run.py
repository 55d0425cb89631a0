"""One run in numbers: its step time, where that time went, and what moved.

Means are over ranks and counted steps. Overlap is found per rank over the whole time of the counted
steps, not step by step: what step 7 sends often hides under the forward pass of step 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from tonnage.ledger import STILL_KINDS, Intervals, Ledger, difference, intersection, intervals, length, union
from tonnage.report.bound import Bound, Gap, find_bound, find_gap
from tonnage.report.facts import Facts, clean, read_facts

COMPUTE_ORDER = ("forward", "backward", "optimizer")
"""The phases of a step, in the order in which they run."""

_BEHIND = 1.10
"""A rank is behind when it takes this many times the median rank's time: above timer and cache noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step, each step being as long as its slowest rank's."""

    num_steps: int
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Mean seconds of a step on a rank.

    Attributes:
        compute: union of the compute rows.
        phases: union of the compute rows of each op.
        moving: union of the movements.
        hidden: moving while this phase computed.
        bare: moving while nothing computed.
        exposed: the rows' own measure of computation standing still.
    """

    compute: float
    phases: Mapping[str, float]
    moving: float
    hidden: Mapping[str, float]
    bare: float
    exposed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a rank moves in a step, on average; ``busiest`` is the wire bytes of the rank with most."""

    calls: float
    nbytes: float
    wire_nbytes: float
    busiest: float

    @property
    def mean_nbytes(self) -> float | None:
        """Payload of a transfer."""
        return self.nbytes / self.calls if self.calls else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """A transfer, by op and label, with its share of the run's exposed seconds (0 to 1)."""

    op: str
    label: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """A rank that the others wait for: its seconds a step, and those of the median of the others."""

    rank: int
    what: str
    seconds: float
    others: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A ledger in numbers.

    Attributes:
        ledger: all its rows.
        counted: those that the numbers are made from: of the steps after warm-up, or all where there
            are no steps.
    """

    facts: Facts
    ledger: Ledger
    counted: Ledger
    ranks: tuple[int, ...]
    num_steps: int
    steps: StepTimes | None
    spent: Spent
    moved: Moved
    bound: Bound | None
    worst: tuple[Exposed, ...]
    behind: Behind | None

    @property
    def name(self) -> str:
        """The run's name in this report."""
        return self.facts.name

    @property
    def step(self) -> float | None:
        """Median seconds of a step."""
        return self.steps.median if self.steps else None

    @property
    def to_bound(self) -> float | None:
        """Step time as a multiple of the bound."""
        return self.steps.median / self.bound.seconds if self.steps and self.bound else None

    @property
    def gap(self) -> Gap | None:
        """What the step takes beyond its bound; ``None`` where either is not known."""
        if self.steps is None or self.bound is None:
            return None
        return find_gap(
            self.bound, step=self.steps.median, compute=self.spent.compute, exposed=self.spent.exposed
        )

    @property
    def final_loss(self) -> float | None:
        """The last finite loss."""
        return next((each for each in reversed(self.facts.loss) if each is not None), None)


def weigh(ledger: Ledger, name: str) -> Run:
    """The numbers of one run, whose warm-up steps are left out."""
    facts = read_facts(ledger, name)
    ledger = _sound(ledger)
    counted = after_warmup(ledger)
    inside = counted.filter(pl.col("step") >= 0) if counted.steps else counted
    moved = _moved(inside)
    return Run(
        facts=facts,
        ledger=ledger,
        counted=inside,
        ranks=tuple(ledger.ranks),
        num_steps=len(counted.steps),
        steps=_step_times(inside),
        spent=_spent(ledger, inside),
        moved=moved,
        bound=find_bound(
            compute_time=facts.compute_time, link_rate=facts.link_rate, wire_nbytes=moved.busiest
        ),
        worst=_worst(inside),
        behind=_behind(inside),
    )


def after_warmup(ledger: Ledger) -> Ledger:
    """``ledger`` without the rows of its warm-up steps; as it is where nothing else would be left."""
    steps = ledger.steps
    warmup = read_facts(ledger, "").warmup
    if not 0 < warmup < len(steps):
        return ledger
    return ledger.filter((pl.col("step") < 0) | (pl.col("step") >= steps[warmup]))


def _sound(ledger: Ledger) -> Ledger:
    """``ledger`` with times that can be summed: a row that is infinite or ends before it began has none."""
    start, stop, exposed = (pl.col(name) for name in ("start", "stop", "exposed"))
    timed = start.is_finite() & stop.is_finite() & (stop >= start)
    frame = ledger.frame.with_columns(
        pl.when(timed).then(start).otherwise(float("nan")),
        pl.when(timed).then(stop).otherwise(float("nan")),
        pl.when(exposed.is_finite() & (exposed > 0)).then(exposed).otherwise(0.0),
    )
    return Ledger(frame, ledger.facts)


def _step_times(inside: Ledger) -> StepTimes | None:
    slowest = (
        inside.frame.filter((pl.col("kind") == "step") & (pl.col("stop") > pl.col("start")))
        .group_by("step")
        .agg((pl.col("stop") - pl.col("start")).max().alias("seconds"))["seconds"]
        .drop_nans()
    )
    if slowest.is_empty():
        return None
    p10, median, p90 = (float(slowest.quantile(q, "linear") or 0.0) for q in (0.1, 0.5, 0.9))
    return StepTimes(num_steps=len(slowest), median=median, p10=p10, p90=p90)


def _spent(ledger: Ledger, inside: Ledger) -> Spent:
    """Means over the ranks of ``inside``, from the intervals of all of ``ledger``."""
    windows = {rank: _window(rows) for rank, rows in _by_rank(inside.frame)}
    share = 1 / (max(len(inside.steps), 1) * max(len(windows), 1))
    phases: dict[str, float] = {}
    hidden: dict[str, float] = {}
    compute = moving = bare = 0.0
    for rank, rows in _by_rank(ledger.frame):
        window = windows.get(rank)
        if window is None:
            continue
        moves = intersection(_spans(rows.filter(~pl.col("kind").is_in(STILL_KINDS))), window)
        computing = rows.filter(pl.col("kind") == "compute")
        by_op = {op: intersection(_spans(each), window) for op, each in _by_op(computing)}
        for op, spans in by_op.items():
            phases[op] = phases.get(op, 0.0) + length(spans) * share
            hidden[op] = hidden.get(op, 0.0) + length(intersection(moves, spans)) * share
        together = union(*by_op.values())
        compute += length(together) * share
        moving += length(moves) * share
        bare += length(difference(moves, together)) * share
    exposed = float(inside.movements.frame["exposed"].sum()) * share
    return Spent(
        compute=compute,
        phases=_in_order(phases),
        moving=moving,
        hidden=_in_order(hidden),
        bare=bare,
        exposed=exposed,
    )


def _moved(inside: Ledger) -> Moved:
    num_steps = max(len(inside.steps), 1)
    by_rank = inside.movements.frame.group_by("rank").agg(pl.col("calls", "nbytes", "wire_nbytes").sum())
    share = 1 / (num_steps * max(len(inside.ranks), 1))
    calls, nbytes, wire = (float(by_rank[name].sum()) * share for name in ("calls", "nbytes", "wire_nbytes"))
    most = by_rank["wire_nbytes"].max()
    busiest = float(most) / num_steps if isinstance(most, int) else 0.0
    return Moved(calls=calls, nbytes=nbytes, wire_nbytes=wire, busiest=busiest)


def _worst(inside: Ledger) -> tuple[Exposed, ...]:
    """Where the exposed seconds lie, most first."""
    rows = (
        inside.movements.frame.group_by("op", "label")
        .agg(pl.col("exposed").sum())
        .filter(pl.col("exposed") > 0)
        .sort("exposed", "op", "label", descending=[True, False, False])
    )
    total = float(rows["exposed"].sum())
    return tuple(
        Exposed(op=clean(op), label=clean(label, longest=60), share=seconds / total)
        for op, label, seconds in rows.iter_rows()
    )


def _behind(inside: Ledger) -> Behind | None:
    """The rank whose compute, or whole step where no compute is known, is clearly the longest."""
    for kind, what in (("compute", "computes"), ("step", "takes")):
        rows = inside.frame.filter((pl.col("kind") == kind) & (pl.col("stop") > pl.col("start")))
        by_rank = (
            rows.group_by("rank", "step")
            .agg((pl.col("stop") - pl.col("start")).sum().alias("seconds"))
            .group_by("rank")
            .agg(pl.col("seconds").median())
            .sort("seconds", "rank", descending=True)
        )
        if by_rank.height >= 2:
            slowest, others = by_rank.row(0), by_rank["seconds"][1:].median()
            if isinstance(others, float) and slowest[1] > _BEHIND * others:
                return Behind(rank=slowest[0], what=what, seconds=slowest[1], others=others)
            return None
    return None


def _window(rows: pl.DataFrame) -> Intervals:
    """From the first to the last moment of a rank's steps; of all its rows where no step was timed."""
    steps = _spans(rows.filter(pl.col("kind") == "step"))
    spans = steps if len(steps) else _spans(rows)
    return intervals([spans[:, 0].min()], [spans[:, 1].max()]) if len(spans) else spans


def _spans(rows: pl.DataFrame) -> Intervals:
    return intervals(rows["start"].to_numpy(), rows["stop"].to_numpy())


def _by_rank(frame: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
    return sorted(
        ((int(str(key[0])), rows) for key, rows in frame.group_by("rank")), key=lambda each: each[0]
    )


def _by_op(frame: pl.DataFrame) -> list[tuple[str, pl.DataFrame]]:
    return [(clean(key[0]), rows) for key, rows in frame.group_by("op")]


def _in_order(by_op: Mapping[str, float]) -> dict[str, float]:
    """Phases in the order in which they run, others after them by name."""
    first = [op for op in COMPUTE_ORDER if op in by_op]
    return {op: by_op[op] for op in [*first, *sorted(set(by_op) - set(first))]}
