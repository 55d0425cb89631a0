"""Eight bits a value and a scale for each block: 3.94 times fewer bytes than fp32.

For a block ``x`` of 256 values::

    s = max |x| / 127        q = round(x / s), ties to even        x ≈ q s,  off by at most s / 2

On the wire: the scales of all blocks (fp32), then the values (int8). A block's scale is a NaN or an
infinity if one of its values is, and none of its values is finite then.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, arXiv 2110.02861, for
blocks; Wang et al., "ZeRO++", arXiv 2306.10209, for the exchange that rounds once whatever the number
of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

BLOCK = 256
"""Values that share a scale: 1.6 % more bytes. An outlier spoils the precision of its block alone."""

_STEPS = 127.0
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Blocks of denormals round to zero: one over a smaller scale would be infinite."""


class Int8Codec:
    """See :class:`tonnage.engine.compress.Codec`."""

    name = "int8"
    lossless = False
    fixed = True

    def __init__(self) -> None:
        self._encoding = Scratch()
        self._decoding = Scratch()

    def max_wire_nbytes(self, numel: int) -> int:
        """A byte an element and four a block."""
        return padded(4 * num_blocks(numel)) + padded(numel)

    def encode(self, chunk: torch.Tensor, wire: torch.Tensor, residual: torch.Tensor | None = None) -> int:
        """Round each value to one of 255 steps."""
        check_encode(self, chunk, wire, residual)
        numel = chunk.numel()
        scales, steps = _split(wire, numel)
        size = piece_numel(chunk.device)
        for start, stop in pieces(numel, size):
            owed = None if residual is None else residual[start:stop]
            wanted = self._encoding("wanted", size, torch.float32, chunk.device)[: stop - start]
            add_residual(chunk[start:stop], owed, wanted)
            for rows, columns in block_shapes(stop - start):
                first = start + rows.start
                self._blocks(
                    wanted[rows].view(columns),
                    scales[first // BLOCK :][: columns[0]].unsqueeze(1),
                    steps[first:][: columns[0] * columns[1]].view(columns),
                    None if owed is None else owed[rows].view(columns),
                )
        return self.max_wire_nbytes(numel)

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Steps times scales."""
        self.reduce([wire], out)

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor, *, scale: float = 1.0) -> None:
        """See :class:`Codec`."""
        check_reduce(self, parts, out)
        numel = out.numel()

        def values(wire: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            scales, steps = _split(wire, numel)
            into = self._decoding("values", piece_numel(wire.device), torch.float32, wire.device)
            for rows, shape in block_shapes(stop - start):
                first = start + rows.start
                block_scales = scales[first // BLOCK :][: shape[0]].unsqueeze(1)
                here = into[rows].view(shape)
                torch.mul(steps[first:][: here.numel()].view(shape), block_scales, out=here)
            return into[: stop - start]

        add_up(parts, out, scale, values, self._decoding)

    def _blocks(
        self,
        wanted: torch.Tensor,
        scales: torch.Tensor,
        steps: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        """Whole blocks, shape ``(blocks, BLOCK)``, or one that is cut short, shape ``(1, …)``."""
        count, device = wanted.numel(), wanted.device
        spare = self._encoding("spare", count, torch.float32, device).view(wanted.shape)
        inverse = self._encoding("inverse", len(scales), torch.float32, device).unsqueeze(1)
        torch.amax(torch.abs(wanted, out=spare), dim=1, keepdim=True, out=scales)
        scales.div_(_STEPS).clamp_min_(_LEAST_SCALE)
        torch.reciprocal(scales, out=inverse)
        torch.mul(wanted, inverse, out=spare).round_()
        steps.copy_(spare)
        if residual is not None:
            keep_residual(wanted, spare.mul_(scales), residual, probe=scales)


def num_blocks(numel: int) -> int:
    """Blocks of ``numel`` values, the last of which may be cut short."""
    return -(-numel // BLOCK)


def block_shapes(numel: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """The whole blocks as one matrix; then, as another, a last one that is cut short."""
    whole = numel // BLOCK * BLOCK
    if whole:
        yield slice(0, whole), (whole // BLOCK, BLOCK)
    if whole < numel:
        yield slice(whole, numel), (1, numel - whole)


def _split(wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and the steps of a wire."""
    blocks = num_blocks(numel)
    begin = padded(4 * blocks)
    return wire[: 4 * blocks].view(torch.float32), wire[begin : begin + numel].view(torch.int8)
