"""Fewer bytes for the same gradients: codecs, what they still owe, and whether they pay."""

from tonnage.engine.compress.cast import CastCodec
from tonnage.engine.compress.choose import (
    AUTO_CODECS,
    LEAST_GAIN,
    NO_CODEC,
    Choice,
    CodecSpeed,
    Exchange,
    Prediction,
    choose,
    measure_codec,
    predict_step,
)
from tonnage.engine.compress.codec import WIRE_ALIGNMENT, Codec, used_nbytes
from tonnage.engine.compress.feedback import ErrorFeedback, FeedbackState
from tonnage.engine.compress.int8 import Int8Codec
from tonnage.engine.compress.lossless import LosslessCodec
from tonnage.engine.compress.masked import MaskedCodec
from tonnage.engine.compress.named import CODEC_NAMES, make_codec
from tonnage.engine.compress.power import Matrix, PowerState, as_matrix
from tonnage.engine.compress.rows import encode_rows, reduce_rows, rows_wire_nbytes
from tonnage.engine.compress.sign import SignCodec
from tonnage.engine.compress.sparse import SparseCodec
from tonnage.engine.compress.topk import TopkCodec

__all__ = [
    "AUTO_CODECS",
    "CODEC_NAMES",
    "LEAST_GAIN",
    "NO_CODEC",
    "WIRE_ALIGNMENT",
    "CastCodec",
    "Choice",
    "Codec",
    "CodecSpeed",
    "ErrorFeedback",
    "Exchange",
    "FeedbackState",
    "Int8Codec",
    "LosslessCodec",
    "MaskedCodec",
    "Matrix",
    "PowerState",
    "Prediction",
    "SignCodec",
    "SparseCodec",
    "TopkCodec",
    "as_matrix",
    "choose",
    "encode_rows",
    "make_codec",
    "measure_codec",
    "predict_step",
    "reduce_rows",
    "rows_wire_nbytes",
    "used_nbytes",
]
