"""From model, cluster, layout and batch to bytes, seconds and memory.

Closed forms give each piece (a layer's micro-batch, a stage's gradients); the event simulation puts
the pieces together. What comes back holds a ledger like that of a measured run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tonnage.errors import LayoutError
from tonnage.ledger import Ledger
from tonnage.plan import flops
from tonnage.plan.cluster import Cluster
from tonnage.plan.fitting import changes_text, nearest_fit
from tonnage.plan.grid import Floats, Grid, chunk_counts, grid_of
from tonnage.plan.layout import Batch, Layout, check
from tonnage.plan.memory import MEMORY_PARTS, Memory, stage_memory
from tonnage.plan.model import Model
from tonnage.plan.overlap import Simulated, StepPlan, gathered_pass, simulate
from tonnage.plan.rows import ledger_rows
from tonnage.plan.steptime import (
    PARTS,
    STEP_OVERHEAD,
    Pass,
    Pieces,
    Stage,
    hop_time,
    pieces_of,
    stages_of,
)
from tonnage.plan.traffic import FIRST, FULLEST, LAST


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step is predicted to move, take and need.

    Attributes:
        model: the model.
        cluster: the cluster.
        layout: the layout.
        batch: the batch.
        seconds: of one optimizer step.
        parts: how the seconds are spent on the stage that sets the pace; they add up to ``seconds``.
        memory: bytes on the fullest card, by use.
        memory_stage: ``first``, ``middle`` or ``last``: where that card is.
        ledger: every collective of a rank of the first, fullest and last stage.
        simulated: the step's events.
        convention: how ``mfu`` counts FLOP.
        mfu: share of the peak of the precision's matrix units.
        peak: that peak, FLOP/s.
    """

    model: Model
    cluster: Cluster
    layout: Layout
    batch: Batch
    seconds: float
    parts: dict[str, float]
    memory: dict[str, float]
    memory_stage: str
    ledger: Ledger
    simulated: Simulated
    convention: str
    mfu: float
    peak: float

    @property
    def memory_total(self) -> float:
        """Bytes on the fullest card."""
        return sum(self.memory.values())

    @property
    def memory_reserved(self) -> float:
        """Of these, what the framework's allocator holds: all but driver, kernels and NCCL."""
        return self.memory_total - self.memory["context"]

    @property
    def fits(self) -> bool:
        """Whether the fullest card's memory suffices."""
        return self.memory_total <= self.cluster.device.memory

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole cluster."""
        return self.batch.tokens / self.seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens per second of one card."""
        return self.tokens_per_second / self.cluster.num_devices

    def device_hours(self, tokens: float) -> float:
        """Card hours of training on that many tokens."""
        return tokens / self.tokens_per_second_per_device / 3600


def predict(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    batch: Batch,
    *,
    convention: str = flops.DEFAULT,
    must_fit: bool = False,
) -> Prediction:
    """The predicted step.

    Args:
        model: what is trained.
        cluster: on what.
        layout: how it is laid out; its degrees must multiply to the cluster's cards.
        batch: sequences a step and tokens a sequence.
        convention: how FLOP are counted for the MFU.
        must_fit: refuse what needs more memory than a card has.

    Raises:
        LayoutError: parts don't fit each other, with the nearest legal choice.
    """
    check(layout, model, batch, num_devices=cluster.num_devices)
    how = flops.convention(convention)
    grid = grid_of([layout], model, batch)
    pieces = pieces_of(model, grid, cluster)
    three = stages_of(model, grid, cluster, pieces)
    plan = _step_plan(model, cluster, layout, grid, pieces, three)
    result = simulate(plan)
    parts = _parts(plan, result, three)
    memories = [stage_memory(model, grid, cluster, stage) for stage in (FIRST, FULLEST, LAST)]
    worst = int(np.argmax([float(m.total[0]) for m in memories]))
    rows = ledger_rows(model, cluster, layout, grid, parts, result)
    peak = cluster.device.peak(layout.recipe.precision)
    work = flops.flops_per_token(model, batch.seq, how, recompute=layout.recompute) * batch.tokens
    prediction = Prediction(
        model=model,
        cluster=cluster,
        layout=layout,
        batch=batch,
        seconds=result.seconds,
        parts=parts,
        memory=_memory(memories[worst]),
        memory_stage=("first", "middle", "last")[worst] if layout.pp > 1 else "only",
        ledger=Ledger.from_rows(
            rows,
            facts={
                "run": f"plan {model.name} on {cluster.name or cluster.device.name}",
                "world_size": layout.num_ranks,
                **_only_link(cluster, rows),
                "compute_time": parts["compute"] + parts["optimizer"],
                "notes": [
                    "predicted: a row sums a step's calls of one rank; start and stop give their length, "
                    "not their place"
                ],
            },
        ),
        simulated=result,
        convention=how.name,
        mfu=work / (result.seconds * cluster.num_devices * peak),
        peak=peak,
    )
    if must_fit and not prediction.fits:
        raise too_large(prediction)
    return prediction


