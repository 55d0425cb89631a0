"""Lightning: a strategy that trains by the engine.

::

    trainer = lightning.Trainer(strategy=Strategy(), devices=4)    # was: strategy="ddp"

and the ``LightningModule`` stays as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tonnage.engine.integrations.adopt import (
    adopt_optimizer,
    adopt_scheduler,
    own_weights,
    refuse_wrapped,
    whole_state,
)
from tonnage.engine.wrapper import DataParallel
from tonnage.errors import EngineError, require

_strategies: Any = require(
    "lightning.pytorch.strategies", extra="lightning", purpose="a strategy for Lightning"
)


class Strategy(_strategies.DDPStrategy):  # type: ignore[misc]
    """As Lightning's ``DDPStrategy``, with ``tonnage.DataParallel`` around the module.

    ``accumulate_grad_batches``, ``gradient_clip_val``, checkpoints and resuming work, on another number of
    ranks too.

    Args:
        engine: arguments of ``tonnage.DataParallel``.
        settings: those of ``DDPStrategy`` that don't concern DistributedDataParallel itself.

    Raises:
        EngineError: some do.
    """

    model: Any
    optimizers: list[torch.optim.Optimizer]
    precision_plugin: Any

    def __init__(self, *, engine: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._engine = dict(engine or {})
        self._wrapped: DataParallel | None = None
        for_ddp = [
            *self._ddp_kwargs,
            *(name for name in settings if name.startswith(("ddp_comm", "model_av"))),
        ]
        if for_ddp:
            raise EngineError(
                f"{for_ddp[0]} is a setting of DistributedDataParallel, which this strategy does not use",
                hint="Strategy(engine={…}) takes what tonnage.DataParallel does, such as find_unused_parameters or compress",
            )

    def _setup_model(self, model: nn.Module) -> DataParallel:
        refuse_wrapped(model)
        if self._wrapped is not None:  # of a fit before this one
            self._wrapped.close()
        self._wrapped = DataParallel(model, **self._engine)
        return self._wrapped

    def _register_ddp_hooks(self) -> None:
        """None: what they would compress, ``engine={"compress": …}`` does."""

    def setup_optimizers(self, trainer: Any) -> None:
        """The module's optimizer, made by the engine.

        Raises:
            EngineError: the module has several optimizers.
        """
        super().setup_optimizers(trainer)
        if not isinstance(self.model, DataParallel):
            return
        if len(self.optimizers) != 1:
            raise EngineError(
                f"configure_optimizers() gave {len(self.optimizers)} optimizers, and the engine trains by one",
                hint="one optimizer with several parameter groups",
            )
        given = self.optimizers[0]
        engine = adopt_optimizer(self.model, given)
        for config in self.lr_scheduler_configs:
            adopt_scheduler(config.scheduler, given=given, engine=engine)
        self.optimizers = [engine]

    def setup_precision_plugin(self) -> None:
        """The trainer's precision, clipping by the norm over all ranks' shards.

        Raises:
            EngineError: it scales gradients, and the schedule shards.
        """
        super().setup_precision_plugin()
        if not isinstance(self.model, DataParallel):
            return
        plugin = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None and self._engine.get("schedule") != "allreduce":
            raise EngineError(
                "precision='16-mixed' scales gradients, which needs whole ones, and this schedule shards them",
                hint="precision='bf16-mixed', or Strategy(engine={'schedule': 'allreduce'})",
            )
        plugin.clip_grad_by_norm = self._clip_by_norm
        plugin.clip_grad_by_value = self._clip_by_value

    def _clip_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        self.model.clip_grad_norm_(clip_val)

    def _clip_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        if self._engine.get("schedule") != "allreduce":
            raise EngineError(
                "gradient_clip_algorithm='value' with a schedule that shards",
                hint="gradient_clip_algorithm='norm', or Strategy(engine={'schedule': 'allreduce'})",
            )
        torch.nn.utils.clip_grad_value_(self.model.parameters(), clip_val)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes within only add up this rank's gradients."""
        with self.model.no_sync() if isinstance(self.model, DataParallel) else contextlib.nullcontext():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights by their names in the bare module, in memory of their own."""
        return own_weights(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state on rank 0; all ranks must call it together, as Lightning does."""
        inner: Any = getattr(optimizer, "_optimizer", optimizer)  # within Lightning's own wrapper
        return whole_state(inner)

    def teardown(self) -> None:
        """Let transfers end, and hand the bare module back.

        The engine stays until another fit or the end of the process: ``trainer.save_checkpoint()`` after
        ``fit()`` still gathers the optimizer's state from all ranks.
        """
        if isinstance(self.model, DataParallel):
            self.model.wait()
            self.model = self.lightning_module
        super().teardown()
