"""Buckets over Gloo: direct exchange by tagged point-to-point messages.

Gloo's own reduce-scatter moves a whole all-reduce (``2 (n-1)/n`` of the tensor, not ``(n-1)/n``), so
the exchange is ours: every rank sends each peer that peer's shard, and adds up what arrives in rank
order. What measurements of Gloo ask for, and why:

- *Receives first.* Two ranks share one TCP stream, and a receiver's "ready" queues behind its own data;
  a send that meets no posted receive runs the link at half duplex. So a bucket's receives are posted
  long before: for gradients as soon as the last sum was taken, for parameters as soon as the bucket's
  own gradients are ready.
- *One thread issues.* Priorities, order and the bounded number of messages in flight are decided in one
  place. A second thread only waits for receives and adds them up; it never issues.
- *Chunks.* A transfer yields to a more urgent one between chunks, never inside one.
- *No handle is dropped* before its wait: dropping an ``isend`` loses the message.

All waits end: with the data, with a :class:`RankFailure` that names the rank, or by the time limit.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tonnage.engine.health import Health, Verdict
from tonnage.engine.transport.group import broadcast_wire_nbytes
from tonnage.engine.transport.ticket import Buffers, Leg, Ticket
from tonnage.errors import EngineError, RankFailure

CHUNK_NBYTES = 1 << 20
"""Bytes a message: small enough to be overtaken soon, large enough that its cost does not show."""

IN_FLIGHT = 2
"""Messages to each peer that may be on their way: one being sent, one ready to follow."""

_TAG = {"reduce-scatter": 1 << 28, "all-gather": 2 << 28}
_LAST = 1 << 30
"""Priority of a blocking collective: behind all messages, since peers may need these to get to it."""

_MAX_BUCKETS = 1 << 14
_MAX_CHUNKS = 1 << 14

_Message = tuple[int, torch.Tensor, int]
"""Peer, the memory sent or written, tag."""

_Open = tuple[Any, int, str]
"""A handle of Gloo, the peer at the other end (-1: all), and what it carries, for errors."""

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Exchange:
    """One leg of one bucket: the same messages in every step."""

    leg: Leg
    label: str
    nbytes: int
    sends: list[_Message]
    receives: list[_Message]
    finish: Callable[[], None] | None = None
    posted: deque[_Open] | None = None


@dataclass(slots=True, eq=False)
class _Bucket:
    buffers: Buffers
    reduce_scatter: _Exchange | None = None
    all_gather: _Exchange | None = None
    expected: bool = False


class GlooTransport:
    """See :class:`tonnage.engine.transport.Transport`; ``health`` tells who is at fault."""

    def __init__(
        self, group: dist.ProcessGroup, *, health: Health | None, timeout: float, clock: Callable[[], float]
    ) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.ordered = False
        self._group = group
        self._health = health
        self._timeout = timeout
        self._clock = clock
        self._buckets: list[_Bucket] = []
        # Everything below is shared by the threads and guarded by `_changed`.
        self._changed = threading.Condition()
        self._jobs: list[tuple[int, int, Iterator[_Open]]] = []
        self._num_jobs = 0
        self._waiting: list[tuple[int, int, Ticket, _Exchange | deque[_Open]]] = []
        self._held: list[tuple[int, int, Ticket, _Exchange | deque[_Open]]] = []
        self._waits_for: int | None = None
        self._failure: Verdict | None = None
        self._closing = False
        self._issuer = threading.Thread(
            target=self._guard, args=(self._issue,), name="tonnage-issue", daemon=True
        )
        self._receiver = threading.Thread(
            target=self._guard, args=(self._receive,), name="tonnage-receive", daemon=True
        )
        self._issuer.start()
        self._receiver.start()

    # What the engine calls.

    def stamp(self) -> object:
        """Seconds on the run's clock."""
        return self._clock()

    def seconds(self, stamp: object) -> float:
        """The stamp itself."""
        assert isinstance(stamp, float)
        return stamp

    def add_bucket(self, buffers: Buffers) -> None:
        """Lay out the messages of a sharded bucket, and post the first receives of its gradients."""
        index = len(self._buckets)
        if index >= _MAX_BUCKETS:
            raise EngineError(f"more than {_MAX_BUCKETS} buckets", hint="give a larger bucket size")
        bucket = _Bucket(buffers)
        if buffers.shard_gradient.numel():
            bucket.reduce_scatter = self._reduce_scatter_exchange(index, buffers)
            bucket.all_gather = self._all_gather_exchange(index, buffers)
            self._submit(-2, self._post(bucket.reduce_scatter))
        self._buckets.append(bucket)

    def wrote(self, index: int) -> None:
        """On the CPU a write is over when its call returns."""

    def expect_gather(self, index: int) -> None:
        """Post the receives of others' shards, so that their sends find them."""
        bucket = self._buckets[index]
        assert bucket.all_gather is not None
        if not bucket.expected:
            bucket.expected = True
            self._submit(-2, self._post(bucket.all_gather))

    def start_reduce_scatter(self, index: int) -> Ticket:
        """Send each peer its shard of our gradients."""
        exchange = self._buckets[index].reduce_scatter
        assert exchange is not None
        return self._start(exchange, priority=-1)

    def start_all_gather(self, index: int, priority: int) -> Ticket:
        """Send every peer our shard of the parameters."""
        bucket = self._buckets[index]
        assert bucket.all_gather is not None
        self.expect_gather(index)
        bucket.expected = False
        return self._start(bucket.all_gather, priority=priority)

    def all_gathers_started(self) -> None:
        """Only now wait for their receives, the most urgent first.

        A wait can't be left once begun, and peers send the least urgent bucket last: to begin to wait
        for it because it was started first would hide the arrival of all the others.
        """
        with self._changed:
            for entry in self._held:
                heapq.heappush(self._waiting, entry)
            self._held.clear()
            self._changed.notify_all()

    def start_all_reduce(self, index: int) -> Ticket:
        """Gloo's ring all-reduce, which does reach the link's speed."""
        buffers = self._buckets[index].buffers
        nbytes = buffers.gradient.nbytes
        wire = 2 * (self.world_size - 1) * nbytes // self.world_size
        ticket = Ticket("all-reduce", buffers.label, nbytes, wire, priority=-1)
        self._submit(index, self._all_reduce(buffers.gradient, ticket))
        return ticket

    def wait_received(self, ticket: Ticket) -> None:
        """Block until the data is there, noting how long."""
        if not ticket.received:
            start = self._clock()
            self._wait(lambda: ticket.received, f"{ticket.leg} of bucket {ticket.label}")
            ticket.exposed.append((start, self._clock()))

    def wait_sent(self, ticket: Ticket) -> None:
        """Block until our data has left."""
        if not ticket.sent:
            self._wait(lambda: ticket.sent, f"{ticket.leg} of bucket {ticket.label}")

    def exchange(self, values: torch.Tensor) -> torch.Tensor:
        """All-gather a small vector."""
        out = [torch.empty_like(values) for _ in range(self.world_size)]
        self._call(lambda: self._group.allgather([out], [values]).wait(timedelta(seconds=self._timeout)))
        return torch.stack(out)

    def broadcast(self, tensors: list[torch.Tensor]) -> int:
        """Rank 0's values to all; the bytes are those of Gloo's binomial tree."""

        def run() -> None:
            for tensor in tensors:
                self._group.broadcast(tensor, 0).wait(timedelta(seconds=self._timeout))

        self._call(run)
        return sum(
            broadcast_wire_nbytes(t.nbytes, rank=self.rank, world_size=self.world_size) for t in tensors
        )

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Everybody's bytes on rank 0."""
        sizes = self.exchange(torch.tensor([len(data)])).flatten().tolist()
        limit = timedelta(seconds=self._timeout)

        def run() -> list[bytes] | None:
            if self.rank:
                mine = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
                self._group.send([mine], 0, 1).wait(limit)
                return None
            parts = [data]
            for peer in range(1, self.world_size):
                theirs = torch.empty(max(sizes[peer], 1), dtype=torch.uint8)
                self._group.recv([theirs], peer, 1).wait(limit)
                parts.append(theirs[: sizes[peer]].numpy().tobytes())
            return parts

        return self._call(run)

    def close(self) -> None:
        """Let what runs end, then stop both threads."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        for thread in (self._issuer, self._receiver):
            thread.join(timeout=self._timeout)
        if self._health is not None:
            self._health.close()

    # Messages of a bucket.

    def _reduce_scatter_exchange(self, index: int, buffers: Buffers) -> _Exchange:
        size = buffers.shard_gradient.numel()
        gradient = buffers.gradient
        scratch = torch.empty((self.world_size - 1, size), dtype=gradient.dtype)
        peers = [p for p in range(self.world_size) if p != self.rank]
        arrived = {peer: scratch[i] for i, peer in enumerate(peers)}
        arrived[self.rank] = gradient[self.rank * size : (self.rank + 1) * size]
        in_rank_order = [arrived[rank] for rank in range(self.world_size)]
        return self._exchange(
            "reduce-scatter",
            index,
            buffers.label,
            gradient.nbytes,
            sends=lambda peer: gradient[peer * size : (peer + 1) * size],
            receives=lambda peer: arrived[peer],
            finish=lambda: average(in_rank_order, out=buffers.shard_gradient),
        )

    def _all_gather_exchange(self, index: int, buffers: Buffers) -> _Exchange:
        size = buffers.shard_gradient.numel()
        parameter = buffers.parameter
        return self._exchange(
            "all-gather",
            index,
            buffers.label,
            parameter.nbytes,
            sends=lambda peer: parameter[self.rank * size : (self.rank + 1) * size],
            receives=lambda peer: parameter[peer * size : (peer + 1) * size],
            finish=None,
        )

    def _exchange(
        self,
        leg: Leg,
        index: int,
        label: str,
        nbytes: int,
        *,
        sends: Callable[[int], torch.Tensor],
        receives: Callable[[int], torch.Tensor],
        finish: Callable[[], None] | None,
    ) -> _Exchange:
        # Each rank begins with another peer, so that no one's inbound link is wanted by all at once.
        peers = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        base = _TAG[leg] + index * _MAX_CHUNKS
        return _Exchange(
            leg,
            label,
            nbytes,
            sends=_by_chunk([(peer, sends(peer)) for peer in peers], base),
            receives=_by_chunk([(peer, receives(peer)) for peer in reversed(peers)], base),
            finish=finish,
        )

    # The issuing thread.

    def _start(self, exchange: _Exchange, priority: int) -> Ticket:
        wire = exchange.nbytes // self.world_size * (self.world_size - 1)
        ticket = Ticket(exchange.leg, exchange.label, exchange.nbytes, wire, priority)
        self._await_receives(ticket, exchange)
        self._submit(priority, self._send(exchange, ticket))
        return ticket

    def _submit(self, priority: int, job: Iterator[_Open]) -> None:
        with self._changed:
            self._raise_failure()
            assert not self._closing
            self._num_jobs += 1
            heapq.heappush(self._jobs, (priority, self._num_jobs, job))
            self._changed.notify_all()

    def _issue(self) -> None:
        """Run the most urgent job by one message; keep a bounded number of sends open."""
        open_sends: deque[_Open] = deque()
        limit = IN_FLIGHT * max(1, self.world_size - 1)
        while True:
            with self._changed:
                while not self._jobs and not open_sends:
                    if self._closing:
                        return
                    self._changed.wait()
                entry = heapq.heappop(self._jobs) if self._jobs else None
            if entry is not None:
                priority, number, job = entry
                opened = next(job, None)
                if opened is not None:
                    open_sends.append(opened)
                    with self._changed:
                        heapq.heappush(self._jobs, (priority, number, job))
            while open_sends and (len(open_sends) > limit or entry is None):
                self._finish_send(open_sends.popleft())
                if entry is None:
                    break

    def _post(self, exchange: _Exchange) -> Iterator[_Open]:
        """Post all receives of a leg at once; they wait in Gloo for as long as it takes."""
        what = f"{exchange.leg} of bucket {exchange.label}"
        posted = deque(
            (self._group.recv([memory], peer, tag), peer, what) for peer, memory, tag in exchange.receives
        )
        with self._changed:
            exchange.posted = posted
            self._changed.notify_all()
        yield from ()

    def _send(self, exchange: _Exchange, ticket: Ticket) -> Iterator[_Open]:
        if ticket.start is None:
            ticket.start = self._clock()
        what = f"{exchange.leg} of bucket {exchange.label}"
        for peer, memory, tag in exchange.sends:
            yield self._group.send([memory], peer, tag), peer, what
        yield ticket, -1, what

    def _all_reduce(self, gradient: torch.Tensor, ticket: Ticket) -> Iterator[_Open]:
        # Dividing first is what DDP does, and keeps half precision from overflowing.
        gradient.mul_(1.0 / self.world_size)
        ticket.start = self._clock()
        work = self._group.allreduce([gradient], dist.AllreduceOptions())
        self._await_receives(ticket, deque([(work, -1, f"all-reduce of bucket {ticket.label}")]))
        yield from ()

    # The receiving thread.

    def _await_receives(self, ticket: Ticket, source: _Exchange | deque[_Open]) -> None:
        with self._changed:
            self._num_jobs += 1
            entry = (ticket.priority, self._num_jobs, ticket, source)
            if ticket.leg == "all-gather":
                self._held.append(entry)
                return
            heapq.heappush(self._waiting, entry)
            self._changed.notify_all()

    def _receive(self) -> None:
        """Wait for the most urgent transfer's next message; when it has all, add up and tell."""
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing and not self._issuer.is_alive():
                        return
                    self._changed.wait(0.2 if self._closing else None)
                entry = self._waiting[0]
                _, _, ticket, source = entry
                if isinstance(source, _Exchange):
                    if source.posted is None:  # the issuing thread is about to
                        self._changed.wait(0.2)
                        continue
                    handles = source.posted
                else:
                    handles = source
            if handles:
                work, peer, what = handles.popleft()
                self._waits_for = peer
                self._await_work(work, peer, f"waiting for the {what}")
                self._waits_for = None
                continue
            self._finish_receives(ticket, source)
            with self._changed:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
                self._changed.notify_all()

    def _finish_receives(self, ticket: Ticket, source: _Exchange | deque[_Open]) -> None:
        if isinstance(source, _Exchange):
            source.posted = None
            if source.finish is not None:
                source.finish()
                # The scratch memory is free again: let the next step's gradients find their receives.
                # Before telling, since whoever is told may start that next step.
                self._submit(-2, self._post(source))
        ticket.stop = self._clock()
        if ticket.start is None:  # all that others owed us came before our own first message left
            ticket.start = ticket.stop
        with self._changed:
            ticket.received = True
            if not isinstance(source, _Exchange):
                ticket.sent = True
            self._changed.notify_all()

    # Waiting, and what goes wrong.

    def _finish_send(self, opened: _Open) -> None:
        work, peer, what = opened
        if isinstance(work, Ticket):  # all sends of this ticket lie before it in the queue
            with self._changed:
                work.sent = True
                self._changed.notify_all()
        else:
            self._await_work(work, peer, f"sending the {what}")

    def _await_work(self, work: Any, peer: int, doing: str) -> None:
        try:
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise _PeerError(peer, doing, str(error)) from error

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Block the calling thread until ``done``, a failure, or the time limit."""
        begun = time.monotonic()
        watching = False
        while True:
            with self._changed:
                if done():
                    break
                self._raise_failure()
                self._changed.wait(0.25)
            waited = time.monotonic() - begun
            if waited > 1.0:
                watching = True
                self._look_for_culprit(what, waited)
        if watching and self._health is not None:
            self._health.suspect(())

    def _look_for_culprit(self, what: str, waited: float) -> None:
        peer = -1 if self._waits_for is None else self._waits_for
        if self._health is not None:
            self._health.suspect(range(self.world_size) if peer < 0 else [peer])
            verdict = self._health.verdict()
            if verdict is not None:
                self._fail(verdict)
        if waited > self._timeout:
            self._fail(Verdict(rank=peer, reason=f"has not taken part in the {what} for {waited:.0f} s"))

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

    def _guard(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop; what ends it becomes the error of everyone who waits."""
        try:
            loop()
        except _PeerError as error:
            self._fail(self._blame(error))
        except RankFailure:
            pass
        except BaseException as error:  # a silent thread would leave the others waiting
            with self._changed:
                self._failure = self._failure or Verdict(rank=self.rank, reason=f"failed: {error!r}")
                self._changed.notify_all()

    def _blame(self, error: _PeerError) -> Verdict:
        """Who is behind a broken connection: the peer, or whoever a published verdict names."""
        if error.peer >= 0:
            gone = "closed" in error.text or "reset" in error.text or "refused" in error.text
            state = "has died or left" if gone else f"does not answer ({error.text.splitlines()[0][:160]})"
            return Verdict(rank=error.peer, reason=f"{state}, met while {error.doing}")
        # A collective of Gloo's own does not say which peer broke it; the beats do, in a moment.
        deadline = time.monotonic() + (self._health.hang_timeout + 2 if self._health else 0)
        while self._health is not None and time.monotonic() < deadline:
            self._health.suspect(range(self.world_size))
            verdict = self._health.verdict()
            if verdict is not None:
                return verdict
            time.sleep(0.05)
        return Verdict(
            rank=-1, reason=f"has left: {error.text.splitlines()[0][:160]}, met while {error.doing}"
        )

    def _call(self, function: Callable[[], _T]) -> _T:
        """Run ``function`` on the issuing thread, and wait for its result."""
        result: list[_T] = []

        def job() -> Iterator[_Open]:
            try:
                result.append(function())
            except RuntimeError as error:
                raise _PeerError(-1, "in a collective", str(error)) from error
            with self._changed:
                self._changed.notify_all()
            yield from ()

        self._submit(_LAST, job())
        self._wait(lambda: bool(result), "exchange")
        return result[0]


class _PeerError(Exception):
    def __init__(self, peer: int, doing: str, text: str) -> None:
        super().__init__(text)
        self.peer = peer
        self.doing = doing
        self.text = text or "no reason given"


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


def _by_chunk(whole: list[tuple[int, torch.Tensor]], base: int) -> list[_Message]:
    """Chunk 0 for every peer, then chunk 1 for every peer, and so on; tags count the chunks."""
    split = [
        (peer, memory.split(max(1, CHUNK_NBYTES // memory.element_size())))
        for peer, memory in whole
        if memory.numel()
    ]
    longest = max((len(chunks) for _, chunks in split), default=0)
    if longest > _MAX_CHUNKS:
        raise EngineError(
            f"a shard of more than {_MAX_CHUNKS} messages of {CHUNK_NBYTES} bytes",
            hint="split that parameter",
        )
    return [(peer, chunks[i], base + i) for i in range(longest) for peer, chunks in split if i < len(chunks)]
