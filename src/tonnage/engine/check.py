"""What ``debug=True`` watches, at the price of speed.

Each of these is silent in an ordinary run: a gradient that is written after its bucket left, memory that is
read before it was received or after it was handed on, and ranks whose parameters have drifted apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tonnage.engine.transport import Buffers, TcpTransport, Transport, average
from tonnage.errors import EngineError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Check:
    """Compares what overlapped with a blocking exchange, and fills memory between its uses with NaN.

    Args:
        transport: the exchange, and the memory in which others' parts land.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._left: dict[int, torch.Tensor] = {}
        if isinstance(transport, TcpTransport):
            transport.poisons = True

    def leaves(self, index: int, memory: Buffers) -> None:
        """A bucket's gradients are about to be sent; what a codec sends is another mean, and is not compared."""
        if memory.packing is None:
            self._left[index] = memory.gradient.clone()

    def averaged(self, buffers: Sequence[Buffers]) -> None:
        """All that left was received: is it the mean? All ranks call this together.

        Raises:
            EngineError: it is not.
        """
        apart = [self._compare(index, buffers[index]) for index in sorted(self._left)]
        self._left.clear()
        here = next(filter(None, apart), "")
        # All raise together: one that went on would wait for the others.
        device = buffers[0].gradient.device
        where = (
            self._transport.exchange(torch.tensor([bool(here)], device=device)).view(-1).nonzero().view(-1)
        )
        if where.numel():
            raise EngineError(
                here or "the overlapped mean of a bucket is not that of a blocking exchange",
                where=f"rank {', '.join(map(str, where.tolist()))}",
                hint="something wrote gradients while the backward pass ran; if nothing of yours does, "
                "please report it",
            )

    def _compare(self, index: int, memory: Buffers) -> str:
        """What is wrong with a bucket's mean on this rank; empty if nothing is."""
        mine = self._left[index]
        wanted = torch.empty_like(mine)
        average(list(self._transport.exchange(mine)), out=wanted)
        found = memory.gradient
        if memory.shard_gradient.numel():
            size = memory.shard_gradient.numel()
            wanted = wanted[self._transport.rank * size :][:size]
            found = memory.shard_gradient
        # NaN and infinity of the user's own are his to find.
        wanted, found = wanted.nan_to_num(), found.nan_to_num()
        same = torch.equal(found, wanted) if found.device.type == "cpu" else torch.allclose(found, wanted)
        if same:
            return ""
        return (
            f"the overlapped mean of bucket {memory.label} is not that of a blocking exchange: "
            f"{int((found != wanted).sum())} of {found.numel()} numbers differ, "
            f"by {float((found - wanted).abs().max()):.3g} at most"
        )

    def used(self, buffers: Sequence[Buffers]) -> None:
        """The optimizer has read its gradients: whoever reads them again reads NaN."""
        for memory in buffers:
            memory.shard_gradient.fill_(torch.nan)

    def agree(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """All ranks' parameters are the same, bit for bit. All ranks call this together.

        Raises:
            EngineError: some differ.
        """
        sums = [
            p.detach().reshape(-1).view(_BITS[p.element_size()]).sum(dtype=torch.int64) for p in parameters
        ]
        rows = self._transport.exchange(torch.stack(sums))
        apart = (rows != rows[0]).any(dim=0).nonzero().view(-1).tolist()
        if apart:
            others = (rows != rows[0]).any(dim=1).nonzero().view(-1).tolist()
            named = ", ".join(names[i] for i in apart[:3]) + (", …" if len(apart) > 3 else "")
            raise EngineError(
                f"{len(apart)} of {len(names)} parameters differ between ranks: {named}",
                where=f"rank 0 and rank {', '.join(map(str, others))}",
                hint="change parameters alike on all ranks, or on rank 0 and then wrap the model",
            )
