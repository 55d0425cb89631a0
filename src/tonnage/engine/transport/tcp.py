"""Buckets over TCP: direct exchange between CPUs.

Gloo's own reduce-scatter moves a whole all-reduce (``2 (n-1)/n`` of the tensor, not ``(n-1)/n``), and its
point-to-point messages can only be waited for one by one, in an order that has to be guessed. So the
exchange is ours, over :mod:`~tonnage.engine.transport.mesh`: every rank sends each peer that peer's
shard, and adds up what arrives in rank order; the same bits on every rank and in every run.

- *What arrives is known in any order*, so a module waits for its own bucket and for no other.
- *One thread writes.* Priorities and order are decided in one place, between chunks.
- *One thread adds up*, and where the optimizer may, updates the shard at once and hands it on. It also
  packs and unpacks what is compressed, so that one bucket is packed while another is on its way.
- *No receive needs to be posted.* A peer sends a bucket's gradients of the next step only after it has
  our parameters of this one, which we sent after our sum: so the memory they land in is free.

All waits end: with the data, with a :class:`RankFailure` that names the rank, or by the time limit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tonnage.engine.health import Health, Verdict
from tonnage.engine.transport.group import broadcast_wire_nbytes, children
from tonnage.engine.transport.mesh import Mesh, Outgoing
from tonnage.engine.transport.packed import Coded, Packed, Packing, Projected, Projection, Sends
from tonnage.engine.transport.ticket import Buffers, Leg, Ticket
from tonnage.errors import EngineError, RankFailure

_GRADIENTS, _WHOLE, _MAIL = 1 << 60, 2 << 60, 3 << 60
_URGENT, _SOON = -2, -1
"""Priorities of blocking collectives and of gradients; parameters have theirs, from 0 on."""


@dataclass(slots=True, eq=False)
class _Leg:
    """One half of a bucket's way.

    ``pack`` says what goes to whom, and does it on the adding thread if that ``takes_time``; ``finish``
    runs there when all has arrived.
    """

    key: int
    pack: Callable[[], Sends]
    takes_time: bool
    finish: Callable[[], None] | None
    arrived: set[int] = field(default_factory=set)
    ticket: Ticket | None = None
    then: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class _Bucket:
    buffers: Buffers
    gradients: _Leg
    whole: _Leg


class TcpTransport:
    """See :class:`tonnage.engine.transport.Transport`; ``health`` tells who is at fault.

    Args:
        open_mesh: opens the connections, given who is told of messages.
        rank: this rank.
        world_size: ranks of the group.
        health: finds out who hangs.
        timeout: seconds a wait may take.
        clock: seconds of the run.

    ``poisons`` fills with NaN what was received of others, as soon as it was added up.
    """

    def __init__(
        self,
        open_mesh: Callable[[TcpTransport], Mesh],
        *,
        rank: int,
        world_size: int,
        health: Health | None,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.ordered = False
        self.updates_early = True
        self.sent_nbytes = 0
        self.poisons = False
        self._health = health
        self._timeout = timeout
        self._clock = clock
        self._peers = [(rank + i) % world_size for i in range(1, world_size)]
        self._num_threads = torch.get_num_threads()
        # Everything below is shared by the threads and guarded by `_changed`.
        self._changed = threading.Condition()
        self._buckets: list[_Bucket] = []
        self._leg_of: dict[int, tuple[_Bucket, _Leg]] = {}
        self._mail: dict[tuple[int, int], bytearray] = {}
        self._num_mails = 0
        self._open: dict[Ticket, _Bucket] = {}
        self._failure: Verdict | None = None
        self._lost: dict[int, str] = {}
        self._closing = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._adder = threading.Thread(target=self._guard, name="tonnage-add", daemon=True)
        self._mesh = open_mesh(self)
        self._adder.start()

    # What the engine calls.

    def stamp(self) -> object:
        """Seconds on the run's clock."""
        return self._clock()

    def seconds(self, stamp: object) -> float:
        """The stamp itself."""
        assert isinstance(stamp, float)
        return stamp

    def add_bucket(self, buffers: Buffers) -> None:
        """Lay out the messages of a bucket, and where those of others land."""
        index = len(self._buckets)
        gradients, whole = _GRADIENTS | index, _WHOLE | index
        if buffers.packing is None:
            bucket = self._plain(buffers, gradients, whole)
        else:
            bucket = self._packed(buffers, buffers.packing, gradients, whole)
        with self._changed:
            self._leg_of[gradients] = bucket, bucket.gradients
            self._leg_of[whole] = bucket, bucket.whole
            self._buckets.append(bucket)

    def clear_buckets(self) -> None:
        """Forget them, and where messages of others land.

        A rank that is ahead may send into buckets laid out anew only when all ranks have laid them out:
        there must be an exchange between that and the first transfer.
        """
        with self._changed:
            for key in self._leg_of:
                for peer in self._peers:
                    self._mesh.unplace(peer, key)
            self._leg_of.clear()
            self._buckets.clear()

    def wrote(self, index: int) -> None:
        """On the CPU a write is over when its call returns."""

    def start_reduce_scatter(self, index: int, then: Callable[[], None] | None = None) -> Ticket:
        """Send each peer its shard of our gradients; ``then`` runs when the mean is there."""
        bucket = self._buckets[index]
        return self._begin(bucket, bucket.gradients, self._ticket(bucket, "reduce-scatter", _SOON), then)

    def start_all_gather(self, index: int, priority: int, ticket: Ticket | None = None) -> Ticket:
        """Send every peer our shard of the parameters."""
        bucket = self._buckets[index]
        ticket = ticket or self._ticket(bucket, "all-gather", priority)
        return self._begin(bucket, bucket.whole, ticket)

    def planned_all_gather(self, index: int, priority: int) -> Ticket:
        """A ticket to wait on for an all-gather that ``start_all_gather`` will be given later."""
        return self._ticket(self._buckets[index], "all-gather", priority)

    def start_all_reduce(self, index: int) -> Ticket:
        """A reduce-scatter and an all-gather of the gradients, in place."""
        bucket = self._buckets[index]
        ticket = self._ticket(bucket, "all-reduce", _SOON)
        first = self._ticket(bucket, "reduce-scatter", _SOON)

        def then() -> None:
            ticket.start = first.start
            ticket.wire_nbytes += first.wire_nbytes
            self._begin(bucket, bucket.whole, ticket)

        self._begin(bucket, bucket.gradients, first, then)
        return ticket

    def wait_received(self, ticket: Ticket) -> None:
        """Block until the data is there, noting how long."""
        if not ticket.received:
            start = self._clock()
            self._wait(lambda: ticket.received, f"{ticket.leg} of bucket {ticket.label}", ticket)
            ticket.exposed.append((start, self._clock()))

    def wait_sent(self, ticket: Ticket) -> None:
        """Block until our data has left."""
        if not ticket.sent:
            self._wait(lambda: ticket.sent, f"{ticket.leg} of bucket {ticket.label}", ticket)

    def exchange(self, values: torch.Tensor) -> torch.Tensor:
        """All-gather a small vector."""
        key = self._next_mail()
        mine = _bytes_of(values.contiguous())
        for peer in self._peers:
            self._hand_over(peer, Outgoing(key, mine), _URGENT)
        rows = [
            values if r == self.rank else _tensor(self._receive(r, key), values)
            for r in range(self.world_size)
        ]
        return torch.stack(rows)

    def broadcast(self, tensors: list[torch.Tensor]) -> int:
        """Rank 0's values to all, along a binomial tree."""
        wire = 0
        for tensor in tensors:
            key = self._next_mail()
            above = self.rank - (1 << (self.rank.bit_length() - 1)) if self.rank else 0
            if self.rank:
                tensor.copy_(_tensor(self._receive(above, key), tensor))
            sent = tensor.clone(memory_format=torch.contiguous_format)
            for peer in children(self.rank, self.world_size):
                self._hand_over(peer, Outgoing(key, _bytes_of(sent)), _URGENT)
            wire += broadcast_wire_nbytes(tensor.nbytes, rank=self.rank, world_size=self.world_size)
        return wire

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Everybody's bytes on rank 0."""
        key = self._next_mail()
        if self.rank:
            self._hand_over(0, Outgoing(key, memoryview(data)), _URGENT)
            return None
        return [data, *(bytes(self._receive(peer, key)) for peer in range(1, self.world_size))]

    def close(self) -> None:
        """Let what runs end, then stop the threads."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._work.put(None)
        self._adder.join(self._timeout)
        self._mesh.close(self._timeout)
        if self._health is not None:
            self._health.close()

    # What the mesh tells, on its thread.

    def arrived(self, peer: int, key: int, data: bytearray | None) -> None:
        """A message is whole."""
        with self._changed:
            if data is not None:
                self._mail[peer, key] = data
                self._changed.notify_all()
                return
            bucket, leg = self._leg_of[key]
            assert peer not in leg.arrived, f"rank {peer} sent key {key:x} twice"
            leg.arrived.add(peer)
            self._complete_if_whole(bucket, leg)

    def lost(self, peer: int, reason: str) -> None:
        """A connection broke."""
        with self._changed:
            self._lost.setdefault(peer, reason)
            self._changed.notify_all()

    def _hand_over(self, peer: int, message: Outgoing, priority: int) -> None:
        with self._changed:
            self.sent_nbytes += len(message.memory)
        self._mesh.send(peer, message, priority)

    # Legs.

    def _plain(self, buffers: Buffers, gradients: int, whole: int) -> _Bucket:
        """A bucket that travels as it is."""
        size = buffers.gradient.numel() // self.world_size
        sharded = buffers.shard_gradient.numel() > 0
        summed = buffers.shard_gradient if sharded else torch.empty_like(buffers.gradient[:size])
        handed_on = buffers.parameter if sharded else buffers.gradient
        # Where gradients are averaged in place, the own part is both a summand and the sum's place.
        own = _part(handed_on, self.rank, size)
        scratch = torch.empty((self.world_size - 1, size), dtype=buffers.gradient.dtype)
        arrived = dict(zip(self._peers, scratch, strict=True))
        for peer in self._peers:
            self._mesh.place(peer, gradients, _bytes_of(arrived[peer]))
            self._mesh.place(peer, whole, _bytes_of(_part(handed_on, peer, size)))
        in_rank_order = [
            arrived[r] if r in arrived else _part(buffers.gradient, r, size) for r in range(self.world_size)
        ]
        shards = [(p, _bytes_of(_part(buffers.gradient, p, size))) for p in self._peers]
        owned = [(p, _bytes_of(own)) for p in self._peers]

        def mean() -> None:
            average(in_rank_order, out=summed)
            if self.poisons:  # before anything leaves that would let a peer send the next step's
                scratch.fill_(torch.nan)
            if not sharded:
                own.copy_(summed)

        return _Bucket(
            buffers,
            _Leg(gradients, lambda: shards, False, mean),
            _Leg(whole, lambda: owned, False, None),
        )

    def _packed(self, buffers: Buffers, packing: Packing | Projection, gradients: int, whole: int) -> _Bucket:
        """A bucket that travels in fewer bytes."""
        size = buffers.gradient.numel() // self.world_size
        packed: Packed
        if isinstance(packing, Projection):
            packed = Projected(packing, gradient=buffers.gradient, rank=self.rank, peers=self._peers)
        else:
            sharded = buffers.shard_gradient.numel() > 0
            packed = Coded(
                packing,
                gradient=buffers.gradient,
                parameter=buffers.parameter,
                summed=buffers.shard_gradient if sharded else torch.empty_like(buffers.gradient[:size]),
                rank=self.rank,
                peers=self._peers,
            )
        for peer in self._peers:
            self._mesh.place(peer, gradients, _bytes_of(packed.gradients_landing(peer)), exact=packed.exact)
            self._mesh.place(peer, whole, _bytes_of(packed.whole_landing(peer)), exact=packed.exact)
        return _Bucket(
            buffers,
            _Leg(gradients, packed.pack_gradients, True, packed.sum_gradients),
            _Leg(whole, packed.pack_whole, True, packed.unpack_whole),
        )

    def _ticket(self, bucket: _Bucket, leg: Leg, priority: int) -> Ticket:
        nbytes = bucket.buffers.gradient.nbytes
        # What a packed bucket sends is known when it has been packed.
        packed = bucket.buffers.packing is not None
        wire = 0 if packed else nbytes // self.world_size * (self.world_size - 1)
        ticket = Ticket(leg, bucket.buffers.label, nbytes, wire, priority)
        self._open[ticket] = bucket
        return ticket

    def _begin(
        self, bucket: _Bucket, leg: _Leg, ticket: Ticket, then: Callable[[], None] | None = None
    ) -> Ticket:
        with self._changed:
            self._raise_failure()
            assert leg.ticket is None, f"{ticket.leg} of bucket {ticket.label} begun twice"
            leg.ticket, leg.then = ticket, then
            if leg.takes_time:  # before what finishes this leg, which waits in the same queue
                self._work.put(lambda: self._send(leg, ticket))
            self._complete_if_whole(bucket, leg)
        if not leg.takes_time:
            self._send(leg, ticket)
        return ticket

    def _send(self, leg: _Leg, ticket: Ticket) -> None:
        sends = leg.pack()
        if leg.takes_time:
            ticket.wire_nbytes += sum(len(memory) for _, memory in sends)
        unsent = [len(sends)]

        def begun() -> None:
            if ticket.start is None:
                ticket.start = self._clock()

        def done() -> None:
            with self._changed:
                unsent[0] -= 1
                if unsent[0] == 0:
                    ticket.sent = True
                    self._changed.notify_all()

        for peer, memory in sends:
            self._hand_over(peer, Outgoing(leg.key, memory, begun, done), ticket.priority)

    def _complete_if_whole(self, bucket: _Bucket, leg: _Leg) -> None:
        ticket = leg.ticket
        if ticket is None or len(leg.arrived) < len(self._peers):
            return
        leg.arrived.clear()
        leg.ticket = None
        if leg.finish is not None:
            self._work.put(lambda: self._finish(leg, ticket))
        else:
            self._tell_received(ticket)

    def _finish(self, leg: _Leg, ticket: Ticket) -> None:
        assert leg.finish is not None
        leg.finish()
        then, leg.then = leg.then, None
        with self._changed:
            self._tell_received(ticket)
        if then is not None:
            then()

    def _tell_received(self, ticket: Ticket) -> None:
        ticket.stop = self._clock()
        if ticket.start is None:  # all that others owed us came before our own first message left
            ticket.start = ticket.stop
        ticket.received = True
        self._open.pop(ticket, None)
        self._changed.notify_all()

    def _add(self) -> None:
        """The adding thread: packs and sums in the order in which buckets became ready and whole."""
        # OpenMP counts a thread's helpers by that thread: without this, one that was told to compute
        # alone would get a helper a core, and they would spin beside the other ranks'.
        torch.set_num_threads(self._num_threads)
        while (work := self._work.get()) is not None:
            work()

    # Mail, waiting, and what goes wrong.

    def _next_mail(self) -> int:
        self._raise_failure()
        if self._closing:
            raise EngineError(
                "this needs all ranks, and the engine was closed",
                hint="do it before model.close(), or before the process group ends",
            )
        self._num_mails += 1
        return _MAIL | self._num_mails

    def _receive(self, peer: int, key: int) -> bytearray:
        self._wait(lambda: (peer, key) in self._mail, "exchange", peer=peer)
        with self._changed:
            return self._mail.pop((peer, key))

    def _wait(
        self, done: Callable[[], bool], what: str, ticket: Ticket | None = None, peer: int | None = None
    ) -> None:
        """Block the calling thread until ``done``, a failure, or the time limit."""
        begun = time.monotonic()
        watching = False
        while True:
            with self._changed:
                if done():
                    break
                self._raise_failure()
                lost = next(iter(self._lost.items()), None)
                if lost is None:
                    self._changed.wait(0.25)
            waited = time.monotonic() - begun
            if lost is not None:
                self._fail(Verdict(rank=lost[0], reason=f"has died or left ({lost[1]}), met in the {what}"))
            elif waited > 1.0:
                watching = True
                self._look_for_culprit(what, waited, [peer] if peer is not None else self._late(ticket))
        if watching and self._health is not None:
            self._health.suspect(())

    def _late(self, ticket: Ticket | None) -> list[int]:
        """The peers whose part of this transfer, or of the one before it in its bucket, is missing."""
        bucket = self._open.get(ticket) if ticket is not None else None
        if bucket is None:
            return self._peers
        leg = bucket.gradients if bucket.gradients.ticket is not None else bucket.whole
        return [p for p in self._peers if p not in leg.arrived] or self._peers

    def _look_for_culprit(self, what: str, waited: float, late: list[int]) -> None:
        if self._health is not None:
            self._health.suspect(late)
            verdict = self._health.verdict()
            if verdict is not None:
                self._fail(verdict)
        if waited > self._timeout:
            culprit = late[0] if len(late) == 1 else -1
            self._fail(Verdict(rank=culprit, reason=f"has not taken part in the {what} for {waited:.0f} s"))

    def _fail(self, verdict: Verdict) -> None:
        if self._health is not None:
            verdict = self._health.publish(verdict)
        with self._changed:
            self._failure = self._failure or verdict
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            verdict = self._failure
            name = f"rank {verdict.rank}" if verdict.rank >= 0 else "some rank"
            raise RankFailure(
                f"{name} {verdict.reason}",
                ranks=(verdict.rank,) if verdict.rank >= 0 else (),
                where=f"noticed by rank {self.rank} of {self.world_size}",
                hint="look at that rank's own output; restart the job from its last checkpoint",
            )

    def _guard(self) -> None:
        """Run the adding thread; what ends it becomes the error of everyone who waits."""
        try:
            self._add()
        except RankFailure:
            pass
        except BaseException as error:  # a silent thread would leave the others waiting
            with self._changed:
                self._failure = self._failure or Verdict(rank=self.rank, reason=f"failed: {error!r}")
                self._changed.notify_all()


def average(parts: list[torch.Tensor], *, out: torch.Tensor) -> None:
    """Mean of ``parts`` in their order, into ``out``; the same bits on every rank and in every run.

    Half precision is added up in single precision: a sum of many bf16 values would lose its small ones.
    """
    scale = 1.0 / len(parts)
    if out.dtype in (torch.float16, torch.bfloat16):
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total += part
        out.copy_(total.mul_(scale))
        return
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
    out.mul_(scale)


def _part(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return whole[rank * size : (rank + 1) * size]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory, whatever its dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _tensor(data: bytearray, like: torch.Tensor) -> torch.Tensor:
    """``data`` as a tensor of the dtype and shape of ``like``."""
    return torch.frombuffer(data, dtype=like.dtype).view(like.shape) if data else torch.empty_like(like)
