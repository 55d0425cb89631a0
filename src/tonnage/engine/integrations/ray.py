"""Ray Train: the engine in a ``TorchTrainer``'s training function.

::

    def train(config):
        model = prepare_model(build())                            # was: ray.train.torch.prepare_model(…)
        optimizer = model.optimizer(torch.optim.AdamW, lr=3e-4)

Ray starts the processes, on one machine or many, and their process group.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tonnage.engine.integrations.adopt import refuse_wrapped
from tonnage.engine.wrapper import DataParallel
from tonnage.errors import require

_torch: Any = require("ray.train.torch", extra="ray", purpose="Ray Train")


def prepare_model(module: nn.Module, **engine: Any) -> DataParallel:
    """``module`` on this worker's device, wrapped.

    Args:
        module: the model, the same on all workers.
        engine: arguments of ``tonnage.DataParallel``.

    Raises:
        EngineError: it is wrapped already, or as ``tonnage.DataParallel`` does.
    """
    refuse_wrapped(module)
    return DataParallel(module.to(_torch.get_device()), **engine)
