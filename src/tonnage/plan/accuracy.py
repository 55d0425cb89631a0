r"""How far predictions are from published runs, by source, beside what a simple rule would say.

``error = predicted / measured - 1``; MAPE is the mean of its size, bias its mean. The baseline is one
constant: ``FLOP / (cards x peak x share) x (1 + (p - 1) / (m v))``, its share the median over all
*other* sources on that family of cards, those in ``APART`` left out. A model that is not clearly better has no reason to exist.

Kendall's tau counts the pairs of runs that the prediction puts in the measured order, less those that
it does not, over all pairs: once over all runs of a source, and once over those that answer the same
question (one model, cards and batch) and differ by more than the noise of a published number. Regret
is what the layout predicted fastest took more than the fastest measured, on average over questions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from tonnage.errors import LayoutError
from tonnage.plan import flops
from tonnage.plan.layout import Layout
from tonnage.plan.predict import Prediction, predict
from tonnage.plan.runs import Run, choose, run_of

APART = ("vtrain-single",)
"""Sources that are reported, but not in the average of the held-out ones: 1440 small runs, bound by
launches and latency, would decide it alone."""

NOISE = 0.05
"""Relative difference of two measured times below which their order says nothing: the same run moves by
1-5 % from day to day and between containers."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One run, predicted.

    Attributes:
        run: what was published.
        layout: the layout predicted, open choices made.
        seconds: predicted.
        memory: predicted bytes of the fullest card.
        baseline: what the simple rule says, seconds.
    """

    run: Run
    layout: Layout
    seconds: float
    memory: float
    baseline: float

    @property
    def error(self) -> float:
        """Signed error of the prediction."""
        return self.seconds / self.run.seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAccuracy:
    """The errors of one source's runs.

    Attributes:
        source: its key, or ``held out`` for all test sources together.
        rows: runs predicted.
        refused: runs that the planner would not take.
        tuned: whether constants were set on it.
        mape: mean size of the error.
        bias: mean error.
        worst: the largest error.
        worst_run: whose it is.
        baseline: MAPE of the simple rule.
        memory_rows: runs that print their memory.
        memory_mape: mean size of its error; NaN-free: None without such runs.
        memory_median: median size of its error.
        memory_bias: mean error.
        tau: Kendall's tau over all pairs of the source, None without any.
        tau_best: the most that any prediction from these columns could reach; see :func:`_known_best`.
        pairs: how many pairs.
        tau_same: the same over pairs of one question that differ by more than the noise.
        pairs_same: how many of them.
        regret: of the top pick, None without a group.
    """

    source: str
    rows: int
    refused: int
    tuned: bool
    mape: float | None
    bias: float | None
    worst: float | None
    worst_run: str
    baseline: float | None
    memory_rows: int
    memory_mape: float | None
    memory_median: float | None
    memory_bias: float | None
    tau: float | None
    tau_best: float | None
    pairs: int
    tau_same: float | None
    pairs_same: int
    regret: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """All sources, the held-out ones together, and what was refused.

    Attributes:
        sources: one a source, in order of appearance.
        held_out: the test sources together, without those in ``APART``.
        refused: row, source and reason of each refusal.
        judged: each run.
    """

    sources: list[SourceAccuracy]
    held_out: SourceAccuracy
    refused: list[tuple[str, str, str]]
    judged: list[Judged]


def measure(rows: Sequence[Mapping[str, str]], *, progress: Progress | None = None) -> Accuracy:
    """Predict every row and compare.

    Args:
        rows: as :func:`tonnage.plan.runs.read_rows` gives them.
        progress: told how many of how many are done.
    """
    predicted: list[tuple[Run, Prediction]] = []
    refused: list[tuple[str, str, str]] = []
    for i, row in enumerate(rows):
        try:
            run = run_of(row)
            predicted.append((run, predict(run.model, run.cluster, choose(run), run.batch)))
        except LayoutError as error:
            refused.append((str(row.get("row_id") or i + 1), str(row.get("source")), error.what))
        if progress:
            progress(i + 1, len(rows))
    shares = [_share(run, prediction.layout) for run, prediction in predicted]
    judged = [
        Judged(
            run=run,
            layout=prediction.layout,
            seconds=prediction.seconds,
            memory=prediction.memory_reserved if run.allocator else prediction.memory_total,
            baseline=_ideal(run, prediction.layout) / _other_share(run, prediction.layout, predicted, shares),
        )
        for run, prediction in predicted
    ]
    names = list(dict.fromkeys(str(row.get("source")) for row in rows))
    sources: list[SourceAccuracy] = []
    for name in names:
        mine = [each for each in judged if each.run.source == name]
        lost = sum(1 for _, source, _ in refused if source == name)
        # A source that was tuned on only in part has two lines; what was refused counts in the last.
        parts = [(tuned, [e for e in mine if e.run.tuned == tuned]) for tuned in (True, False)]
        filled = [(tuned, part) for tuned, part in parts if part] or [(False, [])]
        for tuned, part in filled:
            sources.append(_summary(name, part, lost if part is filled[-1][1] else 0, tuned))
    test = [e for e in judged if not e.run.tuned and not e.run.source.startswith(APART)]
    lost = sum(1 for _, source, _ in refused if not source.startswith(APART))
    return Accuracy(
        sources=sources,
        held_out=_summary("held out, together", test, lost, False),
        refused=refused,
        judged=judged,
    )


def _summary(name: str, judged: Sequence[Judged], refused: int, tuned: bool) -> SourceAccuracy:
    errors = [each.error for each in judged]
    worst = max(judged, key=lambda each: abs(each.error), default=None)
    memory = [each.memory / each.run.memory - 1 for each in judged if each.run.memory]
    tau, pairs = _tau(list(itertools.combinations(judged, 2)))
    same, regret = _questions(judged)
    tau_same, pairs_same = _tau(same)
    return SourceAccuracy(
        source=name,
        rows=len(judged),
        refused=refused,
        tuned=tuned,
        mape=mean(map(abs, errors)) if errors else None,
        bias=mean(errors) if errors else None,
        worst=worst.error if worst else None,
        worst_run=f"row {worst.run.row}: {worst.run.label}" if worst else "",
        baseline=mean(abs(e.baseline / e.run.seconds - 1) for e in judged) if judged else None,
        memory_rows=len(memory),
        memory_mape=mean(map(abs, memory)) if memory else None,
        memory_median=median(map(abs, memory)) if memory else None,
        memory_bias=mean(memory) if memory else None,
        tau=tau,
        tau_best=_tau(list(itertools.combinations(_known_best(judged), 2)))[0],
        pairs=pairs,
        tau_same=tau_same,
        pairs_same=pairs_same,
        regret=regret,
    )


def _tau(pairs: Sequence[tuple[Judged, Judged]]) -> tuple[float | None, int]:
    balance = counted = 0
    for a, b in pairs:
        if a.run.seconds == b.run.seconds:
            continue
        agree = (a.seconds - b.seconds) * (a.run.seconds - b.run.seconds)
        balance += (agree > 0) - (agree < 0)
        counted += 1
    return (balance / counted if counted else None), counted


def _known_best(judged: Sequence[Judged]) -> list[Judged]:
    """As if whoever predicts had known the median of all runs that are written down alike.

    Runs that differ in nothing but their time get one prediction, whatever the model: what is left is the
    noise of the source, and a run without a twin counts as known exactly.
    """
    alike: dict[tuple[object, ...], list[float]] = {}
    for each in judged:
        alike.setdefault((each.run.source, *each.run.group, each.layout), []).append(each.run.seconds)
    return [
        dataclasses.replace(e, seconds=median(alike[(e.run.source, *e.run.group, e.layout)])) for e in judged
    ]


def _questions(judged: Sequence[Judged]) -> tuple[list[tuple[Judged, Judged]], float | None]:
    """Pairs of runs of one question, and what the predicted winner lost to the measured one."""
    groups: dict[tuple[object, ...], list[Judged]] = {}
    for each in judged:
        groups.setdefault((each.run.source, *each.run.group), []).append(each)
    pairs = []
    regrets = []
    for group in groups.values():
        for a, b in itertools.combinations(group, 2):
            apart = abs(a.run.seconds / b.run.seconds - 1) > NOISE
            if apart and a.layout != b.layout:
                pairs.append((a, b))
        if len({each.layout for each in group}) > 1:
            picked = min(group, key=lambda each: each.seconds)
            regrets.append(picked.run.seconds / min(each.run.seconds for each in group) - 1)
    return pairs, (mean(regrets) if regrets else None)


def _ideal(run: Run, layout: Layout) -> float:
    """Seconds at the full peak, with the pipeline's bubble."""
    how = flops.CONVENTIONS["narayanan"]
    work = flops.flops_per_token(run.model, run.batch.seq, how, recompute=layout.recompute)
    peak = run.cluster.device.peak(layout.recipe.precision)
    bubble = (layout.pp - 1) / (layout.num_micro_batches(run.batch) * layout.virtual)
    return work * run.batch.tokens / (run.cluster.num_devices * peak) * (1 + bubble)


def _share(run: Run, layout: Layout) -> float:
    return _ideal(run, layout) / run.seconds


def _family(run: Run, layout: Layout) -> tuple[str, bool]:
    card = run.cluster.device.name
    family = next((f for f in ("A100", "H100", "H200", "V100") if card.startswith(f)), "Blackwell")
    return family, layout.recipe.precision in ("bf16", "fp16")


def _other_share(
    run: Run, layout: Layout, predicted: Sequence[tuple[Run, Prediction]], shares: Sequence[float]
) -> float:
    """The share of the peak that the other sources reached on this family of cards."""
    mine = _family(run, layout)
    others = [
        (_family(other, prediction.layout), share)
        for (other, prediction), share in zip(predicted, shares, strict=True)
        if other.source != run.source and not other.source.startswith(APART)
    ]
    # The same cards and width of format, else the same cards, else all.
    exact = [share for family, share in others if family == mine]
    near = [share for family, share in others if family[0] == mine[0]]
    for pool in (exact, near, [share for _, share in others]):
        if pool:
            return median(pool)
    return median(shares)
