"""A job of one rank: nothing moves, and the engine's other parts need not know."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tonnage.engine.transport.ticket import Buffers, Leg, Ticket


class LocalTransport:
    """See :class:`tonnage.engine.transport.Transport`."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.rank = 0
        self.world_size = 1
        self.ordered = False
        self.updates_early = False
        self.sent_nbytes = 0
        self._clock = clock
        self._buckets: list[Buffers] = []

    def stamp(self) -> object:
        """Seconds on the run's clock."""
        return self._clock()

    def seconds(self, stamp: object) -> float:
        """The stamp itself."""
        assert isinstance(stamp, float)
        return stamp

    def add_bucket(self, buffers: Buffers) -> None:
        """Remember it."""
        self._buckets.append(buffers)

    def clear_buckets(self) -> None:
        """Forget them."""
        self._buckets.clear()

    def wrote(self, index: int) -> None:
        """Nothing to note."""

    def start_reduce_scatter(self, index: int, then: Callable[[], None] | None = None) -> Ticket:
        """The mean over one rank is its own gradient."""
        assert then is None
        buffers = self._buckets[index]
        buffers.shard_gradient.copy_(buffers.gradient)
        return self._done("reduce-scatter", index)

    def planned_all_gather(self, index: int, priority: int) -> Ticket:
        """Updates wait for the end of the backward pass; nothing would hide under it."""
        raise NotImplementedError

    def start_all_gather(self, index: int, priority: int, ticket: Ticket | None = None) -> Ticket:
        """The only shard is there already."""
        return self._done("all-gather", index)

    def start_all_reduce(self, index: int) -> Ticket:
        """The sum over one rank is there already."""
        return self._done("all-reduce", index)

    def wait_received(self, ticket: Ticket) -> None:
        """It is."""

    def wait_sent(self, ticket: Ticket) -> None:
        """It is."""

    def exchange(self, values: torch.Tensor) -> torch.Tensor:
        """One row: our own."""
        return values.unsqueeze(0)

    def broadcast(self, tensors: list[torch.Tensor]) -> int:
        """Nobody listens."""
        return 0

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Our own."""
        return [data]

    def close(self) -> None:
        """Nothing runs."""

    def _done(self, leg: Leg, index: int) -> Ticket:
        buffers = self._buckets[index]
        now = self._clock()
        return Ticket(
            leg, buffers.label, buffers.gradient.nbytes, 0, 0, start=now, stop=now, received=True, sent=True
        )
