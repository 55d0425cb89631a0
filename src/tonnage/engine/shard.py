"""The optimizer on a shard: each rank updates its part of every bucket, with 1/N of the state.

Within a bucket the own shard is cut at the parameters' borders into *segments*: flat views of the
parameters and of their averaged gradients. An optimizer that treats each element alone computes on
segments just what it would compute on whole parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tonnage.engine.bucket import Bucket
from tonnage.engine.carry import Segment, carry_state
from tonnage.engine.schedule import Schedule
from tonnage.engine.squeeze import Compression
from tonnage.engine.transport import Buffers, Packing, Transport
from tonnage.errors import EngineError

_ELEMENTWISE = {
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
}
_COMPRESSION = "compression"
"""Key of what compression adds to a state dict."""
_NOT_ELEMENTWISE = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


class EngineOptimizer(torch.optim.Optimizer):
    """Looks like the optimizer that was asked for; steps each bucket when its gradients have come.

    Learning rates and the like are read from ``param_groups`` at each step, so schedulers work as
    they are.
    """

    def __init__(
        self, params: Any, make: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any]
    ) -> None:
        # Only asked for its groups and defaults: it checks the settings as its author meant.
        template = make(params, **settings)
        super().__init__(template.param_groups, template.defaults)
        self.template = template


class ShardedOptimizer(EngineOptimizer):
    """One small optimizer a bucket, over this rank's segments of it."""

    def __init__(
        self,
        params: Any,
        make: Callable[..., torch.optim.Optimizer],
        settings: Mapping[str, Any],
        *,
        rank: int,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        buffers: Sequence[Buffers],
        schedule: Schedule,
        compression: Compression | None = None,
    ) -> None:
        super().__init__(params, make, settings)
        _refuse_unless_elementwise(type(self.template))
        self._schedule = schedule
        self._rank = rank
        self._make = make
        self._settings = settings
        self._group_of = _group_of(self.param_groups, parameters)
        self._sampled: list[dict[str, Any]] = []
        self._lay_out(buckets, buffers, compression)
        schedule.updater = self

    def _lay_out(
        self, buckets: Sequence[Bucket], buffers: Sequence[Buffers], compression: Compression | None
    ) -> None:
        self._compression = compression
        self._buckets = buckets
        self._parts: list[_Part] = [
            _Part(bucket, memory, self._rank, self._group_of, self.param_groups, self._make, self._settings)
            for bucket, memory in zip(buckets, buffers, strict=True)
        ]

    def move_to(
        self,
        buckets: Sequence[Bucket],
        buffers: Sequence[Buffers],
        compression: Compression | None,
        transport: Transport,
    ) -> None:
        """Work on other buckets of the same parameters, with the same state; by all ranks together."""
        before, old = self._buckets, [s for part in self._parts for s in part.segments()]
        self._lay_out(buckets, buffers, compression)
        carry_state(transport, before, old, [s for part in self._parts for s in part.segments()])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the own shard of each bucket as its gradients arrive, and send it on at once."""
        loss = _loss_of(closure)
        self._schedule.begin_update()
        if self._schedule.early:
            self._check_settings()
        else:
            self.sample()
            for index in range(len(self._parts)):
                self._schedule.reduced(index)
                self.update(index)
                self._schedule.updated(index)
        self._schedule.end_update()
        return loss

    def sample(self) -> None:
        """The groups' settings as they are now hold for this step."""
        self._sampled = [_settings(group) for group in self.param_groups]

    def update(self, index: int) -> None:
        """Update the own shard of bucket ``index``, whose gradients are there."""
        with torch.no_grad():
            self._parts[index].step(self._sampled, self._schedule.unused)

    def _check_settings(self) -> None:
        if self._sampled != [_settings(group) for group in self.param_groups]:
            raise EngineError(
                "the optimizer's settings were changed between backward() and step(), "
                "when schedule='early' had begun to use them",
                hint="change them after step(), as schedulers do, or use schedule='shard'",
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; with ``set_to_none=False`` overwrite them, once they have been sent."""
        if not set_to_none:
            self._schedule.wait_writable()
        super().zero_grad(set_to_none)

    def segment_gradients(self) -> list[torch.Tensor]:
        """This rank's parts of the averaged gradients; wait for them first."""
        return [g for part in self._parts for i, g in part.gradients if i not in self._schedule.unused]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state: load it on the same rank of a job of the same size."""
        self._schedule.wait_gathers()  # with schedule='early' the last updates may still be under way
        state = {
            "shards": [part.optimizer.state_dict() if part.optimizer else None for part in self._parts],
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups],
        }
        return _with_compression(state, self._compression)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave.

        Raises:
            EngineError: it was saved with other buckets, groups or ranks.
        """
        shards, groups = state_dict.get("shards"), state_dict.get("param_groups")
        if (
            shards is None
            or groups is None
            or len(shards) != len(self._parts)
            or len(groups) != len(self.param_groups)
        ):
            raise EngineError(
                "the optimizer state was not saved by this engine with the same buckets and groups",
                hint="load it with the model, bucket size and world size that it was saved with",
            )
        self._schedule.wait_gathers()
        for part, shard in zip(self._parts, shards, strict=True):
            if part.optimizer is not None:
                part.optimizer.load_state_dict(shard)
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(saved)
        _load_compression(state_dict, self._compression)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is being made: buckets can't grow.

        Raises:
            EngineError: it was made already.
        """
        if hasattr(self, "_parts"):
            raise EngineError(
                "parameters can't be added to a sharded optimizer",
                hint="wrap the model and make the optimizer again",
            )
        super().add_param_group(param_group)


class _Part:
    """This rank's segments of one bucket, and the optimizer of just these."""

    def __init__(
        self,
        bucket: Bucket,
        memory: Buffers,
        rank: int,
        group_of: Mapping[int, int],
        groups: Sequence[Mapping[str, Any]],
        make: Callable[..., torch.optim.Optimizer],
        settings: Mapping[str, Any],
    ) -> None:
        start, stop = bucket.shard(rank)
        self._segments: list[tuple[int, torch.Tensor]] = []
        self._firsts: list[int] = []
        self.gradients: list[tuple[int, torch.Tensor]] = []
        by_group: dict[int, list[torch.Tensor]] = {}
        for slot in bucket.slots:
            first, last = slot.within(start, stop)
            if first >= last or slot.index not in group_of:
                continue
            # Where parameters are handed on rounded, what the optimizer works on is the exact copy.
            master = memory.packing.master if isinstance(memory.packing, Packing) else None
            segment = memory.parameter[first:last] if master is None else master[first - start : last - start]
            segment.grad = memory.shard_gradient[first - start : last - start]
            self._segments.append((slot.index, segment))
            self._firsts.append(first - slot.offset)
            self.gradients.append((slot.index, segment.grad))
            by_group.setdefault(group_of[slot.index], []).append(segment)
        self._groups = list(by_group)
        self.optimizer = (
            make([{**_settings(groups[g]), "params": by_group[g]} for g in self._groups], **settings)
            if by_group
            else None
        )

    def segments(self) -> list[Segment]:
        """Where the optimizer's state belongs."""
        if self.optimizer is None:
            return []
        return [
            Segment(index=index, first=first, tensor=segment, optimizer=self.optimizer)
            for (index, segment), first in zip(self._segments, self._firsts, strict=True)
        ]

    def step(self, groups: Sequence[Mapping[str, Any]], unused: frozenset[int]) -> None:
        if self.optimizer is None:
            return
        for mine, place in zip(self.optimizer.param_groups, self._groups, strict=True):
            mine.update(groups[place])
        if unused:
            for (index, segment), (_, gradient) in zip(self._segments, self.gradients, strict=True):
                segment.grad = None if index in unused else gradient
        self.optimizer.step()


class WholeOptimizer(EngineOptimizer):
    """For ``schedule="allreduce"``: the optimizer that was asked for, over whole parameters."""

    def __init__(
        self,
        params: Any,
        make: Callable[..., torch.optim.Optimizer],
        settings: Mapping[str, Any],
        *,
        schedule: Schedule,
        compression: Compression | None = None,
    ) -> None:
        super().__init__(params, make, settings)
        self._schedule = schedule
        self.compression = compression
        self.state = self.template.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; their gradients are averaged when ``backward()`` returns."""
        loss = _loss_of(closure)
        self._schedule.begin_update()
        self.template.step()
        self._schedule.end_update()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer within, and what compression owes."""
        return _with_compression(self.template.state_dict(), self.compression)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Into the optimizer within."""
        inner = {name: value for name, value in state_dict.items() if name != _COMPRESSION}
        self.template.load_state_dict(inner)
        _load_compression(state_dict, self.compression)
        self.param_groups = self.template.param_groups
        self.state = self.template.state


def _with_compression(state: dict[str, Any], compression: Compression | None) -> dict[str, Any]:
    return state if compression is None else {**state, _COMPRESSION: compression.state_dict()}


def _load_compression(state: Mapping[str, Any], compression: Compression | None) -> None:
    """What the checkpoint owes; one from a training without compression owes nothing."""
    if compression is not None and _COMPRESSION in state:
        compression.load_state_dict(state[_COMPRESSION])


def _loss_of(closure: Callable[[], float] | None) -> float | None:
    """What the closure of ``step(closure)`` gives, its backward pass included."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _group_of(groups: Iterable[Mapping[str, Any]], parameters: Sequence[nn.Parameter]) -> dict[int, int]:
    place = {id(p): index for index, p in enumerate(parameters)}
    found: dict[int, int] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) in place:
                found[place[id(parameter)]] = number
            elif parameter.requires_grad:
                raise EngineError(
                    "the optimizer was given a parameter that the wrapped model does not train",
                    hint="give parameters of the wrapped model, as they were when it was wrapped",
                )
    return found


def _refuse_unless_elementwise(kind: type[torch.optim.Optimizer]) -> None:
    names = {each.__name__ for each in kind.__mro__}
    if names & _NOT_ELEMENTWISE:
        raise EngineError(
            f"{kind.__name__} looks at whole matrices or at the past loss, and can't update a shard alone",
            hint="tonnage.DataParallel(model, schedule='allreduce')",
        )
    if not names & _ELEMENTWISE:
        warnings.warn(
            f"{kind.__name__} is not known to treat each element alone; if it does not, "
            "use tonnage.DataParallel(model, schedule='allreduce')",
            stacklevel=4,
        )
