"""A bucket that travels in fewer bytes: what is sent of it, and what is made of what arrives.

Two forms, which a transport drives alike: :class:`Coded` sends each peer its shard through a codec,
:class:`Projected` sends all peers the two thin matrices of PowerSGD. Both have two legs:

1. gradients: :meth:`~Packed.pack_gradients` on every rank, :meth:`~Packed.sum_gradients` when all have come;
2. what comes of them: :meth:`~Packed.pack_whole`, and :meth:`~Packed.unpack_whole`.

*Parameters* are handed on as differences. A rank keeps its shard as the optimizer left it, the *master*,
and every rank, the owner too, computes with what was sent of it: ``known += decode(encode(master - known))``.
So all ranks hold the same bits, and what one step rounded off the next one sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tonnage.engine.compress import Codec, PowerState

Sends = list[tuple[int, memoryview]]


@dataclass(slots=True, eq=False)
class Packing:
    """How a bucket is compressed, and the memory that this takes for as long as the model lives.

    Attributes:
        codec: what turns a shard into bytes.
        owed: fp32, one for each element of the bucket: what was not sent yet; ``None`` if lossless.
        owed_shard: the same for the own shard's mean; only where gradients are handed on, not parameters.
        master: the own shard of the parameters as the optimizer left it; only if they differ.
        filled: elements of the bucket that hold parameters; the others fill up shards.
    """

    codec: Codec
    owed: torch.Tensor | None
    owed_shard: torch.Tensor | None
    master: torch.Tensor | None
    filled: int


@dataclass(slots=True, eq=False)
class Projection:
    """PowerSGD's matrices of a bucket, and the stretches of it that travel as they are.

    Attributes:
        power: the matrices.
        owed: fp32, one for each element of the bucket.
        rest: first element, and first after it, of each parameter that is no matrix.
    """

    power: PowerState
    owed: torch.Tensor
    rest: tuple[tuple[int, int], ...]


class Packed(Protocol):
    """The four steps; each runs on the transport's adding thread. ``landing`` is where messages belong.

    Attributes:
        exact: whether a message always fills its landing.
    """

    exact: bool

    def gradients_landing(self, peer: int) -> torch.Tensor:
        """Memory for what ``peer`` sends in the first leg."""
        ...

    def whole_landing(self, peer: int) -> torch.Tensor:
        """Memory for what ``peer`` sends in the second leg."""
        ...

    def pack_gradients(self) -> Sends:
        """What goes to whom in the first leg; the bucket's gradients may be written afterwards."""
        ...

    def sum_gradients(self) -> None:
        """Everybody's part has come."""
        ...

    def pack_whole(self) -> Sends:
        """What goes to whom in the second leg."""
        ...

    def unpack_whole(self) -> None:
        """Everybody's part has come."""
        ...


