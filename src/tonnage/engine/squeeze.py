"""Compression of a whole model: one packing a bucket, and what of it belongs into a checkpoint.

Which codec, where its residuals lie, and the master copies of shards whose parameters are handed on
rounded. :mod:`tonnage.engine.transport.packed` says what is done with them in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tonnage.engine.bucket import Bucket, Slot
from tonnage.engine.carry import carry_shards
from tonnage.engine.compress import ErrorFeedback, FeedbackState, PowerState, as_matrix, make_codec
from tonnage.engine.compress.feedback import FORMAT as FEEDBACK_FORMAT
from tonnage.engine.state import Piece, filled
from tonnage.engine.transport import Buffers, Packing, Projection, Transport
from tonnage.errors import EngineError

_DEFAULT_RANK = 4


class Compression:
    """What compression holds on one rank.

    Args:
        name: as a user writes it: a codec's name, or ``power:RANK``.
        buckets: how the gradients are cut.
        shapes: shape of each trained parameter, by its index.
        dtypes: dtype of each bucket.
        rank: this rank.
        sharded: whether parameters are handed on, not gradients.
        device: where all of it lives.

    Raises:
        EngineError: no codec has that name, or PowerSGD was asked for where parameters are handed on.
    """

    def __init__(
        self,
        name: str,
        *,
        buckets: Sequence[Bucket],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        rank: int,
        sharded: bool,
        device: torch.device,
    ) -> None:
        self.name = name
        power = _power_rank(name)
        if power is not None and sharded:
            raise EngineError(
                "PowerSGD gives every rank the whole mean, and leaves a sharding schedule nothing to save",
                hint=f"schedule='allreduce' with compress={name!r}",
            )
        self._buckets = buckets
        self._rank = rank
        self._sharded = sharded
        self._codecs = {} if power else {dtype: make_codec(name, dtype) for dtype in dict.fromkeys(dtypes)}
        lossy = power is not None or not next(iter(self._codecs.values())).lossless
        self._owed = ErrorFeedback(buckets, rank=rank, device=device) if lossy else None
        handed_on = lossy and power is None
        self._owed_shard = (
            ErrorFeedback(buckets, rank=rank, device=device, own_shard=True)
            if handed_on and not sharded
            else None
        )
        self._masters = (
            [torch.zeros(b.shard_numel, dtype=t, device=device) for b, t in zip(buckets, dtypes, strict=True)]
            if handed_on and sharded
            else []
        )
        self._powers = [_power_state(b, shapes, power, device) for b in buckets] if power else []

    def packing(self, bucket: Bucket, dtype: torch.dtype) -> Packing | Projection:
        """How ``bucket`` travels."""
        index = bucket.index
        owed = None if self._owed is None else self._owed.residual(index, 0, bucket.numel)
        if self._powers:
            assert owed is not None
            power, rest = self._powers[index]
            return Projection(power, owed, rest)
        start, stop = bucket.shard(self._rank)
        return Packing(
            self._codecs[dtype],
            owed,
            None if self._owed_shard is None else self._owed_shard.residual(index, start, stop),
            self._masters[index] if self._masters else None,
            filled=bucket.slots[-1].offset + bucket.slots[-1].numel,
        )

    def take_parameters(self, buffers: Sequence[Buffers]) -> None:
        """The parameters are what they are now, on all ranks, whatever the masters held."""
        for bucket, memory, master in zip(self._buckets, buffers, self._masters, strict=bool(self._masters)):
            start, stop = bucket.shard(self._rank)
            master.copy_(memory.parameter[start:stop])

    def carry(self, old: Compression, transport: Transport) -> None:
        """Owe what ``old`` did, which works on other buckets of the same model; by all ranks together.

        A lossless one owes nothing: then :meth:`exact_shards` has to be handed on.
        """
        if self._owed is not None and old._owed is not None:
            self._owed.load_state_dict([old._owed.state_dict()])
        if self._owed_shard is not None and old._owed_shard is not None:
            _copy(
                self._owed_shard.flats,
                carry_shards(transport, old._buckets, old._owed_shard.flats, self._buckets),
            )
        if self._masters and old._masters:
            _copy(self._masters, carry_shards(transport, old._buckets, old._masters, self._buckets))

    def scale(self, factor: float) -> None:
        """All that is owed was in another unit, of which the new one has ``factor``."""
        for owed in (self._owed, self._owed_shard):
            for flat in owed.flats if owed is not None else ():
                flat.mul_(factor)

    def exact_shards(self, transport: Transport, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
        """The own shards of ``buckets`` as the optimizer left them; empty where they are on all ranks alike."""
        return carry_shards(transport, self._buckets, self._masters, buckets) if self._masters else []

    def state_dict(self) -> dict[str, Any]:
        """What is owed, by parameter and element; load it on the same rank, or all ranks' on any number."""
        state: dict[str, Any] = {"name": self.name}
        if self._owed is not None:
            state["owed"] = self._owed.state_dict()
        if self._owed_shard is not None:
            state["owed_shard"] = self._owed_shard.state_dict()
        if self._masters:
            state["masters"] = {
                slot.name: {
                    "first": first - slot.offset,
                    "values": master[first - start : last - start].clone(),
                }
                for bucket, master in zip(self._buckets, self._masters, strict=True)
                for slot, first, last, start in _own_slots(bucket, self._rank)
            }
        if self._powers:
            state["power"] = {k: v for power, _ in self._powers for k, v in power.state_dict().items()}
        return state

    def gather(self, transport: Transport) -> dict[str, Any]:
        """As one rank that owes alone would have it, on all ranks; by all together."""
        state: dict[str, Any] = {"name": self.name}
        if self._owed is not None:
            means = (transport.exchange(flat).mean(0) for flat in self._owed.flats)
            state["owed"] = _of_one_rank(self._buckets, means)
        if self._owed_shard is not None:
            wholes = (transport.exchange(flat).view(-1) for flat in self._owed_shard.flats)
            state["owed_shard"] = _of_one_rank(self._buckets, wholes)
        if self._masters:
            state["masters"] = {
                name: {"first": 0, "values": values}
                for bucket, master in zip(self._buckets, self._masters, strict=True)
                for name, values in _by_slot(bucket, transport.exchange(master).view(-1))
            }
        if self._powers:
            state["power"] = {k: v for power, _ in self._powers for k, v in power.state_dict().items()}
        return state

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take back what :meth:`state_dict` gave on this rank or on all, or what :meth:`gather` gave.

        Raises:
            EngineError: it belongs to another compression, or leaves elements out.
        """
        odd = next((state for state in states if state.get("name") != self.name), None)
        if odd is not None or any(bool(self._masters) != ("masters" in state) for state in states):
            raise EngineError(
                f"the checkpoint was written with compress={(odd or states[0]).get('name')!r}, "
                f"this model has {self.name!r}",
                hint="wrap the model with the compression and schedule that it was saved with",
            )
        pieces: dict[str, list[Piece]] = {}
        for state in states:
            for name, each in state.get("masters", {}).items():
                values = each["values"]
                piece = Piece(first=each["first"], numel=len(values), values={"master": values})
                pieces.setdefault(name, []).append(piece)
        for bucket, master in zip(self._buckets, self._masters, strict=bool(self._masters)):
            for slot, first, last, start in _own_slots(bucket, self._rank):
                mine = master[first - start : last - start]
                whole = pieces.get(slot.name, [_NOTHING])
                mine.copy_(filled(slot.name, first - slot.offset, mine, whole)["master"])
        if self._owed is not None:
            self._owed.load_state_dict([state["owed"] for state in states])
        if self._owed_shard is not None:
            self._owed_shard.load_state_dict([state["owed_shard"] for state in states])
        for power, _ in self._powers:
            power.load_state_dict(states[0]["power"])


_NOTHING = Piece(first=0, numel=0, values={})
"""Stands for a parameter that was not saved, so that it is missed."""


def is_power(name: str | None) -> bool:
    """Whether that is PowerSGD."""
    return name is not None and name.partition(":")[0] == "power"


def probe_packing(
    name: str, dtype: torch.dtype, *, numel: int, world_size: int, sharded: bool, device: torch.device
) -> Packing:
    """How a bucket of ``numel`` elements, none of which is a parameter's, would be compressed."""
    codec = make_codec(name, dtype)
    size = numel // world_size

    def owed(count: int, wanted: bool) -> torch.Tensor | None:
        return torch.zeros(count, device=device) if wanted and not codec.lossless else None

    master = torch.zeros(size, dtype=dtype, device=device) if sharded and not codec.lossless else None
    return Packing(codec, owed(numel, True), owed(size, not sharded), master, filled=numel)


