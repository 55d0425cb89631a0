r"""One step, event by event: a stream of computation and a stream of exchange on each stage.

A task has a stream, a length and the tasks that it waits for; streams work in the order of issue.
From that follow the bubble, what gradients and parameters still show, and the timeline.

The order on a stage is 1F1B (Narayanan et al., 2104.04473, figure 4): some forward passes to fill the
pipeline, then one forward and one backward in turn, then the rest of the backward passes. With ``v``
chunks the passes go through groups of ``p`` micro-batches, chunk by chunk.

A long step repeats itself: only ``p`` micro-batches beyond the fill are simulated, and the rest is
added at the pace that the simulation reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A stretch on one stream.

    Attributes:
        stream: its number.
        seconds: its length.
        after: indices of the tasks that must have ended; all smaller than its own.
        label: what a person would call it.
    """

    stream: int
    seconds: float
    after: tuple[int, ...] = ()
    label: str = ""


def run(tasks: Sequence[Task], num_streams: int) -> tuple[list[float], list[float]]:
    """Start and stop of each task, when every stream works in the order given."""
    free = [0.0] * num_streams
    starts: list[float] = []
    stops: list[float] = []
    for task in tasks:
        start = free[task.stream]
        for other in task.after:
            start = max(start, stops[other])
        free[task.stream] = start + task.seconds
        starts.append(start)
        stops.append(free[task.stream])
    return starts, stops


