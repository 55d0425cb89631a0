"""What the engine did, as rows of a ledger.

Rows of a step are written one step later: by then its all-gathers, hidden under the next forward
pass, have ended, and on CUDA its events have happened, so that reading them blocks nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tonnage.engine.transport import Ticket, Transport
from tonnage.ledger import Ledger, Recorder

RECENT = 10
"""Written steps that are kept at hand."""

_KINDS = {"reduce-scatter": "gradient", "all-reduce": "gradient", "all-gather": "parameter"}


@dataclass(slots=True, eq=False)
class _Step:
    number: int
    start: object
    stop: object = None
    compute: list[tuple[str, object, object]] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)


class StepLog:
    """Follows one rank through its steps.

    Args:
        transport: whose stamps these are.
        link: the link level that transfers cross, for the ledger.

    ``recent`` has the last written steps: number, seconds, and seconds of them that waited for transfers.
    """

    def __init__(self, transport: Transport, *, link: str) -> None:
        self._transport = transport
        self._link = link
        self._recorder = Recorder(transport.rank)
        self._steps: deque[_Step] = deque()
        self._current: _Step | None = None
        self._open: tuple[str, object] | None = None
        self.step = 0
        self.recent: deque[tuple[int, float, float]] = deque(maxlen=RECENT)

    def begin_step(self) -> None:
        """The step begins, unless one has begun."""
        if self._current is None:
            self._current = _Step(self.step, self._transport.stamp())

    def end_step(self) -> None:
        """The step is over; the next begins at once. Rows of the step before it are written."""
        self.end_compute()
        if self._current is None:
            return
        now = self._transport.stamp()
        self._current.stop = now
        self._steps.append(self._current)
        self.step += 1
        self._current = _Step(self.step, now)
        while len(self._steps) > 1:
            self._write(self._steps.popleft())

    @property
    def between_steps(self) -> bool:
        """Whether the last step has ended, and nothing of the next one was computed."""
        return self._open is None and (self._current is None or not self._current.compute)

    def last_seconds(self) -> float:
        """What the last ended step took; 0 before there is one."""
        if not self._steps:
            return 0.0
        seconds, last = self._transport.seconds, self._steps[-1]
        return seconds(last.stop) - seconds(last.start)

    def pause(self) -> None:
        """The last step lasts until now, and the next one begins with its forward pass."""
        if self._steps and self._current is not None and not self._current.compute and self._open is None:
            self._steps[-1].stop = self._transport.stamp()
            self._current = None

    def begin_compute(self, op: str) -> None:
        """From now on the rank computes ``op``."""
        self.end_compute()
        self._open = (op, self._transport.stamp())

    def end_compute(self) -> None:
        """What was computed has ended."""
        if self._open is not None and self._current is not None:
            op, start = self._open
            self._current.compute.append((op, start, self._transport.stamp()))
        self._open = None

    def waited(self, ticket: Ticket, num_before: int) -> None:
        """Computation stood still for ``ticket``: cut the stretch out of the running computation."""
        if self._open is None or self._current is None:
            return
        for start, stop in ticket.exposed[num_before:]:
            op, begun = self._open
            self._current.compute.append((op, begun, start))
            self._open = (op, stop)

    def transfer(self, ticket: Ticket) -> None:
        """A transfer of this step has been started."""
        self.begin_step()
        assert self._current is not None
        self._current.tickets.append(ticket)

    def broadcast(self, kind: str, nbytes: int, wire: int, start: object, stop: object, *, step: int) -> None:
        """Values of rank 0 were handed to all, while computation stood still."""
        channel = self._recorder.channel(
            kind, "broadcast", group_size=self._transport.world_size, link=self._link
        )
        begun, ended = self._transport.seconds(start), self._transport.seconds(stop)
        self._recorder.add(channel, step, nbytes, wire, begun, ended, ended - begun)

    def tuned(self, wire: int, start: object, stop: object, *, step: int) -> None:
        """Links were measured, and state was moved to other buckets, before this step."""
        channel = self._recorder.channel(
            "control", "all-to-all", group_size=self._transport.world_size, link=self._link, label="tuning"
        )
        begun, ended = self._transport.seconds(start), self._transport.seconds(stop)
        self._recorder.add(channel, step, wire, wire, begun, ended, ended - begun)

    def ledger(self, facts: Mapping[str, Any]) -> Ledger:
        """All ended steps of this rank; their transfers must have been waited for."""
        while self._steps:
            self._write(self._steps.popleft())
        return self._recorder.ledger(facts)

    def _write(self, step: _Step) -> None:
        seconds = self._transport.seconds
        add = self._recorder.add
        channel = self._recorder.channel
        add(channel("step", "step"), step.number, 0, 0, seconds(step.start), seconds(step.stop))
        waited = sum(seconds(b) - seconds(a) for ticket in step.tickets for a, b in ticket.exposed)
        self.recent.append((step.number, seconds(step.stop) - seconds(step.start), waited))
        for op, start, stop in step.compute:
            add(channel("compute", op, link="device"), step.number, 0, 0, seconds(start), seconds(stop))
        for ticket in step.tickets:
            add(
                channel(
                    _KINDS[ticket.leg],
                    ticket.leg,
                    group_size=self._transport.world_size,
                    link=self._link,
                    label=ticket.label,
                ),
                step.number,
                ticket.nbytes,
                ticket.wire_nbytes,
                seconds(ticket.start),
                seconds(ticket.stop),
                sum(seconds(b) - seconds(a) for a, b in ticket.exposed),
            )
