"""Data-parallel training whose communication is fused, hidden and weighed."""

from tonnage.errors import require

require("torch", extra="train", purpose="the training engine")

from tonnage.engine.bucket import Bucket, ParameterSpec, Slot, cut_buckets, plan_hash  # noqa: E402
from tonnage.engine.local import AVERAGE, LocalSteps, Nesterov  # noqa: E402
from tonnage.engine.wrapper import DataParallel  # noqa: E402

__all__ = [
    "AVERAGE",
    "Bucket",
    "DataParallel",
    "LocalSteps",
    "Nesterov",
    "ParameterSpec",
    "Slot",
    "cut_buckets",
    "plan_hash",
]
