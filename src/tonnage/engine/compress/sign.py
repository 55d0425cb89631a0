"""One bit a value and a scale for each block: 31 times fewer bytes than fp32.

For a block ``x`` of 1024 values::

    s = mean |x|        b = sign bit of x        x ≈ s if b else -s

``s`` is the best there is in the square sense. The loss is large, so this is of use only with error
feedback: signs alone can diverge. A value of zero arrives as ``s``, and the next step takes it back; do
not send what is known to be zero (see :class:`tonnage.engine.compress.MaskedCodec`).

On the wire: the scales (fp32), then the bits, the block's first value in the lowest bit of a byte.

Source: Bernstein et al., "signSGD", ICML 2018, arXiv 1802.04434; Karimireddy et al., "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, arXiv 1901.09847.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tonnage.engine.compress.bits import pack_bits, signs_of_bytes
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

BLOCK = 1024
"""Values that share a scale: a scale adds 3 % to the bits."""


class SignCodec:
    """See :class:`tonnage.engine.compress.Codec`."""

    name = "sign"
    lossless = False
    fixed = True

    def __init__(self) -> None:
        self._encoding = Scratch()
        self._decoding = Scratch()
        self._tables: dict[torch.device, torch.Tensor] = {}

    def max_wire_nbytes(self, numel: int) -> int:
        """A bit an element and four bytes a block."""
        return padded(4 * _num_blocks(numel)) + padded(_num_blocks(numel) * BLOCK // 8)

    def encode(self, chunk: torch.Tensor, wire: torch.Tensor, residual: torch.Tensor | None = None) -> int:
        """Keep the signs and each block's mean magnitude."""
        check_encode(self, chunk, wire, residual)
        scales, packed = _split(wire, chunk.numel())
        size = piece_numel(chunk.device)
        for start, stop in pieces(chunk.numel(), size):
            # The last block is filled up with zeros, and its mean taken over what is there.
            filled = _num_blocks(stop - start) * BLOCK
            wanted = self._encoding("wanted", size, torch.float32, chunk.device)[:filled]
            wanted[stop - start :].zero_()
            owed = None if residual is None else residual[start:stop]
            add_residual(chunk[start:stop], owed, wanted[: stop - start])
            rows = scales[start // BLOCK :][: filled // BLOCK]
            positive = self._bits(wanted, rows, packed[start // 8 :][: filled // 8])
            if stop - start < filled:
                rows[-1:].mul_(BLOCK / (BLOCK - filled + stop - start))
            if owed is not None:
                sent = self._encoding("spare", size, torch.float32, chunk.device)[:filled]
                torch.sub(positive.view(torch.uint8), 0.5, out=sent)
                sent.view(-1, BLOCK).mul_(rows.unsqueeze(1)).mul_(2)
                keep_residual(wanted[: stop - start], sent[: stop - start], owed, probe=rows)
        return self.max_wire_nbytes(chunk.numel())

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Plus or minus the scales."""
        self.reduce([wire], out)

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor, *, scale: float = 1.0) -> None:
        """See :class:`Codec`."""
        check_reduce(self, parts, out)
        numel = out.numel()

        def values(wire: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            scales, packed = _split(wire, numel)
            blocks = _num_blocks(stop - start)
            size = piece_numel(wire.device)
            which = self._decoding("which", size // 8, torch.int32, wire.device)[: blocks * BLOCK // 8]
            which.copy_(packed[start // 8 :][: len(which)])
            signs = self._decoding("values", size, torch.float32, wire.device)[: blocks * BLOCK]
            torch.index_select(self._table(wire.device), 0, which, out=signs.view(-1, 8))
            signs.view(-1, BLOCK).mul_(scales[start // BLOCK :][:blocks].unsqueeze(1))
            return signs[: stop - start]

        add_up(parts, out, scale, values, self._decoding)

    def _bits(self, wanted: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """Write scales and bits of whole blocks; returns which values are not negative, as 0 and 1."""
        count, device = wanted.numel(), wanted.device
        spare = self._encoding("spare", count, torch.float32, device)
        positive = self._encoding("positive", count, torch.bool, device)
        eights = self._encoding("eights", count // 8, torch.int64, device)
        torch.mean(torch.abs(wanted, out=spare).view(-1, BLOCK), dim=1, out=scales)
        torch.ge(wanted, 0, out=positive)
        pack_bits(positive, packed, eights)
        return positive

    def _table(self, device: torch.device) -> torch.Tensor:
        if device not in self._tables:
            self._tables[device] = signs_of_bytes(device)
        return self._tables[device]


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _split(wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and the bits of a wire."""
    blocks = _num_blocks(numel)
    begin = padded(4 * blocks)
    return wire[: 4 * blocks].view(torch.float32), wire[begin : begin + blocks * BLOCK // 8]
