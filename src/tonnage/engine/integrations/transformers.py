"""Hugging Face Transformers: its ``Trainer`` over the engine.

::

    from tonnage.engine.integrations.transformers import Trainer    # was: from transformers import …

and the script stays as it was. What the engine is to do differently goes in ``engine={"schedule": …}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.engine.integrations.accelerate import Accelerator, PreparedOptimizer
from tonnage.engine.integrations.adopt import adopt_scheduler
from tonnage.errors import EngineError, require

_transformers: Any = require("transformers", extra="huggingface", purpose="Hugging Face's Trainer")


class Trainer(_transformers.Trainer):  # type: ignore[misc]
    """As Transformers', with ``tonnage.DataParallel`` where that would use DistributedDataParallel.

    Gradient accumulation, clipping, evaluation, checkpoints and resuming work, on another number of ranks
    too. A step whose gradients are neither clipped
    (``max_grad_norm=0``) nor changed hides more of its communication.

    Args:
        args: those of ``transformers.Trainer``.
        engine: arguments of ``tonnage.DataParallel``.
        settings: further ones of ``transformers.Trainer``.

    Raises:
        EngineError: ``args`` ask for DeepSpeed, FSDP, fp16 with a schedule that shards, or
            ``save_on_each_node``.
    """

    def __init__(self, *args: Any, engine: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self._engine = dict(engine or {})
        super().__init__(*args, **settings)

    def create_accelerator_and_postprocess(self) -> None:
        """With the engine's accelerator."""
        if self.args.save_on_each_node:
            raise EngineError(
                "save_on_each_node=True, and the engine gathers the optimizer's state on rank 0 alone",
                hint="save to a folder that all hosts see, without save_on_each_node",
            )
        super().create_accelerator_and_postprocess()
        Accelerator.take_over(self.accelerator, self._engine)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """The scheduler; one that was given drives what its optimizer became."""
        scheduler = super().create_scheduler(*args, **kwargs)
        for given, engine in self.accelerator.adopted:
            adopt_scheduler(scheduler, given=given, engine=engine)
        return scheduler

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # Only for the log: waiting for all gradients to measure them would expose their communication.
        return None if grad_norm is None else super()._get_grad_norm(model, grad_norm=grad_norm)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if isinstance(self.optimizer, PreparedOptimizer):
            self.optimizer.gather()  # by all ranks; the first alone writes
        super()._save_optimizer_and_scheduler(output_dir)
