"""Any codec over only those elements that are trained: pruned weights' gradients are not sent.

The kept elements are gathered, encoded as a chunk of their own, and scattered back into zeros. Which
they are is agreed beforehand, like the buckets, so their places cost no bytes. Frozen parameters need
none of this: they are in no bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tonnage.engine.compress.codec import (
    Codec,
    Scratch,
    check_encode,
    check_flat,
)
from tonnage.errors import EngineError


class MaskedCodec:
    """See :class:`tonnage.engine.compress.Codec`; for one chunk of one bucket, whose mask it holds.

    Args:
        inner: what encodes the elements that are kept.
        mask: bool, one for each element of the chunk, the same on all ranks.
    """

    def __init__(self, inner: Codec, mask: torch.Tensor) -> None:
        if mask.dtype != torch.bool or mask.dim() != 1:
            raise EngineError(
                f"a mask of shape {tuple(mask.shape)}, {mask.dtype}",
                hint="give a torch.bool tensor of one dim, True where a gradient is sent",
            )
        self.name = f"{inner.name} masked"
        self.lossless = inner.lossless
        self.fixed = inner.fixed
        self._inner = inner
        self._numel = mask.numel()
        self._kept = mask.nonzero().view(-1)
        self._encoding = Scratch()
        self._decoding = Scratch()

    def max_wire_nbytes(self, numel: int) -> int:
        """As many as the kept elements need."""
        self._check(numel)
        return self._inner.max_wire_nbytes(len(self._kept))

    def encode(self, chunk: torch.Tensor, wire: torch.Tensor, residual: torch.Tensor | None = None) -> int:
        """Encode the kept elements; the residual of the others stays as it was."""
        check_encode(self, chunk, wire, residual)
        count, device = len(self._kept), chunk.device
        kept = self._encoding(f"kept {chunk.dtype}", count, chunk.dtype, device)
        torch.index_select(chunk, 0, self._kept, out=kept)
        if residual is None or self.lossless:
            return self._inner.encode(kept, wire)
        owed = self._encoding("owed", count, torch.float32, device)
        torch.index_select(residual, 0, self._kept, out=owed)
        used = self._inner.encode(kept, wire, owed)
        residual.index_copy_(0, self._kept, owed)
        return used

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Zeros where nothing was sent."""
        self.reduce([wire], out)

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor, *, scale: float = 1.0) -> None:
        """See :class:`Codec`; zeros where nothing was sent, whatever a part as it is holds there."""
        check_flat(out, "result")
        self._check(out.numel())
        kept = [self._select(place, part) for place, part in enumerate(parts)]
        total = self._decoding(f"total {out.dtype}", len(self._kept), out.dtype, out.device)
        self._inner.reduce(kept, total, scale=scale)
        out.zero_().index_copy_(0, self._kept, total)

    def _select(self, place: int, part: torch.Tensor) -> torch.Tensor:
        if part.dtype == torch.uint8:
            return part
        check_flat(part, "part")
        self._check(part.numel())
        into = self._decoding(f"part {place} {part.dtype}", len(self._kept), part.dtype, part.device)
        return torch.index_select(part, 0, self._kept, out=into)

    def _check(self, numel: int) -> None:
        if numel != self._numel:
            raise EngineError(
                f"a chunk of {numel} elements under a mask of {self._numel}",
                hint="make one MaskedCodec for each chunk, with its part of the mask",
            )
