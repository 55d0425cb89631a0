"""What the ledgers say, in sentences that are made from their numbers.

A sentence appears only where its numbers were measured, and each has one question: which run is
fastest, what sets its pace, where the moving time went, in how many pieces, who is late, what stands
between the step and its bound, whether the losses agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tonnage.report import words
from tonnage.report.bound import Bound, Gap
from tonnage.report.run import Run

_SAME = 0.01
"""Step times closer than this are not told apart: a median of some tens of steps is no surer."""

_NEGLIGIBLE = 0.01
"""Parts of a step below this share are left out of a sentence."""

_DOUBTFUL = 0.10
"""Compute that takes this share less than it is said to take alone refutes what is said."""

_CONCENTRATED = 0.25
"""A transfer with at least this share of the exposed time is worth its name."""

BASELINE = "ddp"
"""The run that others are measured against, where there is one of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer in one sentence, and the reasons."""

    headline: str
    reasons: tuple[str, ...]


def judge(runs: Sequence[Run]) -> Verdict:
    """The verdict on these runs, of which there is at least one."""
    fastest = min(runs, key=lambda run: run.step if run.step is not None else float("inf"))
    reasons = [
        _pace(fastest),
        _saved(runs, fastest),
        *(_moving(run) for run in runs),
        _pieces(runs),
        *(_late(run) for run in runs),
        _beyond(fastest),
        loss_words(runs),
    ]
    return Verdict(headline=_headline(runs, fastest), reasons=tuple(each for each in reasons if each))


def baseline(runs: Sequence[Run]) -> Run | None:
    """The timed run named ``ddp``."""
    return next((run for run in runs if run.name == BASELINE and run.step), None)


def to_baseline(run: Run, runs: Sequence[Run]) -> float | None:
    """Step time as a multiple of the baseline's."""
    base = baseline(runs)
    return run.step / base.step if run.step and base and base.step else None


def loss_difference(a: Run, b: Run) -> tuple[float, int] | None:
    """Largest difference of two runs' losses at the same step, and that step."""
    pairs = [
        (abs(x - y), step)
        for step, (x, y) in enumerate(zip(a.facts.loss, b.facts.loss, strict=False))
        if x is not None and y is not None
    ]
    return max(pairs, key=lambda pair: pair[0]) if pairs else None


def loss_words(runs: Sequence[Run]) -> str:
    """Whether the losses of these runs agree; empty where fewer than two have any."""
    broken = [run.name for run in runs if any(each is None for each in run.facts.loss)]
    if broken:
        return f"The loss of {words.listed(broken)} is no number at some step."
    having = [run for run in runs if run.facts.loss]
    if len(having) < 2:
        return ""
    base = baseline(having) or having[0]
    differences = [
        (found, run) for run in having if run is not base and (found := loss_difference(base, run))
    ]
    (largest, step), run = max(differences, key=lambda pair: pair[0][0])
    if largest == 0:
        return f"The losses of {words.listed([run.name for run in having])} are the same to the last bit."
    return (
        f"The losses differ by {words.number(largest)} at most "
        f"({base.name} and {run.name}, step {step}, loss {words.number(base.facts.loss[step])})."
    )


def _headline(runs: Sequence[Run], fastest: Run) -> str:
    if fastest.steps is None:
        return f"No step was timed; {_fewest_bytes(runs)}"
    if len(runs) == 1:
        bound = (
            "" if fastest.to_bound is None else f", {words.times(fastest.to_bound, word='times')} its bound"
        )
        return (
            f"{fastest.name} takes {words.seconds(fastest.step)} a step "
            f"(p10 {words.seconds(fastest.steps.p10)}, p90 {words.seconds(fastest.steps.p90)}){bound}."
        )
    slower = sorted(
        ((run.step / fastest.steps.median, run) for run in runs if run.step and run is not fastest),
        key=lambda pair: pair[0],
    )
    level = [run for ratio, run in slower if ratio < 1 + _SAME]
    behind = [
        f"{words.times(ratio, word='times')} as fast as {run.name} ({words.seconds(run.step)})"
        for ratio, run in slower
        if ratio >= 1 + _SAME
    ]
    if level:
        names = words.listed([fastest.name, *(run.name for run in level)])
        start = f"{names} are equally fast at {words.seconds(fastest.step)} a step"
    else:
        start = f"{fastest.name} is the fastest: {words.seconds(fastest.step)} a step"
    return f"{start}{', ' if behind else ''}{words.listed(behind)}."


def _fewest_bytes(runs: Sequence[Run]) -> str:
    lightest = min(runs, key=lambda run: run.moved.wire_nbytes)
    sent = f"{words.size(lightest.moved.wire_nbytes)} a step and rank"
    if not any(run.moved.calls for run in runs):
        return "nothing was moved either."
    if len(runs) == 1:
        return f"{lightest.name} puts {sent} on the wire."
    return f"{lightest.name} puts the fewest bytes on the wire, {sent}."


def _pace(run: Run) -> str:
    bound = run.bound
    if bound is not None and _refuted(run):
        return (
            f"Compute alone is given as {words.seconds(bound.compute)}, yet {run.name} computes for only "
            f"{words.seconds(run.spent.compute)} of a step: its bound is not to be trusted."
        )
    if bound is None or bound.compute is None or bound.link is None:
        return ""
    sends = (
        f"the {words.size(run.moved.busiest)} that a rank sends take {words.seconds(bound.link)} "
        f"at {words.rate(run.facts.link_rate)}"
    )
    computes = f"compute alone takes {words.seconds(bound.compute)}"
    if bound.by_link:
        return f"The link sets the pace of {run.name}: {sends}, {computes}."
    return f"Compute sets the pace of {run.name}: {computes}, {sends}, so all of it could hide."


