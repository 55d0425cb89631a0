"""What ranks hold of their shards, carried over to other buckets.

With other buckets a rank owns other elements. Each old bucket's shards are made whole on every rank,
one kind of values at a time, and each rank keeps its new part: memory for one bucket at a time, and as
many bytes as handing out the values once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tonnage.engine.bucket import Bucket, Slot
from tonnage.engine.transport import Buffers, Transport
from tonnage.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """This rank's part of one parameter in an optimizer.

    Attributes:
        index: of the parameter.
        first: element of the parameter that it begins with.
        tensor: shape ``(elements,)``, what the optimizer works on.
        optimizer: the one that holds its state.
    """

    index: int
    first: int
    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer

    def state(self) -> Mapping[str, Any]:
        """What the optimizer knows of it; nothing before its first step."""
        known: Mapping[str, Any] = self.optimizer.state.get(self.tensor, {})
        return known


def carry_shards(
    transport: Transport, old: Sequence[Bucket], flats: Sequence[torch.Tensor], new: Sequence[Bucket]
) -> list[torch.Tensor]:
    """The own shards of ``new`` buckets, with what all ranks' shards ``flats`` of ``old`` ones held.

    All ranks call it together. Elements that only fill up buckets are zero.
    """
    rank = transport.rank
    held = {slot.index: flat for bucket, flat in zip(old, flats, strict=True) for slot in bucket.slots}
    found = [held[bucket.slots[0].index].new_zeros(bucket.shard_numel) for bucket in new]
    place = {slot.index: (bucket, slot) for bucket in new for slot in bucket.slots}
    for bucket, flat in zip(old, flats, strict=True):
        whole = transport.exchange(flat).view(-1)
        for slot in bucket.slots:
            target, there = place[slot.index]
            start, stop = target.shard(rank)
            first, last = there.within(start, stop)
            if first < last:
                begin = slot.offset + first - there.offset
                found[target.index][first - start : last - start] = whole[begin : begin + last - first]
    return found


def hand_on(transport: Transport, shards: Sequence[torch.Tensor], memory: Sequence[Buffers]) -> None:
    """Parameters are ``shards``, each of the rank that holds it; by all ranks together."""
    for index, (shard, buffers) in enumerate(zip(shards, memory, strict=True)):
        start = transport.rank * len(shard)
        buffers.parameter[start : start + len(shard)] = shard
        ticket = transport.start_all_gather(index, index)
        transport.wait_received(ticket)
        transport.wait_sent(ticket)


def carry_state(
    transport: Transport,
    buckets: Sequence[Bucket],
    old: Iterable[Segment],
    new: Iterable[Segment],
) -> None:
    """Give the optimizers of ``new`` segments what those of ``old`` ones knew; all ranks together.

    Args:
        transport: moves it.
        buckets: that ``old`` segments are of.
        old: this rank's.
        new: this rank's.

    Raises:
        EngineError: an optimizer keeps something else for an element than numbers.
    """
    wanted: dict[int, list[Segment]] = {}
    for segment in new:
        wanted.setdefault(segment.index, []).append(segment)
    for slot, name, value in _everything(transport, buckets, old):
        for segment in wanted.get(slot.index, ()):
            state = segment.optimizer.state[segment.tensor]
            part = slice(segment.first, segment.first + segment.tensor.numel())
            elements = isinstance(value, torch.Tensor) and value.dim() > 0
            state[name] = _own(value[part] if elements else value)


def whole_state(
    transport: Transport, buckets: Sequence[Bucket], segments: Iterable[Segment]
) -> dict[int, dict[str, Any]]:
    """On rank 0 what all optimizers know, by parameter, flat and in the host's memory; elsewhere nothing.

    All ranks call it together.

    Raises:
        EngineError: an optimizer keeps something else for an element than numbers.
    """
    found: dict[int, dict[str, Any]] = {}
    for slot, name, value in _everything(transport, buckets, segments):
        if transport.rank == 0:
            kept = value.cpu() if isinstance(value, torch.Tensor) else value
            found.setdefault(slot.index, {})[name] = _own(kept)
    return found


def _everything(
    transport: Transport, buckets: Sequence[Bucket], segments: Iterable[Segment]
) -> Iterator[tuple[Slot, str, Any]]:
    """Each parameter's values of each kind that any rank has, one bucket and kind at a time."""
    own: dict[int, list[Segment]] = {}
    for segment in segments:
        own.setdefault(segment.index, []).append(segment)
    kinds = _kinds(transport, [s for each in own.values() for s in each])
    for bucket in buckets:
        for name, kind in kinds.items():
            for slot, value in _of_bucket(transport, bucket, name, kind, own):
                yield slot, name, value


