"""Half precision on the wire: half of fp32's bytes, with 8 bits of mantissa (bf16) or 11 (fp16).

bf16 reaches as far as fp32 does. fp16 ends at 65504: what is larger arrives as an infinity, which a
gradient scaler sees, and begins at 6e-8, below which it rounds to zero; without a scaler use bf16. The sum is fp32, so small values aren't lost in a large one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tonnage.engine.compress.codec import (
    Scratch,
    add_residual,
    add_up,
    check_encode,
    check_reduce,
    keep_residual,
    padded,
    piece_numel,
    pieces,
)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class CastCodec:
    """See :class:`tonnage.engine.compress.Codec`; ``name`` is ``bf16`` or ``fp16``."""

    lossless = False
    fixed = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._dtype = _DTYPES[name]
        self._encoding = Scratch()
        self._decoding = Scratch()

    def max_wire_nbytes(self, numel: int) -> int:
        """Two bytes an element."""
        return padded(2 * numel)

    def encode(self, chunk: torch.Tensor, wire: torch.Tensor, residual: torch.Tensor | None = None) -> int:
        """Round to nearest, ties to even."""
        check_encode(self, chunk, wire, residual)
        halves = wire[: 2 * chunk.numel()].view(self._dtype)
        if residual is None:
            halves.copy_(chunk)
        else:
            self._with_residual(chunk, halves, residual)
        return self.max_wire_nbytes(chunk.numel())

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Exact when ``out`` is fp32."""
        self.reduce([wire], out)

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor, *, scale: float = 1.0) -> None:
        """See :class:`Codec`."""
        check_reduce(self, parts, out)
        add_up(parts, out, scale, self._values, self._decoding)

    def _with_residual(self, chunk: torch.Tensor, halves: torch.Tensor, residual: torch.Tensor) -> None:
        size = piece_numel(chunk.device)
        for start, stop in pieces(chunk.numel(), size):
            wanted, sent = (
                self._encoding(use, size, torch.float32, chunk.device)[: stop - start]
                for use in ("wanted", "sent")
            )
            add_residual(chunk[start:stop], residual[start:stop], wanted)
            sent.copy_(halves[start:stop].copy_(wanted))
            keep_residual(wanted, sent, residual[start:stop], probe=sent)

    def _values(self, wire: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return wire[2 * start : 2 * stop].view(self._dtype)
