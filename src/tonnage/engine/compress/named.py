"""Codecs by the names that users write."""

from __future__ import annotations

import torch

from tonnage.engine.compress.cast import CastCodec
from tonnage.engine.compress.codec import Codec
from tonnage.engine.compress.int8 import Int8Codec
from tonnage.engine.compress.lossless import LosslessCodec
from tonnage.engine.compress.sign import SignCodec
from tonnage.engine.compress.sparse import SparseCodec
from tonnage.engine.compress.topk import TopkCodec
from tonnage.errors import EngineError

CODEC_NAMES = ("lossless", "sparse", "fp16", "bf16", "int8", "topk", "sign")
"""What :func:`make_codec` knows; ``power`` works on matrices, see :class:`PowerState`."""

_DEFAULT_DENSITY = 0.01


def make_codec(name: str, dtype: torch.dtype = torch.float32) -> Codec:
    """The codec of that name.

    Args:
        name: one of :data:`CODEC_NAMES`; ``topk`` may have a density behind it, like ``topk:0.001``.
        dtype: of the chunks that it will be given.

    Raises:
        EngineError: there is no such codec, or its number can't be meant.
    """
    kind, colon, number = name.partition(":")
    if kind == "topk":
        return TopkCodec(_number(name, number) if colon else _DEFAULT_DENSITY)
    if kind not in CODEC_NAMES or colon:
        raise EngineError(
            f"no gradient compression is called {name!r}", hint=f"use one of {', '.join(CODEC_NAMES)}"
        )
    if kind == "lossless":
        return LosslessCodec(dtype)
    if kind == "sparse":
        return SparseCodec(dtype)
    if kind == "int8":
        return Int8Codec()
    return SignCodec() if kind == "sign" else CastCodec(kind)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise EngineError(
            f"no density in compress={name!r}", hint="give a part of one, like compress='topk:0.01'"
        ) from error