def _own_slots(bucket: Bucket, rank: int) -> Iterator[tuple[Slot, int, int, int]]:
    """Parameters of the own shard: each one's first and last element there, and the shard's first."""
    start, stop = bucket.shard(rank)
    for slot in bucket.slots:
        first, last = slot.within(start, stop)
        if first < last:
            yield slot, first, last, start


def _by_slot(bucket: Bucket, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for slot in bucket.slots:
        yield slot.name, whole[slot.offset : slot.offset + slot.numel].clone()


def _of_one_rank(buckets: Sequence[Bucket], wholes: Iterable[torch.Tensor]) -> FeedbackState:
    return {
        "format": FEEDBACK_FORMAT,
        "rank": 0,
        "world_size": 1,
        "owed": {
            name: [{"start": 0, "values": values.cpu()}]
            for bucket, whole in zip(buckets, wholes, strict=True)
            for name, values in _by_slot(bucket, whole)
        },
    }


def _copy(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for target, source in zip(into, values, strict=True):
        target.copy_(source)


def _power_rank(name: str) -> int | None:
    kind, colon, number = name.partition(":")
    if kind != "power":
        return None
    if colon and not number.isdigit():
        raise EngineError(f"no rank in compress={name!r}", hint="give a number, like compress='power:4'")
    return int(number) if colon else _DEFAULT_RANK


def _power_state(
    bucket: Bucket, shapes: Sequence[Sequence[int]], rank: int, device: torch.device
) -> tuple[PowerState, tuple[tuple[int, int], ...]]:
    found = [as_matrix(s.name, s.offset, shapes[s.index], rank=rank) for s in bucket.slots]
    rest: Iterable[tuple[int, int]] = (
        (slot.offset, slot.offset + slot.numel)
        for slot, matrix in zip(bucket.slots, found, strict=True)
        if matrix is None
    )
    return PowerState([m for m in found if m is not None], rank=rank, device=device), tuple(rest)