class Coded:
    """A bucket through a codec.

    Args:
        packing: how.
        gradient: the bucket, shape ``(numel,)``.
        parameter: the parameters, as long; empty where gradients are averaged in place.
        summed: where the own shard's mean belongs.
        rank: this rank.
        peers: the others.
    """

    def __init__(
        self,
        packing: Packing,
        *,
        gradient: torch.Tensor,
        parameter: torch.Tensor,
        summed: torch.Tensor,
        rank: int,
        peers: Sequence[int],
    ) -> None:
        self.exact = packing.codec.fixed
        self._packing = packing
        self._gradient = gradient
        self._sharded = parameter.numel() > 0
        self._whole = parameter if self._sharded else gradient
        self._summed = summed
        self._rank = rank
        self._peers = peers
        self._size = size = summed.numel()
        nbytes = packing.codec.max_wire_nbytes(size)
        self._out = {peer: _wire(nbytes) for peer in peers}
        self._in = {peer: _wire(nbytes) for peer in peers}
        self._wholes = {r: _wire(nbytes) for r in range(len(peers) + 1)}
        self._delta = torch.empty_like(summed) if packing.master is not None else None
        # What a codec rounds these elements to is in no checkpoint, and must not reach their neighbours.
        flats = [self._whole, packing.owed]
        self._padding = [flat[packing.filled :] for flat in flats if flat is not None]
        if packing.owed_shard is not None:
            self._padding.append(packing.owed_shard[max(0, packing.filled - rank * size) :])

    def gradients_landing(self, peer: int) -> torch.Tensor:
        """A wire."""
        return self._in[peer]

    def whole_landing(self, peer: int) -> torch.Tensor:
        """A wire."""
        return self._wholes[peer]

    def pack_gradients(self) -> Sends:
        """Each peer's shard, and what is owed of it."""
        for padding in self._padding:
            padding.zero_()
        codec, owed = self._packing.codec, self._packing.owed
        sends = []
        for peer, wire in self._out.items():
            residual = None if owed is None else self._part(owed, peer)
            used = codec.encode(self._part(self._gradient, peer), wire, residual)
            sends.append((peer, _bytes(wire[:used])))
        return sends

    def sum_gradients(self) -> None:
        """The mean in rank order; what stays on its own rank is not rounded."""
        ranks = range(len(self._peers) + 1)
        parts = [self._in[r] if r != self._rank else self._part(self._gradient, r) for r in ranks]
        self._packing.codec.reduce(parts, self._summed, scale=1.0 / len(parts))

    def pack_whole(self) -> Sends:
        """The own shard: the step that its parameters took, or the mean of its gradients."""
        wire = self._wholes[self._rank]
        used = self._packing.codec.encode(self._own(), wire, self._packing.owed_shard)
        return [(peer, _bytes(wire[:used])) for peer in self._peers]

    def unpack_whole(self) -> None:
        """Every shard, the own one too, so that all ranks have the same bits."""
        for rank, wire in self._wholes.items():
            target = self._part(self._whole, rank)
            if self._delta is None:
                self._packing.codec.decode(wire, target)
            else:
                self._packing.codec.decode(wire, self._delta)
                target.add_(self._delta)

    def _own(self) -> torch.Tensor:
        if not self._sharded:
            return self._summed
        known = self._part(self._whole, self._rank)
        master = self._packing.master
        if master is None or self._delta is None:
            return known
        return torch.sub(master, known, out=self._delta)

    def _part(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        return flat[rank * self._size : (rank + 1) * self._size]


class Projected:
    """A bucket whose matrices travel as two thin ones each; all ranks send all peers the same.

    Args:
        projection: how.
        gradient: the bucket, shape ``(numel,)``; holds the mean at the end.
        rank: this rank.
        peers: the others.
    """

    exact = True

    def __init__(
        self, projection: Projection, *, gradient: torch.Tensor, rank: int, peers: Sequence[int]
    ) -> None:
        self._projection = projection
        self._gradient = gradient
        self._rank = rank
        self._peers = peers
        num_rest = sum(stop - start for start, stop in projection.rest)
        power = projection.power
        ranks = range(len(peers) + 1)
        self._firsts = {r: torch.empty(power.p.numel() + num_rest) for r in ranks}
        self._seconds = {r: torch.empty(power.q.numel()) for r in ranks}

    def gradients_landing(self, peer: int) -> torch.Tensor:
        """``P`` of all matrices, and what is none."""
        return self._firsts[peer]

    def whole_landing(self, peer: int) -> torch.Tensor:
        """``Q`` of all matrices."""
        return self._seconds[peer]

    def pack_gradients(self) -> Sends:
        """``P = M Q``, and what is no matrix."""
        power, own = self._projection.power, self._firsts[self._rank]
        power.project(self._gradient, self._projection.owed)
        own[: power.p.numel()] = power.p
        for place, (start, stop) in self._rest():
            own[place : place + stop - start] = self._gradient[start:stop]
        return [(peer, _bytes(own)) for peer in self._peers]

    def sum_gradients(self) -> None:
        """The sum of all ``P``, made orthonormal, and the mean of what is no matrix."""
        power = self._projection.power
        total = _sum(self._firsts)
        power.p.copy_(total[: power.p.numel()])
        for place, (start, stop) in self._rest():
            torch.mul(
                total[place : place + stop - start], 1 / len(self._firsts), out=self._gradient[start:stop]
            )
        power.back_project(self._projection.owed)

    def pack_whole(self) -> Sends:
        """``Q = M^T P``."""
        own = self._seconds[self._rank]
        own.copy_(self._projection.power.q)
        return [(peer, _bytes(own)) for peer in self._peers]

    def unpack_whole(self) -> None:
        """The mean is ``P Q^T`` over the ranks."""
        power = self._projection.power
        power.q.copy_(_sum(self._seconds))
        power.deliver(self._gradient, scale=1 / len(self._seconds))

    def _rest(self) -> list[tuple[int, tuple[int, int]]]:
        place, found = self._projection.power.p.numel(), []
        for start, stop in self._projection.rest:
            found.append((place, (start, stop)))
            place += stop - start
        return found


def _sum(by_rank: dict[int, torch.Tensor]) -> torch.Tensor:
    """In rank order: the same bits everywhere."""
    total = by_rank[0].clone()
    for rank in range(1, len(by_rank)):
        total += by_rank[rank]
    return total


def _wire(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
