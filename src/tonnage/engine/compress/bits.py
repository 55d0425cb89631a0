"""Eight flags a byte, the first in the lowest bit."""

from __future__ import annotations

import torch

_GATHER = 0x0102040810204080
"""Multiplying eight bytes of 0 or 1 by it collects them as the bits of the highest byte."""


def pack_bits(flags: torch.Tensor, packed: torch.Tensor, spare: torch.Tensor) -> None:
    """Write ``flags`` to ``packed``.

    Args:
        flags: bool, a multiple of 8 of them.
        packed: uint8, an eighth as many; overwritten.
        spare: int64, as many as ``packed``.
    """
    torch.mul(flags.view(torch.int64), _GATHER, out=spare)
    # The shift drags the sign along; the mask leaves the lowest byte alone.
    packed.copy_(spare.bitwise_right_shift_(56).bitwise_and_(255))


def signs_of_bytes(device: torch.device) -> torch.Tensor:
    """For each byte its bits, as 1.0 where set and -1.0 where not; shape ``(256, 8)``."""
    return (2 * unpack_bits(torch.arange(256, dtype=torch.uint8, device=device)) - 1).float().view(256, 8)


def unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """The flags, as int64 of 0 and 1, eight for each byte."""
    return (packed.long().unsqueeze(1) >> torch.arange(8, device=packed.device) & 1).view(-1)
