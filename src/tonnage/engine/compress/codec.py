"""What every codec is: a chunk of gradients into fewer bytes, and back, and several of them summed.

Quantised values are never summed by a collective. Each rank encodes, for each peer, the chunk of its
flat gradients that the peer owns; the peer decodes all of them and adds them up in single precision in
rank order. So a value is rounded once on its way however many ranks there are, and every run and every
rank gets the same bits.

*Error feedback.* What a lossy codec could not send stays in a *residual* and is added to the next step's
chunk: over the steps everything is sent (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech
2014; Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, arXiv 1901.09847)::

    a = chunk + residual        wire = encode(a)        residual = a - decode(wire)

*What is not finite* stays so: a block with an infinity or a NaN in it is decoded to values that are not
finite, so that a gradient scaler sees it, and its residual stays as it was, since that step is skipped.

A codec works through a chunk in pieces that stay in a core's cache: each pass but the first reads what
the pass before has just written there. Its scratch is allocated once for each device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from tonnage.errors import EngineError

WIRE_ALIGNMENT = 16
"""Bytes that a wire's size is a multiple of and that its address must be one of: wires can be packed
one behind the other and still be viewed as any number format."""

CPU_PIECE = 1 << 16
"""Elements a piece on a CPU: 256 KiB of fp32, so that a piece and its scratch fit a second-level cache of
1 or 2 MiB. A quarter of it halved the speed: then the calls themselves cost more than the work."""

CUDA_PIECE = 1 << 24
"""Elements a piece on a GPU, where a launch costs more than a trip to memory: seldom more than one."""


class Codec(Protocol):
    """Turns a chunk of one bucket into bytes for one peer.

    A *chunk* is a contiguous tensor of one dim, of any floating dtype unless the codec says otherwise.
    A *wire* is a contiguous ``uint8`` tensor on the chunk's device, starting at a multiple of
    :data:`WIRE_ALIGNMENT`. All memory is the caller's; nothing is kept after a call.

    One thread may encode while another decodes or reduces. Two that encode at once need a codec each.

    Attributes:
        name: what a user writes to get it, like ``int8`` or ``topk:0.01``.
        lossless: decoding gives back the same bits; such a codec leaves residuals alone.
        fixed: a wire always has :meth:`max_wire_nbytes`. Otherwise this is the most, and how much of it
            is used stands in its first 8 bytes; see :func:`used_nbytes`.
    """

    name: str
    lossless: bool
    fixed: bool

    def max_wire_nbytes(self, numel: int) -> int:
        """Bytes of the wire of a chunk of ``numel`` elements, or the most there can be."""
        ...

    def encode(self, chunk: torch.Tensor, wire: torch.Tensor, residual: torch.Tensor | None = None) -> int:
        """Write ``chunk + residual`` to ``wire``; returns how many bytes of it are used.

        Args:
            chunk: only read.
            wire: at least ``max_wire_nbytes(len(chunk))`` bytes.
            residual: fp32, one for each element of the chunk; holds afterwards what was not sent.
                ``None``: what is lost is lost.

        Raises:
            EngineError: a tensor is not contiguous, too small, or of a dtype that is not taken.
        """
        ...

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Overwrite ``out``, of as many elements as the chunk had, with what ``wire`` stands for.

        Raises:
            EngineError: ``wire`` is not the wire of so many elements.
        """
        ...

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor, *, scale: float = 1.0) -> None:
        """Overwrite ``out`` with ``scale`` times the sum of ``parts``, added in their order in fp32.

        Args:
            parts: one a rank, in rank order: a wire, or a chunk as it is, in its floating dtype. The own
                part need not be encoded: what stays on its rank has no bytes to save.
            out: of any floating dtype; may be the first of ``parts`` itself.
            scale: one over the number of ranks gives the mean.

        Raises:
            EngineError: as :meth:`decode`.
        """
        ...


def used_nbytes(wire: torch.Tensor) -> int:
    """Bytes in use of a wire whose size varies, from its first 8 bytes.

    Send the first :data:`WIRE_ALIGNMENT` bytes, then as many more as they say.

    Raises:
        EngineError: no such wire can be that long.
    """
    used = int(wire[:8].view(torch.int64).item()) if wire.numel() >= WIRE_ALIGNMENT else -1
    if not used >= WIRE_ALIGNMENT or used % WIRE_ALIGNMENT:
        raise damaged(f"its header gives {used} bytes")
    return used


# For codecs.


