"""Gradients that autograd itself gives as rows: ``nn.Embedding(sparse=True)``.

Such a gradient never was a flat buffer: a few rows of a table, each with its number. It travels as that,
every rank's to every rank, and costs what the rows cost whatever the table's size::

    wire = 16 + 8 rows + rows * width * itemsize        against        rows of the table * width * itemsize

(In a dense flat bucket, :class:`SparseCodec` finds the rows by looking.) Values are not changed. The sum
is taken in fp32 in rank order, row by row, so that all ranks get the same bits.

On the wire: the number of rows (int64), padded; their numbers (int64), padded; the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tonnage.engine.compress.codec import WIRE_ALIGNMENT, damaged, padded
from tonnage.errors import EngineError


def rows_wire_nbytes(num_rows: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of the wire of so many rows; a batch of ``tokens`` touches at most that many."""
    return WIRE_ALIGNMENT + padded(8 * num_rows) + padded(num_rows * width * dtype.itemsize)


def encode_rows(gradient: torch.Tensor) -> torch.Tensor:
    """The wire of a sparse gradient of shape ``(table, width)``; rows that occur twice are added first.

    Raises:
        EngineError: it is not sparse in its rows alone.
    """
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1 or gradient.dim() != 2:
        raise EngineError(
            f"a gradient of shape {tuple(gradient.shape)}, {gradient.layout}, is no table of rows",
            hint="only nn.Embedding(sparse=True) gives gradients that travel as rows",
        )
    gradient = gradient.coalesce()
    numbers, rows = gradient.indices()[0], gradient.values().contiguous()
    wire = torch.zeros(
        rows_wire_nbytes(len(numbers), rows.shape[1], rows.dtype), dtype=torch.uint8, device=rows.device
    )
    begin = WIRE_ALIGNMENT + padded(numbers.nbytes)
    wire[:8].view(torch.int64).fill_(len(numbers))
    wire[WIRE_ALIGNMENT : WIRE_ALIGNMENT + numbers.nbytes].view(torch.int64).copy_(numbers)
    wire[begin : begin + rows.nbytes].view(rows.dtype).copy_(rows.view(-1))
    return wire


def reduce_rows(
    wires: Sequence[torch.Tensor], *, shape: tuple[int, int], dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """``scale`` times the sum of the ranks' gradients, as a coalesced sparse tensor of ``shape``.

    Args:
        wires: one a rank, in rank order.
        shape: the table's.
        dtype: the gradients'.
        scale: one over the number of ranks gives the mean.

    Raises:
        EngineError: a wire is damaged.
    """
    if not wires:
        raise EngineError("a sum over no rank", hint="give the wires of all ranks, in rank order")
    read = [_read(wire, shape, dtype) for wire in wires]
    numbers = torch.unique(torch.cat([each for each, _ in read]))
    total = torch.zeros(len(numbers), shape[1], dtype=torch.float32, device=numbers.device)
    for theirs, rows in read:
        # No number occurs twice in a wire, so the order within it does not matter.
        total.index_add_(0, torch.searchsorted(numbers, theirs), rows.float())
    values = total.mul_(scale).to(dtype)
    return torch.sparse_coo_tensor(
        numbers.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False
    )


def _read(
    wire: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    count = int(wire[:8].view(torch.int64).item()) if wire.numel() >= WIRE_ALIGNMENT else -1
    if not 0 <= count <= shape[0] or wire.numel() < rows_wire_nbytes(count, shape[1], dtype):
        raise damaged(f"{wire.numel()} bytes for {count} rows of a table of {shape[0]}")
    begin = WIRE_ALIGNMENT + padded(8 * count)
    numbers = wire[WIRE_ALIGNMENT : WIRE_ALIGNMENT + 8 * count].view(torch.int64)
    if count and not (numbers[0] >= 0 and numbers[-1] < shape[0] and bool((numbers.diff() > 0).all())):
        raise damaged(f"its rows are not in order, or not of a table of {shape[0]}")
    rows = wire[begin : begin + count * shape[1] * dtype.itemsize].view(dtype)
    return numbers, rows.view(count, shape[1])
