"""Loss scaling for fp16 with a sharded optimizer.

torch's scaler divides the gradients of whole parameters and skips a step that has an infinity among them.
With a sharding schedule whole gradients have been sent by then, and each rank holds the averages of its own
shards alone: those are divided, and all ranks hear of an infinity that one of them found.

Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch

from tonnage.engine.shard import ShardedOptimizer
from tonnage.engine.whole import EngineOptimizer
from tonnage.errors import EngineError


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that knows the engine's optimizers; with any other it is that one.

    All ranks call ``step()`` together, and skip it together. What a lossy compression owes is owed in the
    scale of the step that it comes from, and follows the scale when that changes.
    """

    knows_shards = True
    _compressed: WeakSet[EngineOptimizer]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compressed = WeakSet()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """The next step's scale; see torch."""
        before = self.get_scale() if self._compressed else 1.0
        super().update(new_scale)
        if not self._compressed:
            return
        factor = self.get_scale() / before
        for optimizer in self._compressed:
            if optimizer.compression is not None and factor != 1:
                optimizer.compression.scale(factor)
        self._compressed.clear()

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        if isinstance(optimizer, EngineOptimizer) and optimizer.compression is not None:
            self._compressed.add(optimizer)
        if isinstance(optimizer, EngineOptimizer) and optimizer.joining:
            raise EngineError(
                "a gradient scaler within join(): ranks that left early don't know of its scale",
                hint="bf16 autocast, which needs no scaler; or as many batches on every rank",
            )
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        gradients = optimizer.averaged_gradients("a gradient scaler")
        if not allow_fp16 and any(each.dtype == torch.float16 for each in gradients):
            raise ValueError("parameters in fp16 can't be unscaled: keep them in fp32 and use torch.autocast")
        for dtype in dict.fromkeys(each.dtype for each in gradients):
            alike = [each for each in gradients if each.dtype == dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(alike, found_inf, inv_scale)
        found_inf.copy_(optimizer.transport.exchange(found_inf.view(1)).amax())
        return {found_inf.device: found_inf}
