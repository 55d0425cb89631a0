"""Messages between ranks over TCP: a connection a pair, and one thread that reads and writes them all.

A message has a key, and lands in memory that the receiver placed under this key, or in its mailbox.
It travels in chunks; between two chunks a more urgent message to the same peer goes first. A frame is a
header of four little-endian numbers (key, offset, total, length) and ``length`` bytes.

What is in the kernel's send queue can no longer be overtaken, so no more than :data:`UNSENT_NBYTES` wait
there unsent. What has come is known at once and in any order, which Gloo's blocking waits can't tell.

A connection opens with a secret that the job's store hands out, so no stranger can write into a rank.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tonnage.errors import EngineError

CHUNK_NBYTES = 1 << 18
"""Bytes a frame: small enough to be overtaken soon, large enough that its cost does not show."""

UNSENT_NBYTES = 1 << 19
"""Bytes that all connections together may hold unsent in the kernel: 4 ms of a link of 1 Gbit/s."""

_HEADER = struct.Struct("<QQQI")
_BYE = (1 << 64) - 1
_MAX_MESSAGE = 1 << 40
_HELLO_NBYTES = 64


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a value, waiting until it is there."""
        ...


class Receiver(Protocol):
    """Who is told what happens; called on the mesh's thread, so it must be quick."""

    def arrived(self, peer: int, key: int, data: bytearray | None) -> None:
        """A whole message is here; ``data`` is ``None`` if it landed in placed memory."""
        ...

    def lost(self, peer: int, reason: str) -> None:
        """The connection to ``peer`` is gone."""
        ...


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message on its way out.

    Attributes:
        begun: called when its first byte is handed to the kernel.
        done: called when its last one was: the memory may be written again.
    """

    key: int
    memory: memoryview
    begun: Callable[[], None] | None = None
    done: Callable[[], None] | None = None
    offset: int = 0


class Mesh:
    """This rank's connections to all others.

    Args:
        links: a connected socket for each peer; owned from now on.
        receiver: who is told of messages.
    """

    def __init__(self, links: Mapping[int, socket.socket], receiver: Receiver) -> None:
        self._receiver = receiver
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._links = {peer: _Link(peer, link, len(links)) for peer, link in links.items()}
        for each in self._links.values():
            self._selector.register(each.socket, selectors.EVENT_READ, each)
        self._lock = threading.Lock()
        self._ready: deque[_Link] = deque()
        self._asleep = False
        self._closing = False
        self._count = 0
        self._thread = threading.Thread(target=self._run, name="tonnage-mesh", daemon=True)
        self._thread.start()

    def place(self, peer: int, key: int, memory: memoryview, *, exact: bool = True) -> None:
        """Messages of ``peer`` under ``key`` land here from now on; only before the first can come.

        They fill it, or, unless ``exact``, its beginning.
        """
        self._links[peer].placed[key] = memory, exact

    def unplace(self, peer: int, key: int) -> None:
        """No message of ``peer`` comes under ``key`` any more."""
        self._links[peer].placed.pop(key, None)

    def send(self, peer: int, message: Outgoing, priority: int) -> None:
        """Queue a message; smaller priorities go first, equal ones in their order."""
        link = self._links[peer]
        with self._lock:
            self._count += 1
            heapq.heappush(link.queue, (priority, self._count, message))
            if not link.queued:
                link.queued = True
                self._ready.append(link)
            wake, self._asleep = self._asleep, False
        if wake:
            self._wake()

    def close(self, timeout: float) -> None:
        """Send what is queued, say good-bye, and end the thread."""
        with self._lock:
            if self._closing:
                return
        for peer in self._links:
            self.send(peer, Outgoing(_BYE, memoryview(b"")), 1 << 62)
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join(timeout)

    def abort(self) -> None:
        """End the thread now; what was under way is lost, and peers see the connections close."""
        with self._lock:
            self._closing = True
            for link in self._links.values():
                link.queue.clear()
                link.current = None
        self._wake()
        self._thread.join(5)

    # The mesh's thread.

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            while not (self._closing and not any(link.busy() for link in self._links.values())):
                self._turn()
        finally:
            for link in self._links.values():
                self._drop(link)
            self._selector.close()
            self._woken.close()
            self._waker.close()

    def _turn(self) -> None:
        with self._lock:
            ready = list(self._ready)
            self._ready.clear()
            self._asleep = not ready
        for link in ready:
            self._write(link)
        for key, mask in self._selector.select(0 if ready else None):
            link = key.data
            if link is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                continue
            if mask & selectors.EVENT_READ:
                self._read(link)
            if mask & selectors.EVENT_WRITE and not link.gone:
                self._write(link)
        self._asleep = False

    def _write(self, link: _Link) -> None:
        """Hand the kernel as much as it takes; a few chunks at most, since reading must go on too."""
        try:
            for _ in range(4):
                if link.current is None and not self._next_chunk(link):
                    self._listen(link, writing=False)
                    return
                if not self._write_chunk(link):
                    self._listen(link, writing=True)
                    return
        except OSError as error:
            self._lose(link, error)
            return
        self._listen(link, writing=True)

    def _next_chunk(self, link: _Link) -> bool:
        with self._lock:
            if link.gone or not link.queue:
                link.queued = False
                return False
            _, _, message = link.queue[0]
            left = len(message.memory) - message.offset
            size = min(left, CHUNK_NBYTES)
            if size == left:
                heapq.heappop(link.queue)
        header = _HEADER.pack(message.key, message.offset, len(message.memory), size)
        link.current = message
        link.header = memoryview(header)
        link.body = message.memory[message.offset : message.offset + size]
        if message.offset == 0 and message.begun is not None:
            message.begun()
        message.offset += size
        return True

    def _write_chunk(self, link: _Link) -> bool:
        while len(link.header) or len(link.body):
            try:
                sent = link.socket.sendmsg([link.header, link.body])
            except BlockingIOError:
                return False
            of_header = min(sent, len(link.header))
            link.header = link.header[of_header:]
            link.body = link.body[sent - of_header :]
        message, link.current = link.current, None
        assert message is not None
        if message.offset == len(message.memory) and message.done is not None:
            message.done()
        return True

    def _read(self, link: _Link) -> None:
        try:
            for _ in range(16):
                if link.needed:
                    count = link.socket.recv_into(link.target[: link.needed])
                    if count == 0:
                        self._lose(link, None)
                        return
                    link.target = link.target[count:]
                    link.needed -= count
                if link.needed == 0:
                    self._advance(link)
        except BlockingIOError:
            return
        except (OSError, EngineError) as error:
            self._lose(link, error)

    def _advance(self, link: _Link) -> None:
        """A header or the bytes of a chunk are whole."""
        if not link.in_header:
            link.come[link.key] = link.come.get(link.key, 0) + link.length
            self._finish_chunk(link)
            link.expect_header()
            return
        link.key, offset, link.total, link.length = _HEADER.unpack(link.head)
        if link.key == _BYE:
            link.said_bye = True
            link.expect_header()
            return
        memory = link.landing(link.key, link.total)
        if offset + link.length > link.total:
            raise EngineError("sent a frame beyond its message's end")
        link.in_header = False
        link.target = memory[offset : offset + link.length]
        link.needed = link.length
        if link.length == 0:
            self._advance(link)

    def _finish_chunk(self, link: _Link) -> None:
        if link.come[link.key] < link.total:
            return
        del link.come[link.key]
        data = link.mail.pop(link.key, None)
        self._receiver.arrived(link.peer, link.key, data)

    def _listen(self, link: _Link, *, writing: bool) -> None:
        if link.writing != writing and not link.gone:
            link.writing = writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            self._selector.modify(link.socket, events, link)

    def _lose(self, link: _Link, error: Exception | None) -> None:
        said_bye = link.said_bye
        self._drop(link)
        if not said_bye:
            self._receiver.lost(link.peer, "closed the connection" if error is None else str(error))

    def _drop(self, link: _Link) -> None:
        if link.gone:
            return
        link.gone = True
        with self._lock:
            link.queue.clear()
        link.current = None
        self._selector.unregister(link.socket)
        link.socket.close()


class _Link:
    """One connection: what is being written and what is being read."""

    def __init__(self, peer: int, link: socket.socket, num_links: int) -> None:
        self.peer = peer
        self.socket = link
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            # TCP_NOTSENT_LOWAT: the socket takes no more while this much is queued and not yet sent.
            link.setsockopt(socket.IPPROTO_TCP, 25, max(1 << 16, UNSENT_NBYTES // num_links))
            # After a pause (an evaluation, a checkpoint) BBR sends slowly for seconds: the four steps after 6 s
            # of silence took 1.45 of the bound, and 1.07 with this. Where it isn't allowed, all stays as it is.
            with contextlib.suppress(OSError):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        self.queue: list[tuple[int, int, Outgoing]] = []
        self.queued = False
        self.current: Outgoing | None = None
        self.header = memoryview(b"")
        self.body = memoryview(b"")
        self.writing = False
        self.gone = False
        self.said_bye = False
        self.placed: dict[int, tuple[memoryview, bool]] = {}
        self.mail: dict[int, bytearray] = {}
        self.come: dict[int, int] = {}
        self.head = bytearray(_HEADER.size)
        self.key = self.total = self.length = 0
        self.expect_header()

    def expect_header(self) -> None:
        """The next bytes are a frame's header."""
        self.in_header = True
        self.target = memoryview(self.head)
        self.needed = _HEADER.size

    def busy(self) -> bool:
        """Whether something is left to write."""
        return not self.gone and (self.current is not None or bool(self.queue))

    def landing(self, key: int, total: int) -> memoryview:
        """Where a message of ``total`` bytes under ``key`` lands."""
        if key in self.placed:
            memory, exact = self.placed[key]
            if total > len(memory) or (exact and total < len(memory)):
                raise EngineError(f"sent {total} bytes where {len(memory)} belong")
            return memory
        if total > _MAX_MESSAGE:
            raise EngineError(f"announced a message of {total} bytes")
        return memoryview(self.mail.setdefault(key, bytearray(total)))


