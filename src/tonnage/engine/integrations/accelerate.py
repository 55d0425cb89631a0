"""Hugging Face Accelerate: an ``Accelerator`` whose ``prepare()`` wraps models in the engine.

::

    from tonnage.engine.integrations.accelerate import Accelerator    # was: from accelerate import …

and the script stays as it was. What the engine is to do differently goes in ``engine={"schedule": …}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

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

_accelerate: Any = require("accelerate", extra="huggingface", purpose="Hugging Face's Accelerator")
_optimizer: Any = require("accelerate.optimizer", extra="huggingface", purpose="Hugging Face's Accelerator")

_PLAIN = {"NO", "MULTI_CPU", "MULTI_GPU"}
"""Kinds of jobs in which Accelerate would use DistributedDataParallel, or nothing."""


class PreparedOptimizer(_optimizer.AcceleratedOptimizer):  # type: ignore[misc]
    """As Accelerate's; its state is that of all ranks, once it was gathered."""

    _gathered: dict[str, Any] | None = None

    def gather(self) -> None:
        """The next ``state_dict()`` gives the whole state, on rank 0. All ranks must call it together."""
        self._gathered = whole_state(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The whole state after :meth:`gather`, else this rank's part; either can be loaded."""
        found, self._gathered = self._gathered, None
        return self.optimizer.state_dict() if found is None else found


class _Loadable:
    """A module to those who load weights into it, which safetensors tells apart by their storage."""

    def __init__(self, module: nn.Module) -> None:
        self.load_state_dict = module.load_state_dict
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Its weights, in memory of their own."""
        return own_weights(self._module.state_dict())


class Accelerator(_accelerate.Accelerator):  # type: ignore[misc]
    """As Accelerate's, with ``tonnage.DataParallel`` where that would use DistributedDataParallel.

    ``prepare()`` takes an optimizer that was made for the bare model, as ever, after the model or beside
    it. ``accumulate()``, ``clip_grad_norm_()``, ``save_state()`` and ``load_state()`` work; any number of
    ranks loads what was saved.

    Args:
        engine: arguments of ``tonnage.DataParallel``.
        settings: those of ``accelerate.Accelerator``.

    Raises:
        EngineError: Accelerate was set up for DeepSpeed, FSDP or another that wraps models itself, for fp16
            with a schedule that shards, or with a communication hook of DistributedDataParallel.
    """

    _models: list[nn.Module]

    def __init__(self, *, engine: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._begin(engine or {})

    @classmethod
    def take_over(cls, accelerator: Any, engine: Mapping[str, Any]) -> None:
        """Make one of these of an ``accelerate.Accelerator`` that has prepared nothing yet."""
        accelerator.__class__ = cls
        accelerator._begin(engine)

    def _begin(self, engine: Mapping[str, Any]) -> None:
        self._engine = dict(engine)
        self._wrapped: WeakSet[DataParallel] = WeakSet()  # free_memory() clears Accelerate's own list
        self.adopted: list[tuple[torch.optim.Optimizer, torch.optim.Optimizer]] = []
        self._refuse_mixes()

    def _refuse_mixes(self) -> None:
        kind = self.distributed_type.name
        if kind not in _PLAIN:
            raise EngineError(
                f"Accelerate is set up for {kind}, which wraps models itself",
                hint="accelerate.Accelerator for that; or leave its plugin out, here and in `accelerate config`",
            )
        if self.scaler is not None and self._engine.get("schedule") != "allreduce":
            raise EngineError(
                "mixed_precision='fp16' scales gradients, which needs whole ones, and this schedule shards them",
                hint="mixed_precision='bf16', or engine={'schedule': 'allreduce'}",
            )
        if self.ddp_handler is not None and self.ddp_handler.comm_hook.name != "NO":
            raise EngineError(
                f"the communication hook {self.ddp_handler.comm_hook.name} is for DistributedDataParallel",
                hint="engine={'compress': 'bf16'}, or another that the engine has",
            )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """``model`` on its device, with mixed precision if asked for, in ``tonnage.DataParallel``.

        Raises:
            EngineError: it is wrapped already, or as ``tonnage.DataParallel`` does.
        """
        if getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model)
        refuse_wrapped(model)
        placed = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        if evaluation_mode or not any(p.requires_grad for p in placed.parameters()):
            return placed
        wrapped = DataParallel(placed, **self._engine_settings())
        del placed._is_accelerate_prepared
        wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models[-1] = wrapped
        self._wrapped.add(wrapped)
        return wrapped

    def _engine_settings(self) -> dict[str, Any]:
        """What was asked of the engine, and what its like was asked of DistributedDataParallel."""
        unused = self.ddp_handler is not None and self.ddp_handler.find_unused_parameters
        if unused and self._engine.get("schedule") != "early":
            return {"find_unused_parameters": True, **self._engine}
        return self._engine

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """The same optimizer, made by the prepared model that has its parameters."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer)
        model = self._model_of(p for group in optimizer.param_groups for p in group["params"])
        if model is None:
            raise EngineError(
                "the optimizer's parameters belong to no prepared model",
                hint="accelerator.prepare(model, optimizer, …), the model first",
            )
        engine = adopt_optimizer(model, optimizer)
        self.adopted.append((optimizer, engine))
        prepared = PreparedOptimizer(engine, device_placement=False, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """The scheduler, driving what its optimizer became."""
        for given, engine in self.adopted:
            adopt_scheduler(scheduler, given=given, engine=engine)
        return super().prepare_scheduler(scheduler)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> Any:
        """Clip the gradients of a prepared model by their norm over all ranks' shards.

        Raises:
            EngineError: for another norm than the 2-norm, or some of the model's parameters alone.
        """
        wanted = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        model = self._model_of(wanted)
        if model is None:
            return super().clip_grad_norm_(wanted, max_norm, norm_type)
        trained = {id(p) for p in model.module.parameters() if p.requires_grad}
        if norm_type != 2 or not trained <= {id(p) for p in wanted}:
            raise EngineError(
                "the engine clips by the 2-norm of all of a model's gradients",
                hint="accelerator.clip_grad_norm_(model.parameters(), max_norm), or engine={'schedule': 'allreduce'}",
            )
        self.unscale_gradients()
        return model.clip_grad_norm_(max_norm)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The model as it was before ``prepare()``."""
        inner = model.module if isinstance(model, DataParallel) else model
        return super().unwrap_model(inner, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Weights by their names in the bare model, in memory of their own."""
        inner = model.module if isinstance(model, DataParallel) else model
        return own_weights(super().get_state_dict(inner, unwrap=unwrap))

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, with the whole state of the optimizers; all ranks must call it together.

        Raises:
            EngineError: every host is to save, and only rank 0 has the whole state.
        """
        if self.project_configuration.save_on_each_node:
            raise EngineError(
                "save_on_each_node=True, and the engine gathers the optimizer's state on rank 0 alone",
                hint="save to a folder that all hosts see, without save_on_each_node",
            )
        for optimizer in self._optimizers:
            optimizer.gather()
        return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Take back what :meth:`save_state` wrote, or Accelerate's own for the bare model."""
        prepared = self._models
        bare: list[Any] = [_Loadable(m.module) if isinstance(m, DataParallel) else m for m in prepared]
        self._models = bare
        try:
            return super().load_state(*args, **kwargs)
        finally:
            self._models = prepared

    def _model_of(self, parameters: Iterable[torch.Tensor]) -> DataParallel | None:
        wanted = {id(p) for p in parameters}
        found = (m for m in self._wrapped if wanted & {id(p) for p in m.module.parameters()})
        return next(found, None)
