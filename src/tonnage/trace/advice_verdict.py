"""The sentence at the head of a trace's report: where the communication time went, and the largest gain."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tonnage.trace.advice import Advice
from tonnage.trace.advice_words import Language, trace_words
from tonnage.trace.replay import Outcome
from tonnage.trace.replay_split import Split
from tonnage.units import format_time

_MOST = 0.5
"""Share of the time in collectives, or of all waiting, from which on it is said to be what matters."""

_LITTLE = 0.05
"""Share of a step below which exposed communication matters little."""


def verdict(found: Split, base: Outcome, advice: Sequence[Advice], lang: Language = "en") -> str:
    """One sentence on where the time went, one on what to do."""
    if not found.kinds:
        return trace_words("no transfers", lang).format(step=format_time(base.step))
    gain = trace_words("no gain", lang)
    if advice:
        best = advice[0]
        gain = trace_words("largest gain", lang).format(
            text=best.text, saved=format_time(best.outcome.saved), step=format_time(base.step)
        )
    return f"{_where(found, base, lang)} {gain}"


def _where(found: Split, base: Outcome, lang: Language) -> str:
    seconds = sum(row.seconds for row in found.kinds if not math.isnan(row.waiting))
    exposed = {"exposed": format_time(found.exposed), "step": format_time(base.step)}
    if found.exposed < _LITTLE * base.step:
        return trace_words("hidden", lang).format(**exposed)
    if math.isnan(found.waiting) or seconds <= 0:
        return trace_words("one rank", lang).format(**exposed)
    share = found.waiting / seconds
    if share < _MOST:
        return trace_words("moves", lang).format(share=f"{1 - share:.1%}", **exposed)
    first = found.last[0]
    if first.caused < _MOST * sum(each.caused for each in found.last):
        return trace_words("waits evenly", lang).format(share=f"{share:.1%}")
    return trace_words("waits", lang).format(
        share=f"{share:.1%}", rank=first.rank, times=first.times, all=found.num_met
    )
