"""The optimizer that was asked for, over whole parameters; and what it shares with the sharded one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tonnage.engine.schedule import Schedule
from tonnage.engine.squeeze import Compression
from tonnage.engine.state import Piece, channels_last, flat, shaped
from tonnage.engine.transport import Transport
from tonnage.errors import EngineError

COMPRESSION = "compression"
"""Key of what compression adds to a state dict."""


class EngineOptimizer(torch.optim.Optimizer):
    """Looks like the optimizer that was asked for; steps each bucket when its gradients have come.

    Learning rates and the like are read from ``param_groups`` at each step, so schedulers work as
    they are.
    """

    compression: Compression | None
    _schedule: Schedule

    def __init__(
        self, params: Any, make: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any]
    ) -> None:
        # Only asked for its groups and defaults: it checks the settings as its author meant.
        template = make(params, **settings)
        super().__init__(template.param_groups, template.defaults)
        self.template = template

    def group_settings(self) -> list[dict[str, Any]]:
        """Learning rate and the like of each group."""
        return [settings_of(group) for group in self.param_groups]

    @property
    def joining(self) -> bool:
        """Whether this is within ``join()``."""
        return self._schedule.before_update is not None


class WholeOptimizer(EngineOptimizer):
    """For ``schedule="allreduce"``: the optimizer that was asked for, over whole parameters."""

    def __init__(
        self,
        params: Any,
        make: Callable[..., torch.optim.Optimizer],
        settings: Mapping[str, Any],
        *,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        schedule: Schedule,
        transport: Transport,
        compression: Compression | None,
    ) -> None:
        super().__init__(params, make, settings)
        self._schedule = schedule
        self._of = {id(p): name for name, p in zip(names, parameters, strict=True)}
        self.transport = transport
        self.compression = compression
        self.state = self.template.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; their gradients are averaged when ``backward()`` returns."""
        loss = loss_of(closure)
        self._schedule.begin_update()
        self.template.step()
        self._schedule.end_update()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer within, and what compression owes."""
        return with_compression(self.template.state_dict(), self.compression)

    def full_state_dict(self) -> dict[str, Any] | None:
        """A copy of it in rank 0's host memory, with what all ranks owe; ``None`` elsewhere.

        All ranks must call it together.
        """
        owed = None if self.compression is None else self.compression.gather(self.transport)
        if self.transport.rank:
            return None
        live = self.template.state_dict()
        kept = {
            number: {kind: _on_host(value) for kind, value in values.items()}
            for number, values in live["state"].items()
        }
        state = {**live, "state": kept}
        return state if owed is None else {**state, COMPRESSION: owed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Into the optimizer within."""
        inner = {name: value for name, value in state_dict.items() if name != COMPRESSION}
        self.template.load_state_dict(inner)
        if self.compression is not None and COMPRESSION in state_dict:
            self.compression.load_state_dict([state_dict[COMPRESSION]])
        self.param_groups = self.template.param_groups
        self.state = self.template.state

    # What checkpoints ask for, as of a sharded one.

    def numel(self, name: str) -> int:
        """Elements of the parameter of that name."""
        return self._by_name()[name].numel()

    def channels_last(self) -> list[str]:
        """Parameters whose elements lie in that order."""
        known = self._by_name()
        return channels_last(list(known), list(known.values()))

    def owned(self) -> dict[str, Piece]:
        """All parameters, whole."""
        return {name: Piece(first=0, numel=p.numel(), values={}) for name, p in self._by_name().items()}

    def pieces(self) -> dict[str, Piece]:
        """The state itself; what has the parameter's shape lies flat."""
        return {
            name: Piece(first=0, numel=p.numel(), values=flat(self.template.state[p], p))
            for name, p in self._by_name().items()
            if self.template.state.get(p)
        }

    def compression_state(self) -> dict[str, Any]:
        """What compression owes; empty without."""
        return {} if self.compression is None else self.compression.state_dict()

    def take(
        self,
        pieces: Mapping[str, Piece],
        groups: Sequence[Mapping[str, Any]],
        compressions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Go on from these; see :meth:`ShardedOptimizer.take`."""
        state = self.template.state_dict()
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        known: dict[int, Any] = {}
        for number, parameter in zip(numbers, parameters, strict=True):
            piece = pieces.get(self._of.get(id(parameter), ""))
            if piece is not None:
                known[number] = shaped(piece.values, parameter)
        if len(groups) != len(state["param_groups"]):
            raise EngineError(
                f"the optimizer state has {len(groups)} parameter groups, this optimizer {len(state['param_groups'])}",
                hint="load it with the parameter groups that it was saved with",
            )
        mine = [g["params"] for g in state["param_groups"]]
        settings = [{**settings_of(g), "params": own} for g, own in zip(groups, mine, strict=True)]
        self.load_state_dict({"state": known, "param_groups": settings})
        if self.compression is not None and compressions:
            self.compression.load_state_dict(compressions)

    def _by_name(self) -> dict[str, nn.Parameter]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {self._of[id(p)]: p for p in parameters if id(p) in self._of}


def with_compression(state: dict[str, Any], compression: Compression | None) -> dict[str, Any]:
    """The state and what compression owes."""
    return state if compression is None else {**state, COMPRESSION: compression.state_dict()}


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """What the closure of ``step(closure)`` gives, its backward pass included."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group has beside its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
