"""Which gradient lies where: parameters -> flat buckets -> shards.

A *bucket* is one flat buffer of gradients that travels as one. Gradients become ready from the last
layer to the first, so buckets are cut over the parameters in reverse order of their registration.
Each bucket is padded to ``world_size`` equal *shards*; rank ``r`` owns shard ``r``: it sums that part
of everybody's gradients and, when the optimizer is sharded, updates that part of the parameters.

This module is arithmetic only; no tensor is allocated here.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tonnage.errors import EngineError

SHARD_ALIGNMENT = 64
"""Bytes that a shard's size is a multiple of: a cache line, and what vector loads like to start at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """What a bucket plan needs to know of one trained parameter."""

    name: str
    numel: int
    dtype: str
    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one parameter lies in its bucket: elements ``[offset, offset + numel)``."""

    index: int
    name: str
    offset: int
    numel: int

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """The part of the slot in elements ``[start, stop)`` of the bucket; empty if first >= second."""
        return max(self.offset, start), min(self.offset + self.numel, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One flat buffer: its parameters, its element type and its size with padding.

    Attributes:
        index: place in the order in which buckets become ready, which is the order of sending.
        slots: its parameters, last registered first.
        numel: elements with padding, a multiple of ``world_size``.
        itemsize: bytes an element.
    """

    index: int
    slots: tuple[Slot, ...]
    numel: int
    dtype: str
    itemsize: int
    world_size: int

    @property
    def nbytes(self) -> int:
        """Size with padding, in bytes."""
        return self.numel * self.itemsize

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // self.world_size

    @property
    def label(self) -> str:
        """Its name in ledgers and errors."""
        return f"b{self.index:02d}"

    def shard(self, rank: int) -> tuple[int, int]:
        """First element of ``rank``'s shard, and the first after it."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel


def cut_buckets(parameters: Sequence[ParameterSpec], *, cap: int, world_size: int) -> tuple[Bucket, ...]:
    """Buckets of at most ``cap`` bytes (one parameter alone may be larger), in order of readiness.

    Parameters of different dtypes never share a bucket. The bucket that closes last, with the first
    layer's gradients, takes what is left, so it is seldom larger than the others.

    Args:
        parameters: the trained parameters in order of registration.
        cap: bytes a bucket may hold.
        world_size: ranks that each own a shard.

    Raises:
        EngineError: ``cap`` is not positive.
    """
    if cap <= 0:
        raise EngineError(f"a bucket of {cap} bytes holds nothing", hint="give a size like bucket='2MB'")
    order = sending_order(parameters)
    boundaries: list[int] = []
    begin = filled = 0
    for place, index in enumerate(order):
        spec = parameters[index]
        nbytes = spec.numel * spec.itemsize
        apart = spec.dtype != parameters[order[place - 1]].dtype
        if place > begin and (filled + nbytes > cap or apart):
            boundaries.append(place)
            begin, filled = place, 0
        filled += nbytes
    return buckets_at(parameters, (*boundaries, len(order)), world_size=world_size)


def sending_order(parameters: Sequence[ParameterSpec]) -> list[int]:
    """Indices of the parameters in the order over which buckets are cut: last first, a dtype at a time."""
    first: dict[str, int] = {}
    for spec in reversed(parameters):
        first.setdefault(spec.dtype, len(first))
    return sorted(range(len(parameters)), key=lambda i: (first[parameters[i].dtype], -i))


def buckets_at(
    parameters: Sequence[ParameterSpec], boundaries: Sequence[int], *, world_size: int
) -> tuple[Bucket, ...]:
    """Buckets that end at these places of :func:`sending_order`.

    Args:
        parameters: the trained parameters in order of registration.
        boundaries: rising; the last one is the number of parameters.
        world_size: ranks that each own a shard.

    Raises:
        EngineError: the boundaries don't rise to the number of parameters, or a bucket holds two dtypes.
    """
    order = sending_order(parameters)
    edges = [0, *boundaries]
    pieces = [[parameters[i] for i in order[a:b]] for a, b in itertools.pairwise(edges)]
    legal = edges[-1] == len(order) and all(a < b for a, b in itertools.pairwise(edges))
    if not legal or any(len({spec.dtype for spec in piece}) > 1 for piece in pieces):
        raise EngineError(
            f"borders {list(boundaries)} between {len(order)} parameters",
            hint="give rising indices that keep dtypes apart, the last one the number of parameters",
        )
    buckets = []
    for index, (begin, piece) in enumerate(zip(edges, pieces, strict=False)):
        slots, offset = [], 0
        for place, spec in enumerate(piece, start=begin):
            slots.append(Slot(index=order[place], name=spec.name, offset=offset, numel=spec.numel))
            offset += spec.numel
        buckets.append(_bucket(index, slots, piece[0], world_size))
    return tuple(buckets)


def boundaries_of(buckets: Sequence[Bucket]) -> list[int]:
    """The boundaries at which :func:`buckets_at` cuts these."""
    return list(itertools.accumulate(len(bucket.slots) for bucket in buckets))


def plan_hash(buckets: Sequence[Bucket]) -> bytes:
    """32 bytes that differ when two ranks would cut differently; equal plans hash alike everywhere.

    Two ranks that exchange unlike buckets of equal size get wrong sums without any error, so ranks
    compare this before the first step.
    """
    digest = hashlib.sha256()
    for bucket in buckets:
        digest.update(f"{bucket.dtype} {bucket.numel} {bucket.world_size}\n".encode())
        for slot in bucket.slots:
            digest.update(f"{slot.name} {slot.offset} {slot.numel}\n".encode())
    return digest.digest()


def _bucket(index: int, slots: Sequence[Slot], spec: ParameterSpec, world_size: int) -> Bucket:
    filled = slots[-1].offset + slots[-1].numel
    unit = world_size * max(1, SHARD_ALIGNMENT // spec.itemsize)
    return Bucket(
        index=index,
        slots=tuple(slots),
        numel=-(-filled // unit) * unit,
        dtype=spec.dtype,
        itemsize=spec.itemsize,
        world_size=world_size,
    )
