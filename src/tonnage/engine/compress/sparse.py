"""Only the blocks that hold anything: gradients of embeddings, experts and pruned blocks.

A step touches the rows of an embedding that its tokens name; the rest of the gradient is zero. A chunk
is cut into blocks of 64 values (a row is seldom shorter, and a chunk may begin amid a row); a bitmap says
which have a bit set, and these travel as they are. Nothing is lost, not even the sign of a zero.

On the wire: bytes in use (int64), padded; the bitmap, padded; the blocks; what is left behind the last
whole block, at most 63 values.

How many blocks there are is known only by looking, which waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tonnage.engine.compress.bits import pack_bits, unpack_bits
from tonnage.engine.compress.codec import (
    WIRE_ALIGNMENT,
    Scratch,
    add_up,
    check_dtype,
    check_encode,
    check_reduce,
    damaged,
    padded,
    piece_numel,
    pieces,
    used_nbytes,
)

BLOCK = 64
"""Values a block: its bit in the map is 1/2048 of fp32's bytes."""

_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class SparseCodec:
    """See :class:`tonnage.engine.compress.Codec`; takes chunks of one dtype, and needs no residual."""

    name = "sparse"
    lossless = True
    fixed = False

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._encoding = Scratch()
        self._decoding = Scratch()

    def max_wire_nbytes(self, numel: int) -> int:
        """All blocks and the map."""
        return self._blocks_place(numel) + padded(numel * self._dtype.itemsize)

    def encode(self, chunk: torch.Tensor, wire: torch.Tensor, residual: torch.Tensor | None = None) -> int:
        """Send the blocks that aren't zero; the residual is neither read nor written."""
        check_encode(self, chunk, wire, residual)
        check_dtype(chunk, self._dtype, self)
        numel, begin = chunk.numel(), self._blocks_place(chunk.numel())
        whole = numel // BLOCK
        flags = self._flags(chunk[: whole * BLOCK].view(whole, BLOCK))
        eighth = len(flags) // 8
        spare = self._encoding("spare", eighth, torch.int64, chunk.device)
        pack_bits(flags, wire[WIRE_ALIGNMENT:][:eighth], spare)
        which = flags[:whole].nonzero().view(-1)
        end = begin + len(which) * BLOCK * self._dtype.itemsize
        blocks = wire[begin:end].view(self._dtype).view(-1, BLOCK)
        torch.index_select(chunk[: whole * BLOCK].view(whole, BLOCK), 0, which, out=blocks)
        rest = chunk[whole * BLOCK :]
        wire[end : end + rest.nbytes].view(self._dtype).copy_(rest)
        used = padded(end + rest.nbytes)
        wire[:8].view(torch.int64).fill_(used)
        return used

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """The same bits, when ``out`` has the codec's dtype."""
        self.reduce([wire], out)

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor, *, scale: float = 1.0) -> None:
        """See :class:`Codec`."""
        check_reduce(self, parts, out)
        held = {id(p): self._read(p, out.numel()) for p in parts if p.dtype == torch.uint8}
        if len(parts) == 1 and held and out.dtype == self._dtype and scale == 1:
            # Not through fp32, which a NaN's payload or an fp64 would not survive.
            held[id(parts[0])].write(out, 0, out.numel())
            return

        def values(wire: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            into = self._decoding("values", piece_numel(out.device), self._dtype, out.device)
            return held[id(wire)].write(into[: stop - start], start, stop)

        add_up(parts, out, scale, values, self._decoding)

    def _flags(self, blocks: torch.Tensor) -> torch.Tensor:
        """Which blocks have a bit set; filled up with zeros to a multiple of 8."""
        whole = len(blocks)
        flags = self._encoding("flags", padded(whole), torch.bool, blocks.device)
        flags[whole:].fill_(False)
        # Bits, not values: -0 is to stay -0. As wide as the values, as a chunk may begin anywhere.
        ints = blocks.view(_INTS[self._dtype.itemsize])
        for start, stop in pieces(whole, piece_numel(blocks.device) // BLOCK):
            torch.any(ints[start:stop], dim=1, out=flags[start:stop])
        return flags

    def _read(self, wire: torch.Tensor, numel: int) -> _Blocks:
        """What a wire holds; its counts are checked before anything is read by them."""
        whole, begin = numel // BLOCK, self._blocks_place(numel)
        if wire.numel() < begin:
            raise damaged(f"{wire.numel()} bytes can't hold the map of {numel} elements")
        flags = unpack_bits(wire[WIRE_ALIGNMENT:][: -(-whole // 8)])[:whole].bool()
        which = flags.nonzero().view(-1)
        end = begin + len(which) * BLOCK * self._dtype.itemsize
        nbytes = numel % BLOCK * self._dtype.itemsize
        if padded(end + nbytes) != used_nbytes(wire):
            raise damaged(f"its map names {len(which)} blocks, its header gives {used_nbytes(wire)} bytes")
        blocks = wire[begin:end].view(self._dtype).view(-1, BLOCK)
        return _Blocks(which, blocks, wire[end : end + nbytes].view(self._dtype))

    def _blocks_place(self, numel: int) -> int:
        return WIRE_ALIGNMENT + padded(-(-(numel // BLOCK) // 8))


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """The blocks that were sent, which they are, in order, and what is behind the last whole block."""

    which: torch.Tensor
    blocks: torch.Tensor
    rest: torch.Tensor

    def write(self, out: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Fill ``out`` with elements ``[start, stop)``; ``start`` begins a block."""
        first, last = start // BLOCK, stop // BLOCK
        low, high = torch.searchsorted(self.which, torch.tensor([first, last], device=out.device)).tolist()
        whole = (last - first) * BLOCK
        out.zero_()
        rows = out[:whole].view(-1, BLOCK)
        rows.index_copy_(0, self.which[low:high] - first, self.blocks[low:high])
        out[whole:].copy_(self.rest[: stop - start - whole])
        return out
