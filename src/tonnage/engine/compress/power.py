r"""PowerSGD: a gradient matrix as the product of two thin ones.

For a gradient ``M`` of shape ``(rows, columns)`` and a rank ``r``, with ``Q`` kept from the step before
(*warm start*), over ``n`` ranks::

    M = gradient + residual
    P = M Q              summed over the ranks      (rows, r)
    P = orthonormal columns of P
    Q = M^T P            summed over the ranks      (columns, r)
    delivered = P Q^T / n
    residual = M - delivered of its own, that is M - P (M^T P)^T

so that ``r (rows + columns)`` values travel, twice as an all-reduce, in place of ``rows * columns``. One
step of subspace iteration a training step is enough, as gradients change slowly.

The three calls below are the steps between the two sums; whoever holds the transport does the sums, on
its one issuing thread, in one order on all ranks. All matrices' ``P`` lie in one flat buffer, and so do
all ``Q``: each sum is one message. What is no matrix (biases, norms), or too small to gain, is not
touched here: it travels as it is. Sums must give the same bits on all ranks, which a sum in rank order
does; then ``P`` and ``Q`` are the same on all processors that compute alike.

The residual is what *this rank's* matrix lost, so that the mean of the residuals is what the delivered
mean lacks. Vogels et al. subtract the delivered mean from each rank's own matrix; the mean is the same.

A matrix that is not finite on any rank is delivered as NaN on all.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, arXiv 1905.13727.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tonnage.engine.compress.codec import check_flat
from tonnage.errors import EngineError

_DEPENDENT = 1e-6
"""A column that is no longer than this beside what it was before the others were taken off it is
rounding, in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Where a parameter lies in its bucket, and the matrix that it is taken for.

    Attributes:
        name: the parameter's name, under which its ``Q`` is kept in checkpoints.
        offset: first element in the bucket.
        rows: size of the first dim.
        columns: product of the others.
    """

    name: str
    offset: int
    rows: int
    columns: int


def as_matrix(
    name: str, offset: int, shape: Sequence[int], *, rank: int, least_ratio: float = 2.0
) -> Matrix | None:
    """The parameter as a matrix, or ``None`` if it should travel as it is.

    Args:
        name: its name.
        offset: first element in the bucket.
        shape: its shape; a convolution's kernel is taken as ``(out, in * height * width)``.
        rank: columns of ``P`` and ``Q``.
        least_ratio: how many times fewer values must travel for it to be worth two messages.
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    if rows * columns < least_ratio * rank * (rows + columns):
        return None
    return Matrix(name=name, offset=offset, rows=rows, columns=columns)


