"""Setting up: who takes part, one clock for all, and do all ranks hold the same model.

Runs on the user's thread before any transfer; the only place besides the transports that calls
``torch.distributed``.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from tonnage.engine.transport.mesh import connect
from tonnage.errors import EngineError

_PINGS = 5
_num_stores: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def engine_group(
    parent: dist.ProcessGroup | None, device: torch.device, *, timeout: float
) -> dist.ProcessGroup | None:
    """The group to work over: the ranks of ``parent``; ``None`` in a job of one process.

    Over NCCL it is a group of the engine's own, whose stream and order nobody else shares. Elsewhere
    ``parent`` itself, which is used only while the model is wrapped: a group of Gloo's costs every rank
    threads that poll for as long as it lives.

    Raises:
        EngineError: several processes were started, but their process group was not.
    """
    if not dist.is_available() or not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise EngineError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised",
                hint="call torch.distributed.init_process_group() before tonnage.DataParallel(model)",
            )
        return None
    if parent is not None and not isinstance(parent, dist.ProcessGroup):
        raise EngineError("this rank is not a member of the group given to tonnage.DataParallel")
    group = parent or dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    if backend_name(group, device) != "nccl":
        return group
    ranks = dist.get_process_group_ranks(group)
    # Ranks outside a smaller group don't come here, so its members must find each other without them.
    is_part = len(ranks) < dist.get_world_size()
    own = dist.new_group(ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=is_part)
    assert isinstance(own, dist.ProcessGroup)
    return own


def own_stores(group: dist.ProcessGroup) -> Callable[[float], Any]:
    """Gives connections to the store of ``group``, each with a time limit, whose keys meet nobody else's.

    All ranks call it together, as they wrap their models in one order: the n-th calls share their keys.
    """
    store: Any = group.get_group_store()
    count = _num_stores[group] = _num_stores.get(group, 0) + 1

    def connection(timeout: float) -> Any:
        own = store.clone()
        own.set_timeout(timedelta(seconds=timeout))
        return PrefixStore(f"tonnage/{count}", own)

    return connection


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """``gloo`` or ``nccl`` or another's name: what moves tensors of ``device`` in ``group``."""
    config = dist.get_backend_config(group)
    for pair in str(config).split(","):
        kind, _, name = pair.partition(":")
        if name and kind == device.type:
            return name.lower()
    return str(dist.get_backend(group)).lower()


def synchronised_clock(group: dist.ProcessGroup, device: torch.device) -> Callable[[], float]:
    """Seconds since rank 0 got here, on rank 0's clock, to within half the quickest round trip.

    Each rank asks rank 0 for its time, a few times; the answer of the quickest round trip is taken to
    have been given half way through it (Cristian, "Probabilistic clock synchronization", 1989).
    """
    origin = time.perf_counter()
    best = (float("inf"), 0.0)
    rank = group.rank()
    for peer in range(1, group.size()):
        for _ in range(_PINGS):
            value = torch.zeros(1, dtype=torch.float64, device=device)
            if rank == 0:
                group.recv([value], peer, 2).wait()
                value.fill_(time.perf_counter() - origin)
                group.send([value], peer, 3).wait()
            elif rank == peer:
                asked = time.perf_counter()
                group.send([value], 0, 2).wait()
                group.recv([value], 0, 3).wait()
                theirs = float(value.item())
                answered = time.perf_counter()
                best = min(best, (answered - asked, (asked + answered) / 2 - theirs))
    zero = origin if rank == 0 else best[1]
    return lambda: time.perf_counter() - zero


def check_same_plan(group: dist.ProcessGroup, digest: bytes, names: list[str], device: torch.device) -> None:
    """All ranks must wrap the same model, cut alike.

    Raises:
        EngineError: a rank's parameters differ; names the first that does.
    """
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    all_digests = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([all_digests], [mine]).wait()
    odd = [r for r, each in enumerate(all_digests) if not torch.equal(each, all_digests[0])]
    if not odd:
        return
    everyone: list[list[str] | None] = [None] * group.size()
    dist.all_gather_object(everyone, names, group=group)
    ours, theirs = everyone[0] or [], everyone[odd[0]] or []
    differing = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
    detail = (
        f"rank 0 has {differing[0][0]}, rank {odd[0]} has {differing[0][1]}"
        if differing
        else f"rank 0 trains {len(ours)} parameters, rank {odd[0]} trains {len(theirs)}"
    )
    raise EngineError(
        f"ranks wrap different models: {detail}",
        hint="build the same model with the same settings on every rank",
    )


def children(rank: int, world_size: int) -> list[int]:
    """Whom ``rank`` sends to in a broadcast from rank 0 along a binomial tree.

    Rank ``r`` has a child ``r + 2^i`` for each ``2^i > r`` with ``r + 2^i < world_size``.
    """
    return [
        rank + (1 << i)
        for i in range(world_size.bit_length())
        if (1 << i) > rank and rank + (1 << i) < world_size
    ]


def broadcast_wire_nbytes(nbytes: int, *, rank: int, world_size: int) -> int:
    """Bytes that ``rank`` sends in a broadcast of ``nbytes`` from rank 0 along a binomial tree."""
    return len(children(rank, world_size)) * nbytes


def open_links(group: dist.ProcessGroup, store: Any, *, timeout: float) -> dict[int, socket.socket]:
    """A TCP connection to each other rank of ``group``, met in ``store``; all its ranks call it together."""
    rank = group.rank()
    store.set(f"host/{rank}", own_address(_store_host(store)))
    host = store.get(f"host/{rank}").decode()
    if _is_loopback(host) and group.size() > 1:
        # A name like "localhost", or Debian's 127.0.1.1 for the own name, may mean this host only here.
        other = store.get(f"host/{1 if rank == 0 else 0}").decode()
        host = host if _is_loopback(other) else own_address(other)
    return connect(store, "mesh", rank=rank, world_size=group.size(), host=host, timeout=timeout)


def own_address(towards: str) -> str:
    """This host's address on the interface in GLOO_SOCKET_IFNAME, or on the way to ``towards``.

    Raises:
        EngineError: there is no such interface, or no way.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    try:
        if interface:
            return _interface_address(interface)
        family = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 1))  # of a datagram socket: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(
            f"no address of this host towards {interface or towards}: {error}",
            hint="set GLOO_SOCKET_IFNAME to the interface that the ranks share, as `ip address` names it",
        ) from error


def _interface_address(name: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # SIOCGIFADDR of <linux/sockios.h>: the address stands at bytes 20 to 24 of what comes back.
        answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _store_host(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "") or "localhost")


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