def _refuted(run: Run) -> bool:
    """Whether the run computes for clearly less than the compute time that its facts give."""
    known = run.bound.compute if run.bound else None
    return known is not None and 0 < run.spent.compute < (1 - _DOUBTFUL) * known


def _saved(runs: Sequence[Run], fastest: Run) -> str:
    """What the fastest run does less of than the baseline, or than the slowest where there is none."""
    timed = [run for run in runs if run.step and run is not fastest]
    if not timed or fastest.step is None:
        return ""
    base = baseline(runs)
    other = base if base in timed and base is not None else max(timed, key=lambda run: run.step or 0.0)
    saved = (other.step or 0.0) - fastest.step
    if saved < _SAME * fastest.step:
        return ""
    standing = other.spent.exposed - fastest.spent.exposed
    both = other.spent.compute > 0 and fastest.spent.compute > 0
    compute = other.spent.compute - fastest.spent.compute if both else 0.0
    parts = [
        _less_or_more(standing, "standing still for bytes"),
        _less_or_more(compute, "computing"),
        _less_or_more(saved - standing - compute, "for the rest"),
    ]
    sizes = [abs(standing), abs(compute), abs(saved - standing - compute)]
    told = [part for part, size in zip(parts, sizes, strict=True) if size >= 0.05 * saved]
    return f"{fastest.name} saves {words.seconds(saved)} a step over {other.name}: {words.listed(told)}."


def _less_or_more(seconds: float, what: str) -> str:
    return f"{words.seconds(abs(seconds))} {'less' if seconds > 0 else 'more'} {what}"


def _moving(run: Run) -> str:
    spent = run.spent
    if not run.moved.calls:
        return f"{run.name} moved nothing."
    if spent.moving == 0:
        return f"When the bytes of {run.name} moved is not in the ledger; {_standing(run)}."
    if spent.compute == 0:
        hidden = "what computed beside it is not in the ledger"
    else:
        under = [
            f"{words.seconds(time)} under {op}"
            for op, time in sorted(spent.hidden.items(), key=lambda pair: -pair[1])
            if time >= _NEGLIGIBLE * spent.moving
        ]
        hidden = f"of that {words.listed(under)}" if under else "none of it under compute"
    return f"{run.name} moves bytes for {words.seconds(spent.moving)} of a step, {hidden}; {_standing(run)}."


def _standing(run: Run) -> str:
    exposed = run.spent.exposed
    if exposed == 0:
        return "computation never stood still for it"
    share = "" if run.step is None else f" ({words.percent(exposed / run.step)} of the step)"
    return f"computation stood still for {words.seconds(exposed)}{share}, {_for_what(run)}"


def _for_what(run: Run) -> str:
    first = run.worst[0]
    name = f"{first.op} '{first.label}'" if first.label else first.op
    if len(run.worst) == 1:
        return f"all for {name}"
    if first.share >= _CONCENTRATED:
        return f"{words.percent(first.share)} of that for {name}"
    by_op: dict[str, float] = {}
    for each in run.worst:
        by_op[each.op] = by_op.get(each.op, 0.0) + each.share
    op, share = max(by_op.items(), key=lambda pair: pair[1])
    most = "all" if len(by_op) == 1 else words.percent(share)
    num = sum(1 for each in run.worst if each.op == op)
    return f"{most} of that spread over {words.plural(num, op)}, '{first.label}' the most"


def _pieces(runs: Sequence[Run]) -> str:
    """Transfers a step and their mean size; the first run's says what the numbers are."""
    parts: list[str] = []
    for run in (run for run in runs if run.moved.calls):
        size = words.size(run.moved.mean_nbytes)
        if parts:
            parts.append(f"{run.name} {words.count(run.moved.calls)} ({size})")
        else:
            parts.append(
                f"{run.name} sends {words.plural(run.moved.calls, 'transfer')} a step ({size} on average)"
            )
    return f"{words.listed(parts)}." if parts else ""


def _late(run: Run) -> str:
    behind = run.behind
    if behind is None:
        return ""
    more = behind.seconds / behind.others - 1
    return (
        f"Rank {behind.rank} of {run.name} {behind.what} {words.seconds(behind.seconds)} a step, "
        f"{words.percent(more)} more than the median of the others ({words.seconds(behind.others)}): "
        f"they wait for it."
    )


def _beyond(run: Run) -> str:
    beyond = run.gap
    if beyond is None or run.bound is None or run.step is None or _refuted(run):
        return ""
    if beyond.seconds < _NEGLIGIBLE * run.step:
        return f"{run.name} reaches its bound of {words.seconds(run.bound.seconds)}."
    parts = words.listed(_gap_parts(beyond, run.bound, at_least=_NEGLIGIBLE * run.step))
    made_of = f": {parts}" if parts else ""
    return (
        f"{run.name} stands {words.seconds(beyond.seconds)} above its bound of "
        f"{words.seconds(run.bound.seconds)}{made_of}."
    )


def _gap_parts(beyond: Gap, bound: Bound, *, at_least: float) -> list[str]:
    longer = " longer than the link's rate makes it" if bound.by_link and bound.compute else ""
    told = [
        (beyond.standing, f"standing still for bytes{longer}"),
        (beyond.slowed, "compute slower than without communication"),
        (beyond.rest, "rest (other work, uneven ranks)"),
    ]
    return [
        f"{words.seconds(value)} {what}"
        for value, what in told
        if value is not None and abs(value) >= at_least
    ]
