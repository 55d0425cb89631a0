"""Keep the kernel from queueing what a more urgent transfer should overtake.

A send of Gloo's ends when the kernel has taken the bytes, and Linux takes up to 4 MB a connection: at
1 Gbit/s that is 32 ms that no priority can jump, for each peer. On slow local links the engine
therefore bounds its own connections' send buffers to what the link drains in a moment. On fast links the
queue is short anyway, and on long ones a small buffer would throttle; both are left alone.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

DRAIN_TIME = 1.5e-3
"""Seconds of queue to allow; a chunk takes several times that on the links this is meant for."""

LONGEST_RTT = 2e-3
"""Seconds; beyond it the buffer must hold what is in flight, and stays as the kernel sizes it."""

_LEAST_BUFFER = 64 * 1024
_PROBE_NBYTES = 1 << 20
_PROBE_TAG = 4
_FOLDER = Path("/proc/self/fd")
_LIMIT = Path("/proc/sys/net/core/wmem_max")


def open_files() -> frozenset[int]:
    """This process's open file descriptors; none where the system does not tell."""
    try:
        return frozenset(int(entry.name) for entry in _FOLDER.iterdir())
    except OSError:
        return frozenset()


def buffer_size(bandwidth: float, *, rtt: float, most: int) -> int | None:
    """Bytes of send buffer for a link, or ``None`` to leave it to the kernel.

    Args:
        bandwidth: bytes per second of one connection.
        rtt: seconds of a round trip.
        most: the largest buffer that may be asked for; asking for more would set this and, worse,
            end the kernel's own sizing.
    """
    wanted = max(_LEAST_BUFFER, round(bandwidth * DRAIN_TIME))
    return wanted if rtt <= LONGEST_RTT and wanted <= most else None


def bound_send_queues(group: dist.ProcessGroup, opened: Iterable[int], *, rtt: float) -> int | None:
    """Bound the send buffers of the connections among ``opened``; returns the size, if one was set.

    All ranks must call it together: it measures the link by sending 1 MB to the next rank.
    """
    bandwidth, rtt = _measured_link(group, rtt)
    try:
        most = int(_LIMIT.read_text())
    except (OSError, ValueError):
        return None
    size = buffer_size(bandwidth, rtt=rtt, most=most)
    if size is not None:
        for descriptor in opened:
            _set_send_buffer(descriptor, size)
    return size


def _measured_link(group: dist.ProcessGroup, rtt: float) -> tuple[float, float]:
    """The best bandwidth that any rank sees to the next, and the longest round trip: the same on all."""
    rank, size = group.rank(), group.size()
    out = torch.zeros(_PROBE_NBYTES, dtype=torch.uint8)
    into = torch.empty_like(out)
    seconds = float("inf")
    for _ in range(2):  # the first opens the congestion window
        received = group.recv([into], (rank - 1) % size, _PROBE_TAG)
        begun = time.perf_counter()
        sent = group.send([out], (rank + 1) % size, _PROBE_TAG)
        received.wait()
        sent.wait()
        seconds = time.perf_counter() - begun
    mine = torch.tensor([_PROBE_NBYTES / seconds, rtt], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(size)]
    group.allgather([everyone], [mine]).wait()
    bandwidth, longest = torch.stack(everyone).amax(dim=0).tolist()
    return bandwidth, longest


def _set_send_buffer(descriptor: int, size: int) -> None:
    try:
        duplicate = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return  # no socket, or closed since
    with duplicate:
        inet = duplicate.family in (socket.AF_INET, socket.AF_INET6)
        if inet and duplicate.type == socket.SOCK_STREAM:
            try:
                duplicate.getpeername()
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            except OSError:
                return  # a listening socket has no peer
