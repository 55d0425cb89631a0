"""Whether the links reach what was asked for: every host sends to the next while the one before sends to it.

So each cable carries a full stream in both directions at once, the hardest case that it is sold for
and the one that a ring all-reduce makes. TCP itself takes 4 to 5 % of an Ethernet link for headers.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tonnage.errors import LinkError
from tonnage.lab.hosts import Hosts

_PORT = 29400
_SETTLE_SECONDS = 0.25
_SETTLE_NBYTES = 256 * 1024
"""What is left out of the measurement: the credit of two idle buckets, and TCP's slow start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReach:
    """How fast one host received from the one before it.

    Attributes:
        rank: the host.
        asked: bytes per second of the slower of the two cables on the way; None where neither is shaped.
        reached: bytes per second that came out of the socket.
    """

    rank: int
    asked: float | None
    reached: float


def measure_links(lab: Hosts, *, seconds: float = 2.0) -> tuple[LinkReach, ...]:
    """Send around the ring of hosts for a while; blocks for ``seconds`` and a little more.

    Raises:
        LinkError: there are fewer than two hosts, or a host did not receive in time.
    """
    if lab.num_hosts < 2:
        raise LinkError("a lab of 1 host has no link to measure", hint="ask for 2 ranks or more")
    lines: list[list[str]] = [[] for _ in range(lab.num_hosts)]
    result = lab.run(
        [sys.executable, "-c", f"from tonnage.lab.measure import in_rank; in_rank({seconds!r})"],
        timeout=seconds + 30,
        on_stdout=lambda rank, line: lines[rank].append(line),
        on_stderr=lambda rank, line: lines[rank].append(line),
    )
    if result.exit_code:
        rank = result.first_failed or 0
        said = lines[rank][-1] if lines[rank] else f"exit status {result.exit_code}"
        raise LinkError(f"the links could not be measured: {said}", where=f"rank {rank}", hint="try again")
    return tuple(
        LinkReach(rank=rank, asked=_asked(lab.rates, rank), reached=float(json.loads(lines[rank][-1])))
        for rank in range(lab.num_hosts)
    )


def in_rank(seconds: float) -> None:
    """What every host runs: prints the bytes per second that it received."""
    rank, addresses = int(os.environ["RANK"]), os.environ["TONNAGE_HOSTS"].split(",")
    with socket.create_server((addresses[rank], _PORT)) as server:
        onward = _connect(addresses[(rank + 1) % len(addresses)])
        inward, _ = server.accept()
    sender = threading.Thread(target=_send, args=(onward,), daemon=True)
    sender.start()
    print(json.dumps(_receive(inward, seconds)), flush=True)
    # The receiver ends a stream by closing it; ours ends when the next host has measured enough.
    sender.join()


def _asked(rates: Sequence[float | None], rank: int) -> float | None:
    slowest = min(math.inf if rate is None else rate for rate in (rates[rank - 1], rates[rank]))
    return None if math.isinf(slowest) else slowest


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, _PORT), timeout=20)
        except ConnectionRefusedError:  # that host has not come up yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _send(connection: socket.socket) -> None:
    chunk = bytes(1 << 18)
    try:
        while True:
            connection.sendall(chunk)
    except (ConnectionResetError, BrokenPipeError):
        return


def _receive(connection: socket.socket, seconds: float) -> float:
    buffer = bytearray(1 << 20)
    total, first = 0, time.monotonic()
    settled: tuple[float, int] | None = None
    while count := connection.recv_into(buffer):
        now, total = time.monotonic(), total + count
        if settled is None:
            if now - first >= _SETTLE_SECONDS and total >= _SETTLE_NBYTES:
                settled = now, total
        elif now - settled[0] >= seconds:
            connection.close()
            return (total - settled[1]) / (now - settled[0])
    raise ConnectionError("the host before this one stopped sending")
