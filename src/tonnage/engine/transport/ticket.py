"""What the rest of the engine holds of a transfer: a ticket to wait on, and what the transfer did.

A transfer is over in two senses. ``received``: what others owed us is there (and summed), so it may be
read. ``sent``: our own bytes have left, so their buffer may be written again. They come apart because
a link is duplex, and each use of a buffer waits for the one that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from tonnage.engine.transport.packed import Packing, Projection

Leg = Literal["reduce-scatter", "all-gather", "all-reduce", "flags"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One transfer of one bucket in one step.

    Attributes:
        label: bucket's name, for errors and ledgers.
        nbytes: payload (the whole bucket).
        wire_nbytes: bytes that this rank sends.
        priority: smaller goes first; a running transfer yields between chunks.
        start: when its first byte was handed over; a stamp of the transport's clock.
        stop: when the last byte was there and, for sums, added up.
        exposed: pairs of stamps between which computation stood still for it.
    """

    leg: Leg
    label: str
    nbytes: int
    wire_nbytes: int
    priority: int
    start: object = None
    stop: object = None
    received: bool = False
    sent: bool = False
    exposed: list[tuple[object, object]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Buffers:
    """The memory of one bucket on one rank. Allocated once, never freed while the model lives.

    ``gradient`` is written by autograd between a step's zeroing and its reduce-scatter, and belongs to
    the transport from ``start_*`` until the ticket is ``sent``. ``shard_gradient`` is written by the
    transport and may be read once the ticket is ``received``. Of ``parameter``, the own shard is
    written by the optimizer and the rest by the transport, from the start of the all-gather until its
    ticket is ``received``.

    Attributes:
        gradient: shape ``(numel,)``, this rank's own gradients.
        shard_gradient: shape ``(numel / world_size,)``, the mean over all ranks; empty unless sharded.
        parameter: shape ``(numel,)``, the parameters; empty unless sharded.
        packing: how it is compressed, if it is.
    """

    label: str
    gradient: torch.Tensor
    shard_gradient: torch.Tensor
    parameter: torch.Tensor
    packing: Packing | Projection | None = None


class Transport(Protocol):
    """Moves buckets between ranks. One thread or stream issues everything.

    ``ordered`` says that all ranks must start their transfers in the same order; ``updates_early`` that
    ``then`` runs as soon as the gradients are there, beside the computation; ``sent_nbytes`` counts what
    this rank was given to send, in buckets and exchanges.
    """

    rank: int
    world_size: int
    ordered: bool
    updates_early: bool
    sent_nbytes: int

    def stamp(self) -> object:
        """The present moment of the compute stream, to be resolved by :meth:`seconds`."""
        ...

    def seconds(self, stamp: object) -> float:
        """Seconds on the run's clock; blocks until the device has got there."""
        ...

    def add_bucket(self, buffers: Buffers) -> None:
        """Make a bucket known; called for each in order, before any transfer."""
        ...

    def clear_buckets(self) -> None:
        """Forget all buckets; every transfer has been received and sent by then, on this rank."""
        ...

    def wrote(self, index: int) -> None:
        """A gradient of this bucket was written on the current stream."""
        ...

    def start_reduce_scatter(self, index: int, then: Callable[[], None] | None = None) -> Ticket:
        """Begin to average the bucket's gradients into ``shard_gradient``.

        ``then`` runs when the mean is there, on a thread of the transport's; only if ``updates_early``.
        """
        ...

    def planned_all_gather(self, index: int, priority: int) -> Ticket:
        """The ticket of an all-gather that will be started from ``then``; only if ``updates_early``."""
        ...

    def start_all_gather(self, index: int, priority: int, ticket: Ticket | None = None) -> Ticket:
        """Begin to hand the own shard of ``parameter`` to all and take theirs."""
        ...

    def start_all_reduce(self, index: int) -> Ticket:
        """Begin to average the bucket's gradients in place."""
        ...

    def wait_received(self, ticket: Ticket) -> None:
        """Let computation go on only when the ticket is received; raises :class:`RankFailure`."""
        ...

    def wait_sent(self, ticket: Ticket) -> None:
        """Let the buffer be written only when the ticket is sent; raises :class:`RankFailure`."""
        ...

    def exchange(self, values: torch.Tensor) -> torch.Tensor:
        """Everybody's small vector, shape ``(world_size, len(values))``; blocks."""
        ...

    def broadcast(self, tensors: list[torch.Tensor]) -> int:
        """Overwrite with rank 0's values; blocks. Returns the bytes that this rank put on the wire."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Everybody's bytes on rank 0, ``None`` elsewhere; blocks."""
        ...

    def close(self) -> None:
        """Finish what runs, then stop. No transfer may be started afterwards."""
        ...
