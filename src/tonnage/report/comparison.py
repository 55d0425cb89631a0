"""What changed between two ledgers: totals, one sentence, JSON, and a condition to fail on.

A condition reads ``step>+3%``: the measure ``step`` grew by more than three percent. A measure that was
zero and is no longer has grown without limit; one that was not measured can't be judged, which is an
error, since a check that can't be made must not pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tonnage.errors import TonnageError, UsageError
from tonnage.ledger import Comparison
from tonnage.report import words
from tonnage.report.document import json_safe
from tonnage.report.facts import clean

COMPARISON_SCHEMA = "tonnage.comparison/1"

_COLUMNS = {"exposed": "exposed", "wire": "wire_nbytes", "nbytes": "nbytes", "calls": "calls"}
_SHOWN: dict[str, Callable[[float | None], str]] = {
    "step": words.seconds,
    "exposed": words.seconds,
    "wire": words.size,
    "nbytes": words.size,
    "calls": words.count,
}
MEASURES = tuple(_SHOWN)
"""What can be compared and failed on."""

_CONDITION = re.compile(r"\s*(?P<measure>[a-z]+)\s*(?P<sign>[<>])\s*(?P<percent>[+-]?\d+(?:\.\d+)?)\s*%\s*")
_SAME = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """``measure`` changed by more (``>``) or less (``<``) than ``ratio`` (0.03 for 3 %)."""

    measure: str
    sign: str
    ratio: float

    def __str__(self) -> str:
        return f"{self.measure}{self.sign}{self.ratio * 100:+g}%"


def parse_condition(text: str) -> Condition:
    """The condition of a text such as ``step>+3%`` or ``calls<-50%``.

    Raises:
        UsageError: it is none, or names no measure.
    """
    match = _CONDITION.fullmatch(text)
    if match is None or match["measure"] not in MEASURES:
        raise UsageError(
            f"{text!r} is no condition",
            hint=f"write it like 'step>+3%'; measures: {', '.join(MEASURES)}",
        )
    return Condition(measure=match["measure"], sign=match["sign"], ratio=float(match["percent"]) / 100)


def holding(condition: Condition, comparison: Comparison) -> str:
    """One line on how ``condition`` holds; empty where it does not.

    Raises:
        TonnageError: the measure is missing on either side.
    """
    before, after = _totals(comparison)[condition.measure]
    ratio = _ratio(before, after)
    if ratio is None or before is None:
        name = clean(comparison.before if before is None else comparison.after)
        raise TonnageError(
            f"{condition.measure} can't be compared: the ledger of {name} has no such measure",
            where=f"condition {condition}",
            hint="compare ledgers with step rows and finite times, or another measure",
        )
    over = ratio > condition.ratio if condition.sign == ">" else ratio < condition.ratio
    if not over:
        return ""
    show = _SHOWN[condition.measure]
    grown = words.change(ratio) if math.isfinite(ratio) else "from nothing"
    return f"{condition} holds: {condition.measure} {show(before)} → {show(after)} ({grown})"


def changes(
    comparison: Comparison,
) -> list[tuple[str, float | None, float | None, float | None, Callable[[float | None], str]]]:
    """For each measure: its name, value before and after, relative change if finite, how to print it."""
    return [
        (name, before, after, _finite(_ratio(before, after)), _SHOWN[name])
        for name, (before, after) in _totals(comparison).items()
    ]


def headline(comparison: Comparison) -> str:
    """What became of the step time, or of the bytes where no step was timed."""
    names = f"from {clean(comparison.before)} to {clean(comparison.after)}"
    for measure, what in (("step", "a step"), ("wire", "on the wire a step and rank")):
        before, after = _totals(comparison)[measure]
        ratio = _ratio(before, after)
        if before is None or after is None or ratio is None or not math.isfinite(ratio):
            continue
        show = _SHOWN[measure]
        if abs(ratio) < _SAME:
            return f"No change {names}: {show(after)} {what}."
        better = {"step": ("faster", "slower"), "wire": ("fewer bytes", "more bytes")}[measure][ratio > 0]
        return f"{words.percent(abs(ratio))} {better} {names}: {show(before)} → {show(after)} {what}."
    return f"Nothing to compare {names}: neither steps nor bytes on the wire."


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON can hold it; what was not measured is null."""
    document = {
        "schema": COMPARISON_SCHEMA,
        "before": comparison.before,
        "after": comparison.after,
        "headline": headline(comparison),
        "measures": {
            name: {"before": before, "after": after, "change": ratio}
            for name, before, after, ratio, _ in changes(comparison)
        },
        "movements": comparison.movements.to_dicts(),
    }
    safe: dict[str, Any] = json_safe(document)
    return safe


def _totals(comparison: Comparison) -> dict[str, tuple[float | None, float | None]]:
    before, after = (_finite(each) for each in comparison.step_seconds)
    totals: dict[str, tuple[float | None, float | None]] = {"step": (before, after)}
    for name, column in _COLUMNS.items():
        totals[name] = (
            _finite(float(comparison.movements[f"{column}_before"].sum())),
            _finite(float(comparison.movements[f"{column}_after"].sum())),
        )
    return totals


def _ratio(before: float | None, after: float | None) -> float | None:
    if before is None or after is None:
        return None
    if before == 0:
        return 0.0 if after == 0 else math.inf
    return after / before - 1


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
