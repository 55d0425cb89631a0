"""Optimizers and schedulers that were made for the bare model, handed over to the engine.

Such loops take an optimizer over ``module.parameters()``. Wrapping keeps those parameters, so the engine
can make the same one anew: of the same class, with the same groups and settings.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR

from tonnage.engine.shard import ShardedOptimizer
from tonnage.engine.whole import WholeOptimizer
from tonnage.engine.wrapper import DataParallel
from tonnage.errors import EngineError

_MADE_BY_ENGINE = (ShardedOptimizer, WholeOptimizer)
_WRAPPERS = (DataParallel, nn.DataParallel, DistributedDataParallel, FullyShardedDataParallel)


def refuse_wrapped(module: nn.Module) -> None:
    """Only a bare module can be wrapped.

    Raises:
        EngineError: another has wrapped or sharded it already.
    """
    found = next((type(each).__name__ for each in module.modules() if isinstance(each, _WRAPPERS)), None)
    if found is None and any(type(p).__name__ == "DTensor" for p in module.parameters()):
        found = "fully_shard or tensor parallelism"
    if found is not None:
        raise EngineError(
            f"the model is wrapped by {found} already",
            hint="hand over the bare model; what the engine is to do differently goes in engine={…}",
        )


def adopt_optimizer(model: DataParallel, given: Optimizer) -> Optimizer:
    """The optimizer ``given``, which was made for the module that ``model`` wraps, as one of the engine's.

    Args:
        model: the wrapped model.
        given: not used before; left as it is. One that ``model.optimizer()`` made comes back itself.

    Raises:
        EngineError: it has state already, or can't be made again from its settings.
    """
    if isinstance(given, _MADE_BY_ENGINE):
        return given
    kind: Any = type(given)
    if given.state:
        raise EngineError(
            f"{kind.__name__} has stepped before its model was wrapped, and that state would be lost",
            hint="wrap the model first; load the optimizer's state afterwards",
        )
    accepted = inspect.signature(kind.__init__).parameters
    settings = {name: value for name, value in given.defaults.items() if name in accepted}
    try:
        return model.optimizer(kind, [dict(group) for group in given.param_groups], **settings)
    except TypeError as error:
        raise EngineError(
            f"{kind.__name__} can't be made again from its settings: {error}",
            hint="make it by model.optimizer(…) and hand that over",
        ) from error


def adopt_scheduler(scheduler: Any, *, given: Optimizer, engine: Optimizer) -> None:
    """Let ``scheduler``, made for ``given``, drive ``engine`` instead; one for another optimizer stays.

    What it has set in the groups of ``given`` by now, such as the first rate of a warm-up, is set here, too.
    """
    if isinstance(scheduler, (SequentialLR, ChainedScheduler)):
        for each in scheduler._schedulers:
            adopt_scheduler(each, given=given, engine=engine)
    if getattr(scheduler, "optimizer", None) is given:
        scheduler.optimizer = engine
        for ours, theirs in zip(engine.param_groups, given.param_groups, strict=True):
            ours.update({name: value for name, value in theirs.items() if name != "params"})
        _tell_when_stepped(engine)


def whole_state(optimizer: ShardedOptimizer | WholeOptimizer) -> dict[str, Any]:
    """The optimizer's whole state on rank 0, as torch's keeps it; empty elsewhere. All ranks must call it together."""
    return optimizer.full_state_dict() or {}


def own_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose tensors have memory of their own; tied ones still share theirs.

    The engine keeps parameters in flat buffers. Whoever tells tensors apart by their storage would take
    all of a buffer for one.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() == 0 or key not in copies:
            copies[key] = value.detach().clone()
        return copies[key]

    return {name: own(value) for name, value in state.items()}


def _tell_when_stepped(optimizer: Optimizer) -> None:
    """What torch's schedulers put on an optimizer to warn of a schedule that begins before training."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    step = optimizer.step

    @functools.wraps(step)
    def told(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    told._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = told  # type: ignore[method-assign]