def _of_bucket(
    transport: Transport,
    bucket: Bucket,
    name: str,
    kind: Mapping[str, str],
    own: Mapping[int, list[Segment]],
) -> Iterator[tuple[Slot, Any]]:
    start, _ = bucket.shard(transport.rank)
    dtype = _dtype(kind["dtype"])
    device = torch.device(kind["device"])
    elements = kind["form"] == "elements"
    size = bucket.shard_numel if elements else len(bucket.slots)
    flat = torch.zeros(size, dtype=dtype, device=device)
    known = torch.zeros(len(bucket.slots), dtype=torch.uint8, device=device)
    for number, slot in enumerate(bucket.slots):
        for segment in own.get(slot.index, ()):
            value = segment.state().get(name)
            if value is None:
                continue
            known[number] = 1
            if elements:
                begin = slot.offset + segment.first - start
                flat[begin : begin + segment.tensor.numel()] = value
            else:
                flat[number] = value
    told, rows = transport.exchange(known), transport.exchange(flat)
    for number, slot in enumerate(bucket.slots):
        ranks = told[:, number].nonzero().view(-1).tolist()
        if not ranks:
            continue
        if elements:
            yield slot, rows.view(-1)[slot.offset : slot.offset + slot.numel]
        else:
            value = rows[ranks[0], number].clone()
            yield slot, value if kind["form"] == "scalar" else _number(value, kind["form"])


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _kinds(transport: Transport, segments: Iterable[Segment]) -> dict[str, dict[str, str]]:
    """What is kept for a segment, by name, on any rank."""
    mine: dict[str, dict[str, str]] = {}
    for segment in segments:
        for name, value in segment.state().items():
            mine[name] = _kind(name, value, segment)
    device = torch.device("cpu") if transport.world_size == 1 else None
    merged: dict[str, dict[str, str]] = {}
    for each in everybodys(transport, json.dumps(mine).encode(), device):
        merged.update(json.loads(each))
    return dict(sorted(merged.items()))


def _kind(name: str, value: Any, segment: Segment) -> dict[str, str]:
    if isinstance(value, torch.Tensor):
        told = {"dtype": str(value.dtype), "device": str(value.device)}
        if value.dim() == 0:
            return {"form": "scalar", **told}
        if value.shape == segment.tensor.shape:
            return {"form": "elements", **told}
    elif isinstance(value, bool | int | float):
        return {"form": type(value).__name__, "dtype": "torch.float64", "device": "cpu"}
    raise EngineError(
        f"the optimizer keeps {name!r} for a parameter, which is no number an element",
        hint="give the bucket size, like bucket='2MB', and no compress='auto'",
    )


def _number(value: torch.Tensor, form: str) -> bool | int | float:
    kinds: dict[str, Callable[[float], bool | int | float]] = {"bool": bool, "int": int, "float": float}
    return kinds[form](float(value))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def everybodys(transport: Transport, data: bytes, device: torch.device | None = None) -> list[bytes]:
    """The bytes of every rank, on every rank."""
    lengths = transport.exchange(torch.tensor([len(data)], device=device)).view(-1).tolist()
    if not any(lengths):
        return [b""] * len(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    rows = transport.exchange(padded.to(device) if device is not None else padded).cpu()
    return [bytes(row[:length].numpy()) for row, length in zip(rows, lengths, strict=True)]
