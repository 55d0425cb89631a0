"""Data-parallel training whose communication is fused, hidden and weighed."""

from tonnage.errors import require

require("torch", extra="train", purpose="the training engine")

from tonnage.engine.bucket import Bucket, ParameterSpec, Slot, cut_buckets, plan_hash  # noqa: E402
from tonnage.engine.checkpoint import checkpoint_state, load_checkpoint, save_checkpoint  # noqa: E402
from tonnage.engine.launch import Job, init_process_group  # noqa: E402
from tonnage.engine.local import AVERAGE, LocalSteps, Nesterov  # noqa: E402
from tonnage.engine.scaler import GradScaler  # noqa: E402
from tonnage.engine.wrapper import DataParallel  # noqa: E402

__all__ = [
    "AVERAGE",
    "Bucket",
    "DataParallel",
    "GradScaler",
    "Job",
    "LocalSteps",
    "Nesterov",
    "ParameterSpec",
    "Slot",
    "checkpoint_state",
    "cut_buckets",
    "init_process_group",
    "load_checkpoint",
    "plan_hash",
    "save_checkpoint",
]
