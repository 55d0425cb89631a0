r"""Where a group's ranks stand, and how long a collective over them takes.

Letters: ``n`` ranks, ``q`` of them in one scale-up domain, ``S`` payload (the whole for all-gather,
reduce-scatter and all-to-all, as :mod:`tonnage.ledger` has it), ``W`` the bytes that a rank sends by
the ledger's formula.

A group that spans domains runs as NCCL's rings do: each of the ``q`` ranks of a domain leads one ring
out through its own NIC, so a NIC carries ``W / q``, while the link inside carries what is left of
``W``. An all-to-all has no such relay: of each rank's data the share ``(n - q) / n`` goes out.

``seconds = max(inside / rate inside, outside / rate outside) + latency``, the latency growing with
the steps that must follow one another: by ring ``n - 1`` for all-gather and reduce-scatter; for
all-reduce the tree, twice the depth.

Every argument may be a number or an array over layouts.

Source: NCCL's ring and tree algorithms as nccl-tests' doc/PERFORMANCE.md counts them; the
latency-bandwidth model is Hockney's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tonnage.plan.cluster import Cluster, Link

Array = NDArray[np.float64]
Numbers = Any
"""A number or an array of them: formulas here serve one layout and a thousand alike."""

_FACTORS = {"all-reduce": 2.0, "reduce-scatter": 1.0, "all-gather": 1.0, "all-to-all": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How a group lies on the cluster.

    Attributes:
        size: ranks of the group.
        local: how many of them share a scale-up domain.
        nics: NICs of a domain that share what leaves it.
        spine: whether it leaves a pod.
    """

    size: Numbers
    local: Numbers
    nics: Numbers
    spine: Numbers


def reach(cluster: Cluster, *, size: Numbers, stride: Numbers, rails: bool = True) -> Reach:
    """The reach of a group whose neighbouring ranks are ``stride`` ranks apart.

    Args:
        cluster: for the cards in a domain.
        size: ranks of the group.
        stride: ranks between neighbours.
        rails: whether bytes that leave the domain are shared out over the NICs of the ranks in it.
    """
    size, stride = np.asarray(size), np.asarray(stride)
    local = np.clip(cluster.domain // stride, 1, size)
    spine = (size * stride > cluster.pod) & (cluster.pod > 0)
    return Reach(size=size, local=local, nics=local if rails else np.ones_like(local), spine=spine)


def wire_share(op: str, size: Numbers) -> Numbers:
    """What one rank sends over the payload; the ledger's formula, for arrays."""
    return _FACTORS[op] * (size - 1) / size


def split(op: str, nbytes: Numbers, to: Reach) -> tuple[Numbers, Numbers]:
    """Bytes that one rank's share of the links carries: inside the domain, and out of it."""
    whole = wire_share(op, to.size) * nbytes
    if op == "all-to-all":
        outside = nbytes * (to.size - to.local) / to.size
    else:
        outside = np.where(to.size > to.local, whole / to.nics, 0.0)
    return whole - outside, outside


def seconds(op: str, nbytes: Numbers, to: Reach, cluster: Cluster) -> Numbers:
    """Seconds of one collective; 0 for a group of one.

    Args:
        op: all-reduce, reduce-scatter, all-gather or all-to-all.
        nbytes: payload.
        to: where the group lies.
        cluster: its links.
    """
    inside, outside = split(op, nbytes, to)
    # A ring that leaves the domain still passes all its bytes along inside it.
    passed = np.where(to.local > 1, inside + outside, 0.0) if op != "all-to-all" else inside
    rate_out = np.where(to.spine, cluster.spine.bandwidth, cluster.nic.bandwidth)
    moving = np.maximum(passed / cluster.scaleup.bandwidth, outside / rate_out)
    return np.where(to.size > 1, moving + _latency(op, to, cluster), 0.0)


def _latency(op: str, to: Reach, cluster: Cluster) -> Numbers:
    domains = np.ceil(to.size / to.local)
    inside, outside = cluster.scaleup, cluster.nic
    start = np.where(domains > 1, outside.latency, inside.latency)
    if op == "all-reduce":
        depth = np.ceil(np.log2(np.maximum(domains, 1)))
        return start + 2 * (inside.hop * (to.local - 1) + outside.hop * depth)
    return start + inside.hop * (to.size - domains) + outside.hop * (domains - 1)


def send_seconds(nbytes: Numbers, link: Link) -> Numbers:
    """Seconds of one message to a neighbour."""
    return link.latency + nbytes / link.bandwidth


def send_link(cluster: Cluster, *, stride: Numbers) -> Numbers:
    """Whether a rank's neighbour ``stride`` ranks away is outside its domain, as 0 or 1."""
    return np.asarray(stride) >= cluster.domain
