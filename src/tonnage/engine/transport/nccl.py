"""Buckets over NCCL: the library's own collectives on one communication stream.

The host never blocks. A transfer begins when the communication stream has waited for an event on each
stream that wrote to the bucket (autograd may run a hook on another stream than the user's), and is
over for the compute stream when that has waited for the transfer's own event. All memory that is
communicated lives as long as the model, so no allocator can hand it on while it is still in use, and
``record_stream`` is not needed.

All ranks issue their transfers in the same order: NCCL requires it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tonnage.engine.transport.group import broadcast_wire_nbytes
from tonnage.engine.transport.ticket import Buffers, Leg, Ticket

# torch 2.13 renamed these two; the old names warn there, and the new ones are missing before.
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NcclTransport:
    """See :class:`tonnage.engine.transport.Transport`; stamps are CUDA events."""

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device, clock: Callable[[], float]) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.ordered = True
        self.updates_early = False
        self.sent_nbytes = 0
        self._group = group
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._buckets: list[Buffers] = []
        self._writers: list[set[torch.cuda.Stream]] = []
        # One synchronisation, here: the event and the clock then mark the same moment.
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record(torch.cuda.current_stream(device))
        self._zero.synchronize()
        self._zero_seconds = clock()

    def stamp(self) -> object:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, stamp: object) -> float:
        """When the event happened, on the run's clock; blocks until it has."""
        assert isinstance(stamp, torch.cuda.Event)
        stamp.synchronize()
        return self._zero_seconds + float(self._zero.elapsed_time(stamp)) / 1000

    def add_bucket(self, buffers: Buffers) -> None:
        """Remember its memory."""
        self._buckets.append(buffers)
        self._writers.append(set())

    def clear_buckets(self) -> None:
        """Forget their memory, when nothing works on it any more."""
        self._stream.synchronize()
        self._buckets.clear()
        self._writers.clear()

    def wrote(self, index: int) -> None:
        """A gradient was written on the current stream; the transfer will wait for it."""
        self._writers[index].add(torch.cuda.current_stream(self._device))

    def start_reduce_scatter(self, index: int, then: Callable[[], None] | None = None) -> Ticket:
        """Average into ``shard_gradient``; the own gradients stay as they are."""
        assert then is None
        buffers = self._buckets[index]
        return self._start(
            "reduce-scatter",
            index,
            (self.world_size - 1) * buffers.gradient.nbytes // self.world_size,
            lambda: _reduce_scatter(
                buffers.shard_gradient,
                buffers.gradient,
                op=dist.ReduceOp.AVG,
                group=self._group,
                async_op=True,
            ),
        )

    def planned_all_gather(self, index: int, priority: int) -> Ticket:
        """NCCL's order is the order of starting."""
        raise NotImplementedError

    def start_all_gather(self, index: int, priority: int, ticket: Ticket | None = None) -> Ticket:
        """In place: the own shard lies where it belongs in the whole."""
        buffers = self._buckets[index]
        size = buffers.shard_gradient.numel()
        own = buffers.parameter[self.rank * size : (self.rank + 1) * size]
        return self._start(
            "all-gather",
            index,
            (self.world_size - 1) * buffers.parameter.nbytes // self.world_size,
            lambda: _all_gather(buffers.parameter, own, group=self._group, async_op=True),
        )

    def start_all_reduce(self, index: int) -> Ticket:
        """Average in place; dividing first, as DDP does, keeps half precision from overflowing."""
        gradient = self._buckets[index].gradient

        def issue() -> Any:
            gradient.mul_(1.0 / self.world_size)
            return dist.all_reduce(gradient, group=self._group, async_op=True)

        return self._start(
            "all-reduce", index, 2 * (self.world_size - 1) * gradient.nbytes // self.world_size, issue
        )

    def wait_received(self, ticket: Ticket) -> None:
        """The compute stream goes on only after the transfer."""
        assert isinstance(ticket.stop, torch.cuda.Event)
        if not ticket.stop.query():
            before = self.stamp()
            torch.cuda.current_stream(self._device).wait_event(ticket.stop)
            ticket.exposed.append((before, self.stamp()))
        ticket.received = True

    def wait_sent(self, ticket: Ticket) -> None:
        """The same event: a collective has sent when it has ended."""
        assert isinstance(ticket.stop, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(ticket.stop)
        ticket.sent = True

    def exchange(self, values: torch.Tensor) -> torch.Tensor:
        """All-gather a small vector, ordered after what the compute stream did."""
        out = values.new_empty(self.world_size * values.numel())
        self.sent_nbytes += (self.world_size - 1) * values.nbytes
        self._on_stream(lambda: _all_gather(out, values.contiguous(), group=self._group, async_op=True))
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return out.view(self.world_size, -1)

    def broadcast(self, tensors: list[torch.Tensor]) -> int:
        """Rank 0's values to all."""
        for tensor in tensors:
            self._on_stream(
                lambda t=tensor: dist.broadcast(t, group_src=0, group=self._group, async_op=True)  # type: ignore[misc]
            )
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return sum(
            broadcast_wire_nbytes(t.nbytes, rank=self.rank, world_size=self.world_size) for t in tensors
        )

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Everybody's bytes on rank 0."""
        parts: list[bytes | None] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(data, parts, group=self._group, group_dst=0)
        return None if parts is None else [part or b"" for part in parts]

    def close(self) -> None:
        """Wait for the stream to end."""
        self._stream.synchronize()

    def _start(self, leg: Leg, index: int, wire: int, issue: Callable[[], Any]) -> Ticket:
        buffers = self._buckets[index]
        for stream in self._writers[index]:
            self._stream.wait_stream(stream)
        self._writers[index].clear()
        self.sent_nbytes += wire
        ticket = Ticket(leg, buffers.label, buffers.gradient.nbytes, wire, 0)
        ticket.start, ticket.stop = self._on_stream(issue)
        return ticket

    def _on_stream(self, issue: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Issue on the communication stream, after all that the current stream was given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            # On NCCL wait() makes this stream wait, not the host.
            issue().wait()
            stop.record(self._stream)
        return start, stop
