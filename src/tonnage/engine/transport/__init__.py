"""Moving buckets between ranks: the only part of the engine that calls torch.distributed."""

from tonnage.engine.transport.group import (
    backend_name,
    broadcast_wire_nbytes,
    check_same_plan,
    engine_group,
    open_links,
    own_stores,
    synchronised_clock,
)
from tonnage.engine.transport.local import LocalTransport
from tonnage.engine.transport.mesh import Mesh
from tonnage.engine.transport.nccl import NcclTransport
from tonnage.engine.transport.open import link_level, open_transport
from tonnage.engine.transport.packed import Packing, Projection
from tonnage.engine.transport.tcp import TcpTransport, average
from tonnage.engine.transport.ticket import Buffers, Leg, Ticket, Transport

__all__ = [
    "Buffers",
    "Leg",
    "LocalTransport",
    "Mesh",
    "NcclTransport",
    "Packing",
    "Projection",
    "TcpTransport",
    "Ticket",
    "Transport",
    "average",
    "backend_name",
    "broadcast_wire_nbytes",
    "check_same_plan",
    "engine_group",
    "link_level",
    "open_links",
    "open_transport",
    "own_stores",
    "synchronised_clock",
]