def _only_link(cluster: Cluster, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The rate of the link, where there is but one: bytes over several can't be divided by a rate."""
    links = {row["link"] for row in rows if row.get("wire_nbytes")}
    if len(links) != 1:
        return {}
    rates = {"nic": cluster.nic.rate, "spine": cluster.spine.rate}
    return {"link_rate": rates.get(links.pop(), cluster.scaleup.rate)}


def _memory(memory: Memory) -> dict[str, float]:
    return {name: float(np.broadcast_to(getattr(memory, name), (1,))[0]) for name in MEMORY_PARTS}


def _step_plan(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    grid: Grid,
    pieces: Pieces,
    three: tuple[Stage, Stage, Stage],
) -> StepPlan:
    chunks = chunk_counts(layout, model)
    forward, backward = [], []
    for j, counts in enumerate(chunks):
        ends = (pieces.embedding if j == 0 else None, pieces.head if j == len(chunks) - 1 else None)
        stage = j % layout.pp
        role = _role(stage, layout.pp)
        one, two = _chunk_seconds(counts, ends, pieces, three[role], grid)
        forward.append(one)
        backward.append(two)
    roles = [three[_role(stage, layout.pp)] for stage in range(layout.pp)]
    first = [float(each.spread[0]) for each in roles]
    return StepPlan(
        forward=tuple(forward),
        backward=tuple(backward),
        stages=layout.pp,
        micro_batches=int(grid.m[0]),
        send=float(hop_time(model, grid, cluster)[0]),
        blocking_sends=not layout.recipe.overlap_p2p,
        reduce=tuple(float(each.reduce[0]) for each in roles),
        gather=tuple(first),
        optimizer=tuple(float(each.optimizer[0]) for each in roles),
        tied=float(three[FIRST].tied[0]),
        buckets=tuple(int(each.buckets[0]) for each in roles),
        overlap_reduce=layout.recipe.overlap_grad,
        overlap_gather=layout.recipe.overlap_param,
        overhead=STEP_OVERHEAD,
    )


def _role(stage: int, stages: int) -> int:
    if stage == 0:
        return FIRST
    return LAST if stage == stages - 1 else FULLEST


def _chunk_seconds(
    counts: Floats,
    ends: tuple[Pass | None, Pass | None],
    pieces: Pieces,
    stage: Stage,
    grid: Grid,
) -> tuple[float, float]:
    """Forward and backward seconds of one micro-batch in one chunk."""
    forward: list[float] = []
    backward: list[float] = []
    for number, each in [*zip(counts, pieces.layers, strict=True), *((1, end) for end in ends if end)]:
        one, two = (float(np.broadcast_to(value, (1,))[0]) for value in each.total)
        forward += [one] * int(number)
        backward += [two] * int(number)
    gather, back = float(stage.gather[0]), float(stage.gather_back[0])
    if not back:
        return sum(forward), sum(backward)
    if grid.recipe.overlap_param and grid.pp[0] == 1:
        layers = max(len(forward), 1)
        reduce = max(back - gather, 0.0)
        return (
            gathered_pass(forward, gather / layers, 0.0) + float(stage.slowed[0][0]),
            gathered_pass(backward[::-1], gather / layers, reduce / layers) + float(stage.slowed[1][0]),
        )
    share = len(forward) / max(float(stage.layers[0]), 1.0)
    shown = [float(each[0]) * share for each in stage.gathered]
    return sum(forward) + shown[0], sum(backward) + shown[1]


def _parts(plan: StepPlan, result: Simulated, three: tuple[Stage, Stage, Stage]) -> dict[str, float]:
    """The step's seconds by use, on the stage that is busiest."""
    pace = int(np.argmax(result.busy))
    stage = three[_role(pace, plan.stages)]
    total = {
        name: float(np.sum([v[0] for v in np.atleast_2d(_pair(stage.passes, name))]))
        for name in ("tp", "cp", "ep")
    }
    # The stage's own shares of a pass, scaled to what it was busy for.
    whole = float((stage.forward + stage.backward)[0])
    scale = result.busy[pace] / whole if whole else 0.0
    gathered = float((stage.gathered[0] + stage.gathered[1])[0])
    parts = {name: total[name] * scale for name in total}
    parts["dp"] = gathered * scale + result.shown[pace]
    parts["pp"] = result.sending[pace]
    parts["optimizer"] = plan.optimizer[pace]
    parts["compute"] = result.busy[pace] - sum(total.values()) * scale - gathered * scale
    parts["other"] = plan.overhead
    parts["bubble"] = max(0.0, result.seconds - sum(parts.values()))
    spent = sum(parts.values())
    # Rounding and the first gathers' overlap with the fill may overdraw by a little.
    parts["compute"] += result.seconds - spent
    return {name: parts[name] for name in PARTS}


def _pair(passes: Pass, name: str) -> list[Floats]:
    return [np.broadcast_to(value, (1,)) for value in getattr(passes, name)]


def too_large(prediction: Prediction) -> LayoutError:
    """Says what a card lacks, with the nearest layout that fits."""
    p = prediction
    near = nearest_fit(p.model, p.cluster, p.layout, p.batch)
    hint = (
        f"nearest that fits: {changes_text(p.layout, near)}; --search finds the fastest"
        if near
        else "--search says what does, or use more cards"
    )
    return LayoutError(
        f"{p.model.name} needs {p.memory_total / 2**30:.1f} GiB on its fullest card, "
        f"and {p.cluster.device.name} has {p.cluster.device.memory / 2**30:.1f} GiB",
        hint=hint,
    )