def gathered_pass(compute: Sequence[float], gather: float, reduce: float, *, ahead: int = 2) -> float:
    """Seconds of a pass in which each layer's weights are gathered first, and gradients reduced after.

    Args:
        compute: seconds of each layer, in order of execution.
        gather: seconds of one layer's gather.
        reduce: seconds of one layer's reduction; 0 in a forward pass.
        ahead: layers that may be held gathered at once (FSDP's limit is two).
    """
    tasks: list[Task] = []
    worked: list[int] = []
    waiting = -1
    for i, seconds in enumerate(compute):
        room = (worked[i - ahead],) if i >= ahead else ()
        tasks.append(Task(stream=1, seconds=gather, after=room))
        gathered = len(tasks) - 1
        # The gather of this layer goes out before the reduction of the one before it.
        if waiting >= 0 and reduce:
            tasks.append(Task(stream=1, seconds=reduce, after=(waiting,)))
        tasks.append(Task(stream=0, seconds=seconds, after=(gathered,)))
        waiting = len(tasks) - 1
        worked.append(waiting)
    if reduce:
        tasks.append(Task(stream=1, seconds=reduce, after=(waiting,)))
    return max(run(tasks, 2)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a step consists of, as seconds.

    Attributes:
        forward: of each chunk in order, one micro-batch; chunk ``j`` is on stage ``j % stages``.
        backward: the same backward.
        stages: pipeline stages.
        micro_batches: how many a step.
        send: of handing an activation on.
        blocking_sends: whether a stage stands still while it sends.
        reduce: of each stage's gradients, in all.
        gather: of each stage's parameters, in all.
        optimizer: of each stage's update.
        tied: of adding up a tied embedding, on the ends.
        buckets: parts of each stage's reduction.
        overlap_reduce: whether parts go out while the last backward pass runs.
        overlap_gather: whether parts come in while the first forward pass runs.
        overhead: of what belongs to no part.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    stages: int
    micro_batches: int
    send: float = 0.0
    blocking_sends: bool = False
    reduce: tuple[float, ...] = ()
    gather: tuple[float, ...] = ()
    optimizer: tuple[float, ...] = ()
    tied: float = 0.0
    buckets: tuple[int, ...] = ()
    overlap_reduce: bool = True
    overlap_gather: bool = True
    overhead: float = 0.0

    @property
    def virtual(self) -> int:
        """Chunks a stage."""
        return len(self.forward) // self.stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A stretch of the simulated step, for the timeline."""

    stage: int
    lane: str
    start: float
    stop: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The step as it came out.

    Attributes:
        seconds: the whole step.
        busy: seconds that each stage computed, all micro-batches.
        shown: seconds that each stage waited for gradients and parameters.
        sending: seconds that each stage stood still sending.
        events: what happened, of the micro-batches that were simulated.
        simulated: how many micro-batches these are.
    """

    seconds: float
    busy: tuple[float, ...]
    shown: tuple[float, ...]
    sending: tuple[float, ...]
    events: list[Event] = field(default_factory=list)
    simulated: int = 0


def simulate(plan: StepPlan) -> Simulated:
    """The step of this plan; long ones are simulated in part and continued at the pace reached."""
    p, v, m = plan.stages, plan.virtual, plan.micro_batches
    # A multiple of p keeps whole groups whole; the pace is measured over the last group.
    short = (2 + v) * p
    if m <= short + 2 * p:
        return _simulate(plan, m)
    short += (m - short) % p
    one, two = _simulate(plan, short), _simulate(plan, short + p, shown=False)
    pace = (two.seconds - one.seconds) / p
    rest = m - short
    return Simulated(
        seconds=one.seconds + rest * pace,
        busy=_more(one.busy, two.busy, rest / p),
        shown=one.shown,
        sending=_more(one.sending, two.sending, rest / p),
        events=one.events,
        simulated=short,
    )


def _more(one: tuple[float, ...], two: tuple[float, ...], times: float) -> tuple[float, ...]:
    return tuple(a + (b - a) * times for a, b in zip(one, two, strict=True))


def stage_order(stage: int, *, stages: int, virtual: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """What a stage does in turn: ``("F" or "B", chunk of the model, micro-batch)``."""
    # What is over joins the last group: a group shorter than the pipeline would lock it up.
    cuts = [*range(0, max(micro_batches - stages, 0) + 1, stages), micro_batches]
    groups = [range(a, b) for a, b in itertools.pairwise(cuts)]
    if virtual == 1:
        ahead = stages - stage - 1
    else:
        ahead = (stages - stage - 1) * 2 + (virtual - 1) * max(len(group) for group in groups)
    fill = min(ahead, micro_batches * virtual)
    chunks = [stage + j * stages for j in range(virtual)]
    forward = [("F", chunk, mb) for group in groups for chunk in chunks for mb in group]
    backward = [("B", chunk, mb) for group in groups for chunk in reversed(chunks) for mb in group]
    order = forward[:fill]
    for i, one in enumerate(forward[fill:]):
        order += [one, backward[i]]
    return order + backward[len(forward) - fill :]


def _simulate(plan: StepPlan, micro_batches: int, *, shown: bool = True) -> Simulated:
    return _Builder(plan, micro_batches).result(shown=shown)


class _Builder:
    """Issues the tasks of all stages in an order in which nothing waits for what comes later."""

    def __init__(self, plan: StepPlan, micro_batches: int) -> None:
        self.plan, self.m = plan, micro_batches
        self.tasks: list[Task] = []
        self.where: list[tuple[int, str]] = []
        self.done: dict[tuple[str, int, int], int] = {}
        self.reduced: list[list[int]] = [[] for _ in range(plan.stages)]
        self.first_gather: list[list[int]] = [[] for _ in range(plan.stages)]
        self.last_chunk = len(plan.forward) - 1

    def add(self, stage: int, lane: str, seconds: float, after: Sequence[int], label: str) -> int:
        stream = stage * 2 + (lane != "compute")
        self.tasks.append(Task(stream=stream, seconds=seconds, after=tuple(after), label=label))
        self.where.append((stage, lane))
        return len(self.tasks) - 1

    def result(self, *, shown: bool) -> Simulated:
        plan = self.plan
        for stage in range(plan.stages):
            self._gather(stage)
        orders = [
            stage_order(s, stages=plan.stages, virtual=plan.virtual, micro_batches=self.m)
            for s in range(plan.stages)
        ]
        at = [0] * plan.stages
        moved = True
        while moved:
            moved = False
            for stage, order in enumerate(orders):
                while at[stage] < len(order) and self._ready(order[at[stage]]):
                    self._issue(stage, order[at[stage]])
                    at[stage] += 1
                    moved = True
        assert all(i == len(order) for i, order in zip(at, orders, strict=True)), "the schedule locked up"
        ends = [self._end(stage) for stage in range(plan.stages)]
        starts, stops = run(self.tasks, plan.stages * 3)
        return self._collect(starts, stops, ends, shown=shown)

    def _needs(self, op: tuple[str, int, int]) -> tuple[str, int, int] | None:
        way, chunk, mb = op
        if way == "F":
            return ("F", chunk - 1, mb) if chunk else None
        return ("B", chunk + 1, mb) if chunk < self.last_chunk else ("F", chunk, mb)

    def _ready(self, op: tuple[str, int, int]) -> bool:
        need = self._needs(op)
        return need is None or need in self.done

    def _issue(self, stage: int, op: tuple[str, int, int]) -> None:
        plan = self.plan
        way, chunk, mb = op
        need = self._needs(op)
        after = [self.done[need]] if need else []
        seconds = (plan.forward if way == "F" else plan.backward)[chunk]
        if way == "F" and chunk == stage and mb == 0 and self.first_gather[stage]:
            task = self._in_parts(stage, op, seconds, after, gathers=self.first_gather[stage])
        elif way == "B" and mb == self.m - 1 and chunk == stage and plan.overlap_reduce:
            task = self._in_parts(stage, op, seconds, after, gathers=[])
        else:
            task = self.add(stage, "compute", seconds, after, f"{way}{mb}")
        further = chunk < self.last_chunk if way == "F" else chunk > 0
        if further and plan.stages > 1 and plan.send:
            lane = "compute" if plan.blocking_sends else "exchange"
            # Sends of a free stream must not queue behind gradients; they are a delay of their own.
            if lane == "compute":
                task = self.add(stage, lane, plan.send, [task], "send")
            else:
                self.tasks.append(
                    Task(stream=2 * plan.stages + stage, seconds=plan.send, after=(task,), label="send")
                )
                self.where.append((stage, "send"))
                task = len(self.tasks) - 1
        self.done[op] = task

    def _in_parts(
        self, stage: int, op: tuple[str, int, int], seconds: float, after: list[int], gathers: list[int]
    ) -> int:
        """A pass cut into buckets, each after its gather or followed by its reduction."""
        plan = self.plan
        count = len(gathers) or self._buckets(stage)
        reduce = plan.reduce[stage] if plan.reduce and not gathers else 0.0
        task = -1
        for i in range(count):
            waits = [*after, *gathers[i : i + 1]]
            task = self.add(stage, "compute", seconds / count, waits, f"{op[0]}{op[2]}")
            if reduce:
                self.reduced[stage].append(self.add(stage, "exchange", reduce / count, [task], "gradients"))
        return task

    def _buckets(self, stage: int) -> int:
        # More than a few dozen parts change nothing and cost time.
        return min(max(self.plan.buckets[stage], 1), 32) if self.plan.buckets else 1

    def _gather(self, stage: int) -> None:
        plan = self.plan
        whole = plan.gather[stage] if plan.gather else 0.0
        if not whole:
            return
        count = self._buckets(stage) if plan.overlap_gather else 1
        for _ in range(count):
            self.first_gather[stage].append(self.add(stage, "exchange", whole / count, [], "parameters"))

    def _end(self, stage: int) -> int:
        """Gradients that did not overlap, the tied embedding, the update; returns the last task."""
        plan = self.plan
        reduce = plan.reduce[stage] if plan.reduce else 0.0
        final = self.done[("B", stage, self.m - 1)]
        if reduce and not plan.overlap_reduce:
            self.reduced[stage].append(self.add(stage, "exchange", reduce, [final], "gradients"))
        waits = [final, *self.reduced[stage]]
        if plan.tied and stage in (0, plan.stages - 1):
            waits.append(self.add(stage, "exchange", plan.tied, waits, "tied"))
        update = plan.optimizer[stage] if plan.optimizer else 0.0
        return self.add(stage, "compute", update, waits, "optimizer")

    def _collect(self, starts: list[float], stops: list[float], ends: list[int], *, shown: bool) -> Simulated:
        plan = self.plan
        busy = [0.0] * plan.stages
        sending = [0.0] * plan.stages
        for (stage, lane), task in zip(self.where, self.tasks, strict=True):
            if lane == "compute" and task.label != "optimizer":
                (sending if task.label == "send" else busy)[stage] += task.seconds
        waited = []
        for stage in range(plan.stages):
            final = stops[self.done[("B", stage, self.m - 1)]]
            late = starts[ends[stage]] - final
            first = self.first_gather[stage]
            early = 0.0
            if first:
                # What the first pass took longer than it computes was waiting for its parameters.
                done = stops[self.done[("F", stage, 0)]]
                early = max(0.0, min(done - plan.forward[stage], stops[first[-1]]))
                early = early if stage == 0 else min(early, stops[first[0]])
            waited.append(late + early)
        events = [
            Event(stage=stage, lane=lane, start=starts[i], stop=stops[i], label=self.tasks[i].label)
            for i, (stage, lane) in enumerate(self.where)
            if shown and stops[i] > starts[i]
        ]
        return Simulated(
            seconds=max(stops[i] for i in ends) + plan.overhead,
            busy=tuple(busy),
            shown=tuple(waited),
            sending=tuple(sending),
            events=events,
            simulated=self.m,
        )


def text_timeline(result: Simulated, stages: int, *, width: int = 100, most: int = 8) -> list[str]:
    """The simulated step as lines of text: a row a stage, a column a slice of time.

    ``F`` and ``B`` are forward and backward, ``g`` gradients or parameters that show, ``o`` the
    optimizer, ``s`` a blocking send, ``.`` waiting.
    """
    end = max((event.stop for event in result.events), default=0.0)
    if end <= 0:
        return []
    picked = (
        range(stages)
        if stages <= most
        else sorted({round(i * (stages - 1) / (most - 1)) for i in range(most)})
    )
    lines = []
    for stage in picked:
        row = np.full(width, ".", dtype="<U1")
        for lane in ("exchange", "compute"):
            for event in result.events:
                if event.stage == stage and event.lane == lane:
                    left, right = int(event.start / end * width), int(np.ceil(event.stop / end * width))
                    row[left : max(right, left + 1)] = _mark(event)
        lines.append(f"stage {stage:>3} |{''.join(row)}|")
    return lines


def _mark(event: Event) -> str:
    if event.lane == "exchange":
        return "g"
    return {"optimizer": "o", "send": "s"}.get(event.label, event.label[:1])
