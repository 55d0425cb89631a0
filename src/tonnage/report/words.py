"""Numbers and lists as a sentence has them. ``None`` is a number that nobody measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

from tonnage.units import format_rate, format_size, format_time

UNKNOWN = "–"
"""What stands in a table where nothing was measured."""


def known(value: float | None) -> TypeGuard[float]:
    """Whether somebody measured this number, and it is one."""
    return value is not None and math.isfinite(value)


def seconds(value: float | None) -> str:
    """``412 ms``."""
    return UNKNOWN if not known(value) else format_time(value)


def size(value: float | None) -> str:
    """``13.3 MB``."""
    return UNKNOWN if not known(value) else format_size(value)


def rate(value: float | None) -> str:
    """``500 Mbit/s``."""
    return UNKNOWN if not known(value) else format_rate(value)


def percent(ratio: float | None) -> str:
    """``38 %``; one decimal below ten, so that 0.4 % does not read as nothing."""
    if not known(ratio):
        return UNKNOWN
    value = ratio * 100
    return f"{value:.0f} %" if abs(value) >= 9.95 or value == 0 else f"{value:.1f} %"


def change(ratio: float | None) -> str:
    """``+3.2 %``."""
    return UNKNOWN if not known(ratio) else ("+" if ratio > 0 else "") + percent(ratio)


def times(ratio: float | None, *, word: str = "x") -> str:
    """``1.42 x``; ``1.42 times`` in a sentence."""
    return UNKNOWN if not known(ratio) else f"{ratio:.2f} {word}"


def count(value: float | None) -> str:
    """``52``; one decimal where a mean is no whole number."""
    if not known(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value - round(value)) < 0.05 or value >= 100 else f"{value:.1f}"


def number(value: float | None) -> str:
    """``4.1735``, and ``3.1e-06`` where that is shorter."""
    return UNKNOWN if not known(value) else f"{value:.5g}"


def listed(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def plural(value: float, noun: str) -> str:
    """``1 transfer``, ``52 transfers``."""
    return f"{count(value)} {noun}" if count(value) == "1" else f"{count(value)} {noun}s"
