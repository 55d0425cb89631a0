"""The transport that fits a process group and a device."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from tonnage.engine.health import Health
from tonnage.engine.transport.group import backend_name, open_links, own_stores, synchronised_clock
from tonnage.engine.transport.local import LocalTransport
from tonnage.engine.transport.mesh import Mesh
from tonnage.engine.transport.nccl import NcclTransport
from tonnage.engine.transport.tcp import TcpTransport
from tonnage.engine.transport.ticket import Transport
from tonnage.errors import EngineError


def open_transport(
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    timeout: float,
    hang_timeout: float,
) -> Transport:
    """What moves buckets of tensors on ``device`` between the ranks of ``group``; all call it together.

    Args:
        group: the ranks; ``None`` for one alone.
        device: where the tensors lie.
        timeout: seconds that a wait may take.
        hang_timeout: seconds without a sign of life after which a rank hangs.

    Raises:
        EngineError: the group's backend can't move such tensors.
    """
    if group is None or group.size() == 1:
        origin = time.perf_counter()
        return LocalTransport(clock=lambda: time.perf_counter() - origin)
    name = backend_name(group, device)
    clock = synchronised_clock(group, device)
    if name == "gloo" and device.type == "cpu":
        connection = own_stores(group)
        links = open_links(group, connection(timeout), timeout=timeout)
        return TcpTransport(
            lambda receiver: Mesh(links, receiver),
            rank=group.rank(),
            world_size=group.size(),
            health=Health(
                connection(hang_timeout),
                rank=group.rank(),
                world_size=group.size(),
                hang_timeout=hang_timeout,
            ),
            timeout=timeout,
            clock=clock,
        )
    if name == "nccl":
        return NcclTransport(group, device=device, clock=clock)
    raise EngineError(
        f"no transport for {device.type} tensors over {name}", hint="use gloo for CPUs and nccl for CUDA"
    )


def link_level() -> str:
    """What lies between the ranks, as far as the launcher's environment tells."""
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "1"):
        return "device" if torch.cuda.is_available() else "loopback"
    address = os.environ.get("MASTER_ADDR", "localhost")
    return "loopback" if address in ("localhost", "127.0.0.1", "::1") else "nic"