def connect(
    store: Store, name: str, *, rank: int, world_size: int, host: str, timeout: float
) -> dict[int, socket.socket]:
    """A connection to each other rank; all ranks call it together.

    Args:
        store: hands addresses and the secret around.
        name: sets this mesh's keys in the store apart from others'.
        rank: this rank.
        world_size: ranks of the mesh.
        host: this rank's address, as others reach it; what is listened on.
        timeout: seconds to wait for the others.

    Raises:
        EngineError: a rank could not be reached.
    """
    with socket.create_server((host, 0), family=_family(host), backlog=world_size) as server:
        server.settimeout(timeout)
        if rank == 0:
            store.set(f"{name}/secret", secrets.token_hex(16))
        store.set(f"{name}/at/{rank}", json.dumps([host, server.getsockname()[1]]))
        secret = store.get(f"{name}/secret")
        links: dict[int, socket.socket] = {}
        for peer in range(rank):
            address = tuple(json.loads(store.get(f"{name}/at/{peer}")))
            try:
                links[peer] = socket.create_connection(address, timeout=timeout)
            except OSError as error:
                raise EngineError(
                    f"rank {rank} can't connect to rank {peer} at {address[0]} port {address[1]}: {error}",
                    hint="let ranks reach each other's ports, or name the interface in GLOO_SOCKET_IFNAME",
                ) from error
            links[peer].sendall(_hello(secret, rank))
        while len(links) < world_size - 1:
            try:
                link, _ = server.accept()
            except TimeoutError as error:
                missing = sorted(set(range(world_size)) - {rank, *links})
                raise EngineError(
                    f"rank {rank} waited {timeout:.0f} s for ranks {missing} to connect to {host}",
                    hint="let ranks reach each other's ports, or name the interface in GLOO_SOCKET_IFNAME",
                ) from error
            link.settimeout(timeout)
            number = _greeted(link, secret, world_size)
            if number is None or number in links or number == rank:
                link.close()
            else:
                links[number] = link
    return links


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _hello(secret: bytes, rank: int) -> bytes:
    return (secret + b" %d " % rank).ljust(_HELLO_NBYTES)


def _greeted(link: socket.socket, secret: bytes, world_size: int) -> int | None:
    """The rank that connected, or ``None`` for a stranger."""
    told = b""
    try:
        while len(told) < _HELLO_NBYTES:
            part = link.recv(_HELLO_NBYTES - len(told))
            if not part:
                return None
            told += part
    except OSError:
        return None
    theirs, _, number = told.strip().partition(b" ")
    if not secrets.compare_digest(theirs, secret) or not number.strip().isdigit():
        return None
    peer = int(number)
    return peer if peer < world_size else None
