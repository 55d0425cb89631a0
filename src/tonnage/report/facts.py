"""What a ledger says of its run, read so that nothing in it can mislead or harm a reader.

Facts come from files, so any of them may be missing, of another type, infinite or hostile. Here each
becomes a value that the rest of the report can rely on, or ``None``: a missing fact makes a report
shorter, never wrong. Names and labels lose control characters, which a terminal would obey.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tonnage.ledger import Ledger

_LONGEST_NAME = 60
_LONGEST_LINE = 600
_TOO_LARGE = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A run's facts.

    Attributes:
        name: short, unlike any other run's of the same report.
        title: one line on what the run was; empty where not given.
        world_size: ranks of the run.
        link_rate: bytes per second that a rank can send.
        link_note: how the links were made.
        compute_time: seconds a step takes without communication.
        loss: the loss after each step; ``None`` where it was no finite number.
        num_params: parameters of the model.
        tokens_per_step: tokens of all ranks in a step.
        notes: lines that a reader should see.
        wire_counted: bytes that the kernel counted on each rank's interface.
        warmup: first steps that statistics leave out.
    """

    name: str
    title: str = ""
    world_size: int | None = None
    link_rate: float | None = None
    link_note: str = ""
    compute_time: float | None = None
    loss: tuple[float | None, ...] = ()
    num_params: int | None = None
    tokens_per_step: int | None = None
    notes: tuple[str, ...] = ()
    wire_counted: Mapping[int, int] = field(default_factory=dict)
    warmup: int = 0


def read_facts(ledger: Ledger, name: str) -> Facts:
    """The facts that have a meaning here, under this name."""
    facts: Mapping[str, Any] = ledger.facts
    return Facts(
        name=name,
        title=clean(facts.get("title", "")),
        world_size=_whole(facts.get("world_size")),
        link_rate=_positive(facts.get("link_rate")),
        link_note=clean(facts.get("link_note", "")),
        compute_time=_positive(facts.get("compute_time")),
        loss=tuple(_finite(each) for each in _listed(facts.get("loss"))),
        num_params=_whole(facts.get("num_params")),
        tokens_per_step=_whole(facts.get("tokens_per_step")),
        notes=tuple(text for each in _listed(facts.get("notes")) if (text := clean(each))),
        wire_counted=_by_rank(facts.get("wire_counted"), ledger.ranks),
        warmup=_whole(facts.get("warmup")) or 0,
    )


def run_names(ledgers: Sequence[Ledger]) -> list[str]:
    """A name for each ledger, all different: its ``run``, numbered where two are alike."""
    names: list[str] = []
    for position, ledger in enumerate(ledgers, start=1):
        name = clean(ledger.facts.get("run", ""), longest=_LONGEST_NAME) or f"run {position}"
        again = (f"{name} ({n})" for n in range(2, len(ledgers) + 2))
        names.append(next(each for each in (name, *again) if each not in names))
    return names


def clean(text: object, *, longest: int = _LONGEST_LINE) -> str:
    """``text`` on one line without control characters, cut to ``longest``; empty where it is no text."""
    if not isinstance(text, str):
        return ""
    shown = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text).strip()
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A whole number of JSON may be too large for a float, which isfinite() does not survive.
    return float(value) if abs(value) < _TOO_LARGE and math.isfinite(value) else None


def _positive(value: object) -> float | None:
    number = _finite(value)
    return number if number is not None and number > 0 else None


def _whole(value: object) -> int | None:
    number = _positive(value)
    return None if number is None else int(number)


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _by_rank(value: object, ranks: Sequence[int]) -> dict[int, int]:
    """Bytes by rank from one number for each, a list, or a table (JSON makes its keys text)."""
    pairs: list[tuple[object, object]]
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    else:
        pairs = [(rank, value) for rank in ranks]
    counted = {}
    for rank, nbytes in pairs:
        number = _whole(nbytes)
        if number is not None and str(rank).isdecimal():
            counted[int(str(rank))] = number
    return counted