class PowerState:
    """The matrices of one bucket, and their ``Q`` from step to step.

    In each step: :meth:`project`; sum :attr:`p` over the ranks; :meth:`back_project`; sum :attr:`q` over
    the ranks; :meth:`deliver`.

    Attributes:
        p: all ``P`` behind one another, fp32, flat; to be summed in place after :meth:`project`.
        q: all ``Q``, to be summed in place after :meth:`back_project`.

    Args:
        matrices: those of the bucket; see :func:`as_matrix`.
        rank: columns of ``P`` and ``Q``.
        device: where the bucket lives. The state takes 4 bytes an element of the matrices there.

    Raises:
        EngineError: ``rank`` is below 1.
    """

    def __init__(self, matrices: Sequence[Matrix], *, rank: int, device: torch.device | str) -> None:
        if rank < 1:
            raise EngineError(f"PowerSGD of rank {rank}", hint="give 1 or more, like compress='power:4'")
        self._matrices = tuple(matrices)
        self.p, self._ps = _flat([(m.rows, rank) for m in matrices], device)
        self.q, self._qs = _flat([(m.columns, rank) for m in matrices], device)
        _, self._warm = _flat([(m.columns, rank) for m in matrices], device)
        _, self._wanted = _flat([(m.rows, m.columns) for m in matrices], device)
        for matrix, warm in zip(self._matrices, self._warm, strict=True):
            warm.copy_(_first_q(matrix, rank))

    @property
    def nbytes(self) -> int:
        """Payload of the two all-reduces together."""
        return self.p.nbytes + self.q.nbytes

    def project(self, gradient: torch.Tensor, residual: torch.Tensor) -> None:
        """Write ``M Q`` to :attr:`p`.

        Args:
            gradient: the flat bucket; only read, and free afterwards.
            residual: fp32, as long; only read.
        """
        check_flat(gradient, "bucket")
        check_flat(residual, "residual")
        for matrix, wanted, warm, p in self._each(self._wanted, self._warm, self._ps):
            torch.add(_of(residual, matrix), _of(gradient, matrix), out=wanted)
            torch.mm(wanted, warm, out=p)

    def back_project(self, residual: torch.Tensor) -> None:
        """Make the columns of the summed :attr:`p` orthonormal, and write ``M^T P`` to :attr:`q`.

        Args:
            residual: holds afterwards what of this rank's matrices will not be delivered. A matrix that
                is not finite on any rank leaves it as it was.
        """
        for matrix, wanted, p, q in self._each(self._wanted, self._ps, self._qs):
            orthonormalise(p)
            torch.mm(wanted.T, p, out=q)
            owed = _of(residual, matrix)
            wanted.addmm_(p, q.T, alpha=-1)
            torch.where(torch.isfinite(wanted), wanted, owed, out=owed)

    def deliver(self, out: torch.Tensor, *, scale: float = 1.0) -> None:
        """Write ``scale P Q^T`` of the summed :attr:`q` over the matrices' places in ``out``.

        Args:
            out: the flat bucket; what is no matrix is left alone.
            scale: one over the number of ranks gives the mean.
        """
        check_flat(out, "bucket")
        for matrix, wanted, warm, p, q in self._each(self._wanted, self._warm, self._ps, self._qs):
            torch.mm(p, q.T, out=wanted)
            torch.mul(wanted, scale, out=_of(out, matrix))
            # A gradient of zero, or a step that is skipped, must not end the search for ever.
            size = q.abs().sum(dim=0)
            torch.where((size > 0) & torch.isfinite(size), q, warm, out=warm)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Each matrix's ``Q`` by its parameter's name; the same on all ranks. Copies."""
        return {m.name: warm.cpu().clone() for m, warm in self._each(self._warm)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from these ``Q``; a matrix without one, or of another rank or shape, begins anew.

        Takes the state of all buckets at once, however they were cut.
        """
        for matrix, warm in self._each(self._warm):
            saved = state.get(matrix.name)
            if saved is not None and saved.shape == warm.shape:
                warm.copy_(saved)

    def _each(self, *tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Any, ...]]:
        return zip(self._matrices, *tensors, strict=True)


def orthonormalise(p: torch.Tensor) -> None:
    """Make the columns of ``p`` orthonormal in place, by Gram and Schmidt's method, each twice.

    Twice, for what rounding leaves of the others the first time. A column that depends on those before
    it becomes zero: blown up to length 1 it would be noise.
    """
    for place in range(p.shape[1]):
        column, before = p[:, place], p[:, :place]
        size = torch.linalg.vector_norm(column)
        for _ in range(2 if place else 0):
            column -= before @ (before.T @ column)
        left = torch.linalg.vector_norm(column)
        column /= torch.where(left <= _DEPENDENT * size, math.inf, left)


def _flat(
    shapes: Sequence[tuple[int, int]], device: torch.device | str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One flat buffer for matrices of these shapes, and the matrices in it."""
    sizes = [rows * columns for rows, columns in shapes]
    flat = torch.zeros(sum(sizes), device=device)
    return flat, [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _of(flat: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    return flat[matrix.offset : matrix.offset + matrix.rows * matrix.columns].view(
        matrix.rows, matrix.columns
    )


def _first_q(matrix: Matrix, rank: int) -> torch.Tensor:
    """The same on every rank and at every place in a bucket: drawn from the parameter's name."""
    generator = torch.Generator().manual_seed(zlib.crc32(matrix.name.encode()))
    return torch.randn(matrix.columns, rank, generator=generator)