def padded(nbytes: int) -> int:
    """The next multiple of :data:`WIRE_ALIGNMENT`."""
    return -(-nbytes // WIRE_ALIGNMENT) * WIRE_ALIGNMENT


def piece_numel(device: torch.device) -> int:
    """Elements that are worked on at a time."""
    return CPU_PIECE if device.type == "cpu" else CUDA_PIECE


def pieces(numel: int, size: int) -> Iterator[tuple[int, int]]:
    """First element, and first after it, of each piece of ``numel`` elements."""
    return ((start, min(start + size, numel)) for start in range(0, numel, size))


class Scratch:
    """Memory for one piece, made when a device is first met and kept."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, torch.device], torch.Tensor] = {}

    def __call__(self, use: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """``numel`` elements of memory that no other ``use`` shares."""
        have = self._made.get((use, device))
        if have is None or have.numel() < numel:
            have = self._made[use, device] = torch.empty(numel, dtype=dtype, device=device)
        return have[:numel]


def add_up(
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    scale: float,
    values: Callable[[torch.Tensor, int, int], torch.Tensor],
    scratch: Scratch,
    *,
    size: int = 0,
) -> None:
    """``scale`` times the sum of ``parts`` in their order, in fp32, a piece at a time.

    Args:
        parts: wires, and chunks as they are.
        out: overwritten.
        scale: the factor.
        values: the numbers that a wire has for elements ``[start, stop)``, in any dtype; read at once.
        scratch: of the thread that reduces.
        size: elements a piece, if the format asks for it.
    """
    size = size or piece_numel(out.device)
    for start, stop in pieces(out.numel(), size):
        total = scratch("total", size, torch.float32, out.device)[: stop - start]
        for place, part in enumerate(parts):
            each = values(part, start, stop) if part.dtype == torch.uint8 else part[start:stop]
            # Not begun with zeros: 0 + -0 would lose the sign.
            total = total.add_(each) if place else total.copy_(each)
        torch.mul(total, scale, out=out[start:stop])


def add_residual(chunk: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """What is to be sent, in fp32: the chunk and what earlier steps still owe."""
    if residual is None:
        return out.copy_(chunk)
    return torch.add(residual, chunk, out=out)


def keep_residual(
    wanted: torch.Tensor, sent: torch.Tensor, residual: torch.Tensor, probe: torch.Tensor
) -> None:
    """``residual = wanted - sent`` where that is finite, and as it was elsewhere. Overwrites ``wanted``.

    Args:
        wanted: what was to be sent.
        sent: what was.
        residual: of the same shape.
        probe: values whose sum is not finite if any of the difference is not: the blocks' scales, say.
    """
    # Asking costs a CPU little and saves its slowest pass; asking a GPU would wait for it.
    if probe.device.type == "cpu" and math.isfinite(probe.sum().item()):
        torch.sub(wanted, sent, out=residual)
    else:
        torch.sub(wanted, sent, out=wanted)
        torch.where(torch.isfinite(wanted), wanted, residual, out=residual)


def check_encode(
    codec: Codec, chunk: torch.Tensor, wire: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """Refuse what can't be encoded before anything is written."""
    check_flat(chunk, "chunk")
    _check_wire(wire, codec.max_wire_nbytes(chunk.numel()))
    if residual is not None:
        check_flat(residual, "residual")
        if residual.dtype != torch.float32 or residual.numel() != chunk.numel():
            raise EngineError(
                f"a residual of {residual.numel()} {residual.dtype} for a chunk of {chunk.numel()} elements",
                hint="give one torch.float32 for each element of the chunk",
            )


def check_reduce(codec: Codec, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Refuse what can't be decoded before anything is written."""
    check_flat(out, "result")
    if not parts:
        raise EngineError("a sum over no rank", hint="give the parts of all ranks, in rank order")
    for part in parts:
        if part.dtype == torch.uint8:
            nbytes = codec.max_wire_nbytes(out.numel()) if codec.fixed else used_nbytes(part)
            _check_wire(part, nbytes)
        else:
            check_flat(part, "part")
            if part.numel() != out.numel():
                raise EngineError(f"a part of {part.numel()} elements in a sum of {out.numel()}")


def check_dtype(chunk: torch.Tensor, dtype: torch.dtype, codec: Codec) -> None:
    """Refuse a chunk of another dtype than the codec was made for."""
    if chunk.dtype != dtype:
        raise EngineError(
            f"a chunk of {chunk.dtype} for a {codec.name} codec of {dtype}",
            hint="make one codec for each dtype of the buckets",
        )


def check_flat(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor that is not one stretch of memory of floating-point numbers."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_floating_point():
        raise EngineError(
            f"a {what} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}",
            hint="give a contiguous tensor of one dim and a floating dtype: a part of a flat bucket",
        )


def damaged(why: str) -> EngineError:
    """What arrived is no wire of this codec."""
    return EngineError(
        f"compressed gradients arrived damaged: {why}",
        hint="all ranks must use the same codec, dtype and buckets",
    )


def _check_wire(wire: torch.Tensor, nbytes: int) -> None:
    if wire.dtype != torch.uint8 or wire.dim() != 1 or not wire.is_contiguous():
        raise EngineError(
            f"a wire of shape {tuple(wire.shape)}, strides {wire.stride()}, {wire.dtype}",
            hint="give a contiguous torch.uint8 tensor of one dim",
        )
    if wire.numel() < nbytes:
        raise EngineError(
            f"a wire of {wire.numel()} bytes, {nbytes} are needed", hint="allocate max_wire_nbytes(numel)"
        )
    if wire.data_ptr() % WIRE_ALIGNMENT:
        raise EngineError(
            f"a wire that does not start at a multiple of {WIRE_ALIGNMENT} bytes",
            hint="cut wires from one buffer at multiples of WIRE_ALIGNMENT",
        )
