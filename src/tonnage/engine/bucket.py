"""Which gradient lies where: parameters -> flat buckets -> shards.

A *bucket* is one flat buffer of gradients that travels as one. Gradients become ready from the last
layer to the first, so buckets are cut over the parameters in reverse order of their registration.
Each bucket is padded to ``world_size`` equal *shards*; rank ``r`` owns shard ``r``: it sums that part
of everybody's gradients and, when the optimizer is sharded, updates that part of the parameters.

This module is arithmetic only; no tensor is allocated here.
"""

from __future__ import annotations

import hashlib
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
    open_slots: dict[str, list[Slot]] = {}
    closed: list[tuple[list[Slot], ParameterSpec]] = []

    def close(spec: ParameterSpec) -> None:
        closed.append((open_slots.pop(spec.dtype), spec))

    for index in reversed(range(len(parameters))):
        spec = parameters[index]
        slots = open_slots.setdefault(spec.dtype, [])
        filled = slots[-1].offset + slots[-1].numel if slots else 0
        if slots and (filled + spec.numel) * spec.itemsize > cap:
            close(spec)
            slots, filled = open_slots.setdefault(spec.dtype, []), 0
        slots.append(Slot(index=index, name=spec.name, offset=filled, numel=spec.numel))
        if (filled + spec.numel) * spec.itemsize >= cap:
            close(spec)
    by_dtype = {spec.dtype: spec for spec in parameters}
    for dtype in list(open_slots):
        close(by_dtype[dtype])
    return tuple(_bucket(index, slots, spec, world_size) for index, (slots, spec) in enumerate(closed))


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
