"""What would make the job faster, each answered by a replay, the largest gain first.

A candidate is a change of :mod:`tonnage.trace.replay` with what a person would do to get it. It becomes
advice when its replay saves half a percent of the step. How far a figure can be trusted follows from
what the trace shows:

* ``high``: several ranks of each collective are there, so that waiting is told from moving, and the
  change touches only what was measured;
* ``medium``: it holds if something is so that the trace doesn't tell (that no call needs a result, that a
  rank which comes into the trace late would do so in other steps);
* ``low``: one rank's trace, whose waiting can't be told; transfers of one size, whose latency can't be
  told from their bandwidth; or a bound that no schedule may reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tonnage.trace.advice_words import Language, trace_words
from tonnage.trace.replay import Outcome, replay
from tonnage.trace.replay_changes import SMALL
from tonnage.trace.replay_job import Job
from tonnage.trace.replay_pace import Straggler, stragglers
from tonnage.trace.replay_work import element_size
from tonnage.units import format_time

Confidence = Literal["high", "medium", "low"]

_WORTH = 0.005
"""Share of a step below which a gain is no advice: less than steps differ by."""

_BUCKETS = ("1MB", "5MB", "25MB", "100MB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to do.

    Attributes:
        kind: "straggler", "fuse", "bucket", "wire", "early", "overlap", "sync", "slow" or "link".
        text: what to do, and on what evidence.
        outcome: the replay behind it; its ``saved`` is the gain.
        confidence: how far the gain can be trusted.
    """

    kind: str
    text: str
    outcome: Outcome
    confidence: Confidence


def advise(
    job: Job, *, lang: Language = "en", progress: Callable[[int, int], None] | None = None
) -> tuple[Advice, ...]:
    """What would save time, by seconds saved.

    Args:
        job: the trace, ready for replays.
        lang: of the sentences.
        progress: is told how many candidates of how many were replayed.
    """
    found, base = [], replay(job)
    for number, (kind, change) in enumerate(_candidates()):
        outcome = replay(job, change)
        if outcome.touched and outcome.saved > _WORTH * base.step:
            found.append(
                Advice(
                    kind=kind,
                    text=_text(job, kind, outcome, lang),
                    outcome=outcome,
                    confidence=_confidence(job, kind, outcome),
                )
            )
        if progress is not None:
            progress(number + 1, len(_candidates()))
    return _best_of_a_kind(found)


def _candidates() -> list[tuple[str, str]]:
    return [
        ("straggler", "straggler=none"),
        ("fuse", "fuse=yes"),
        *(("bucket", f"bucket={size}") for size in _BUCKETS),
        ("wire", "compress=bf16"),
        ("early", "early=yes"),
        ("overlap", "overlap=full"),
        ("sync", "sync=none"),
        ("slow", "slow=none"),
        ("link", "nic=2x"),
    ]


def _best_of_a_kind(found: list[Advice]) -> tuple[Advice, ...]:
    """The best of each kind, by seconds saved; fusing is left out where buckets do as much or more."""
    ranked = sorted(found, key=lambda each: -each.outcome.saved)
    kinds = [each.kind for each in ranked]
    kept = [each for number, each in enumerate(ranked) if each.kind not in kinds[:number]]
    gains = {each.kind: each.outcome.saved for each in kept}
    worse = "bucket" if gains.get("bucket", 0.0) <= gains.get("fuse", 0.0) * 1.02 else "fuse"
    return tuple(each for each in kept if each.kind != worse or not {"bucket", "fuse"} <= gains.keys())


def _confidence(job: Job, kind: str, outcome: Outcome) -> Confidence:
    if kind in ("overlap", "sync") or not job.is_met:
        return "low"
    if kind == "straggler" and _came_late(job, stragglers(job)[0]):
        return "medium"
    if kind in ("wire", "link") and any(each.sizes < 2 for each in job.lines.values()):
        # Without two sizes, what a byte takes and what a call takes can't be told apart.
        return "low"
    if kind in ("fuse", "bucket", "early", "slow") or "unknown" in outcome.note:
        return "medium"
    return "high"


def _text(job: Job, kind: str, outcome: Outcome, lang: Language) -> str:
    # Of calls each rank has its own; a transfer is one for all of them.
    share = job.num_steps * (len(job.ranks) if kind in ("sync", "early") else 1)
    values = {"count": f"{outcome.touched / share:.3g}", "size": outcome.change.partition("=")[2]}
    if kind == "straggler":
        values = _straggler(job, lang)
    if kind == "slow":
        values["count"] = str(outcome.touched)
    if kind == "fuse":
        sizes = all(each.nbytes >= 0 for each in job.transfers if each.nbytes <= SMALL)
        values["unknown"] = "" if sizes else trace_words("unknown", lang)
    if kind == "wire":
        wide = {each.dtype for each in job.transfers if element_size(each.dtype) > 2}
        values["dtype"] = ", ".join(sorted(wide))
    return trace_words(kind, lang).format(**values)


def _came_late(job: Job, late: Straggler) -> bool:
    """Whether most of what it loses lies before the trace: a slow step before, or a profiler that began late."""
    return late.entered > 0.5 * late.seconds * job.num_steps


def _straggler(job: Job, lang: Language) -> dict[str, str]:
    worst, *rest = stragglers(job)
    late, others = "", ""
    if _came_late(job, worst):
        late = trace_words("entered", lang).format(seconds=format_time(worst.entered))
    if rest:
        others = trace_words("others", lang).format(ranks=", ".join(str(each.rank) for each in rest[:5]))
    return {
        "rank": str(worst.rank),
        "seconds": format_time(worst.seconds),
        "entered": late,
        "others": others,
    }
