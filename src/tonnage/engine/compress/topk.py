"""The largest few values of each row, where they stand, and nothing of the rest.

A chunk is cut into rows of 4096 values; of each row the ``k = ceil(density * row)`` of largest magnitude
are sent, as they are (fp32), with their places (16 bits): ``6 k`` bytes a row, a ratio of
``0.67 / density``. A row's own largest values rather than the chunk's: the bytes are known in advance,
each layer gets its share, and a row stays in cache while it is searched. The residual gathers the rest
until it is large enough to go.

Of equal magnitudes the earlier goes first, and a NaN or an infinity before all: the search is over
integers, the magnitude's bits above and the place below, of which no two are equal.

Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, arXiv
1704.05021; Lin et al., "Deep Gradient Compression", ICLR 2018, arXiv 1712.01887.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from tonnage.engine.compress.codec import (
    Scratch,
    add_residual,
    add_up,
    check_encode,
    check_reduce,
    damaged,
    keep_residual,
    padded,
    piece_numel,
    pieces,
)
from tonnage.errors import EngineError

ROW = 4096
"""Values that are searched together; their places fit 16 bits."""

_MAGNITUDE = 0x7FFFFFFF
_PLACE_BITS = 16
_PLACES = (1 << _PLACE_BITS) - 1


class TopkCodec:
    """See :class:`tonnage.engine.compress.Codec`.

    Args:
        density: the part of the values that is sent, above 0 and at most 1.

    Raises:
        EngineError: ``density`` is not.
    """

    lossless = False
    fixed = True

    def __init__(self, density: float = 0.01) -> None:
        if not 0 < density <= 1:
            raise EngineError(
                f"top-k with a density of {density}", hint="give a part of one, like compress='topk:0.01'"
            )
        self.name = f"topk:{density:g}"
        self._density = density
        self._encoding = Scratch()
        self._decoding = Scratch()

    def max_wire_nbytes(self, numel: int) -> int:
        """Six bytes a value that is sent."""
        return padded(4 * self._num_sent(numel)) + padded(2 * self._num_sent(numel))

    def encode(self, chunk: torch.Tensor, wire: torch.Tensor, residual: torch.Tensor | None = None) -> int:
        """Send each row's largest values."""
        check_encode(self, chunk, wire, residual)
        sent, places = self._split(wire, chunk.numel())
        size = piece_numel(chunk.device)
        for start, stop in pieces(chunk.numel(), size):
            wanted = self._encoding("wanted", size, torch.float32, chunk.device)[: stop - start]
            add_residual(chunk[start:stop], None if residual is None else residual[start:stop], wanted)
            for first, last, entry, shape in self._rows(start, stop):
                here = wanted[first - start : last - start].view(shape)
                owed = None if residual is None else residual[first:last].view(shape)
                count = shape[0] * self._num_sent(shape[1])
                self._encode_rows(
                    here, sent[entry : entry + count], places[entry : entry + count], owed, shape[0]
                )
        return self.max_wire_nbytes(chunk.numel())

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Zeros but for what was sent."""
        self.reduce([wire], out)

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor, *, scale: float = 1.0) -> None:
        """See :class:`Codec`."""
        check_reduce(self, parts, out)
        numel, size = out.numel(), piece_numel(out.device)

        def values(wire: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            sent, places = self._split(wire, numel)
            into = self._decoding("values", size, torch.float32, wire.device)[: stop - start].zero_()
            for first, last, entry, shape in self._rows(start, stop):
                end = entry + shape[0] * self._num_sent(shape[1])
                which = self._decoding("which", size, torch.int64, wire.device)[: end - entry]
                which.copy_(places[entry:end]).bitwise_and_(_PLACES)
                if wire.device.type == "cpu" and int(which.max()) >= shape[1]:
                    raise damaged(f"a value stands at place {int(which.max())} of a row of {shape[1]}")
                here = into[first - start : last - start].view(shape)
                here.scatter_(1, which.view(shape[0], -1), sent[entry:end].view(shape[0], -1))
            return into

        add_up(parts, out, scale, values, self._decoding)

    def _encode_rows(
        self,
        wanted: torch.Tensor,
        sent: torch.Tensor,
        places: torch.Tensor,
        residual: torch.Tensor | None,
        rows: int,
    ) -> None:
        which = self._largest(wanted)
        values = torch.gather(wanted, 1, which)
        sent.view(rows, -1).copy_(values)
        places.view(rows, -1).copy_(which)
        if residual is not None:
            dense = self._encoding("dense", wanted.numel(), torch.float32, wanted.device).zero_()
            dense = dense.view(wanted.shape).scatter_(1, which, values)
            keep_residual(wanted, dense, residual, probe=values)

    def _largest(self, wanted: torch.Tensor) -> torch.Tensor:
        """Places of the largest magnitudes of each row of ``wanted``, in no order that matters."""
        rows, columns = wanted.shape
        keys = self._encoding("keys", wanted.numel(), torch.int64, wanted.device).view(rows, columns)
        keys.copy_(wanted.view(torch.int32)).bitwise_and_(_MAGNITUDE).bitwise_left_shift_(_PLACE_BITS)
        keys.bitwise_or_(torch.arange(columns - 1, -1, -1, device=wanted.device))
        largest = torch.topk(keys, self._num_sent(columns), dim=1, sorted=False).values
        return largest.bitwise_and_(_PLACES).neg_().add_(columns - 1)

    def _rows(self, start: int, stop: int) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
        """The rows between two elements: the whole ones as one matrix, then one that is cut short.

        Yields the first element, the first after the last, the number of values sent before, the shape.
        """
        whole = (stop - start) // ROW
        entry = start // ROW * self._num_sent(ROW)
        middle = start + whole * ROW
        if whole:
            yield start, middle, entry, (whole, ROW)
        if middle < stop:
            yield middle, stop, entry + whole * self._num_sent(ROW), (1, stop - middle)

    def _num_sent(self, numel: int) -> int:
        """Values sent of ``numel``."""
        whole, rest = divmod(numel, ROW)
        return whole * math.ceil(self._density * ROW) + math.ceil(self._density * rest)

    def _split(self, wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The values and the places of a wire."""
        count = self._num_sent(numel)
        begin = padded(4 * count)
        return wire[: 4 * count].view(torch.float32), wire[begin : begin + 2 * count].view(torch.int16)
