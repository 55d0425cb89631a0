"""Three ways to train the same model on several ranks, each recording the same ledger.

``naive``    the textbook's: after the backward pass, one blocking all-reduce a parameter
``ddp``      PyTorch's DistributedDataParallel, buckets of 25 MB hidden under the backward pass
``tonnage``  this package's engine

What DDP does is seen through its communication hook, which issues just what DDP would by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from tonnage.engine import DataParallel
from tonnage.ledger import Ledger, Recorder, from_bytes, to_bytes, wire_nbytes

WayName = Literal["naive", "ddp", "tonnage"]
WAYS: tuple[WayName, ...] = ("naive", "ddp", "tonnage")

TITLES: Mapping[WayName, str] = {
    "naive": "one all-reduce a parameter, after the backward pass",
    "ddp": "torch DistributedDataParallel",
    "tonnage": "tonnage.DataParallel",
}

MakeOptimizer = Callable[..., torch.optim.Optimizer]


class Way(Protocol):
    """Trains one step at a time."""

    def step(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> float:
        """One whole step; returns the loss before it."""
        ...

    def drain(self) -> None:
        """Nothing is under way when this returns."""
        ...

    def ledger(self, facts: Mapping[str, Any]) -> Ledger | None:
        """All ranks' ledger on rank 0; all ranks call it together."""
        ...


def open_way(
    name: WayName, model: nn.Module, kind: MakeOptimizer, settings: Mapping[str, Any], *, link: str
) -> Way:
    """The way of this name, around ``model``."""
    if name == "tonnage":
        return _Engine(model, kind, settings)
    return (_Ddp if name == "ddp" else _Naive)(model, kind, settings, link=link)


class _Engine:
    def __init__(self, model: nn.Module, kind: MakeOptimizer, settings: Mapping[str, Any]) -> None:
        self._model = DataParallel(model)
        self._optimizer = self._model.optimizer(kind, **settings)

    def step(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> float:
        loss = loss_of(self._model)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def drain(self) -> None:
        self._model.drain()

    def ledger(self, facts: Mapping[str, Any]) -> Ledger | None:
        return self._model.ledger(facts)


class _Recorded:
    """What the naive way and DDP share: a clock that all ranks read alike, and rows of their own."""

    def __init__(
        self, model: nn.Module, kind: MakeOptimizer, settings: Mapping[str, Any], *, link: str
    ) -> None:
        self.model = self.wrap(model)
        self._optimizer = kind(self.model.parameters(), **settings)
        self._link = link
        self._group_size = dist.get_world_size()
        self._recorder = Recorder(dist.get_rank())
        # The ranks of the demo share a machine, and with it the monotonic clock.
        origin = [time.perf_counter()]
        dist.broadcast_object_list(origin)
        self._origin = origin[0]
        self.number = 0
        self._ended: float | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def backward(self, loss: torch.Tensor) -> float:
        """Fill the gradients' means; returns when the computation of it had ended."""
        raise NotImplementedError

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def step(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> float:
        forward = self.now()
        # A step lasts until the next one begins, as the engine counts it too.
        begun = self._ended if self._ended is not None else forward
        loss = loss_of(self.model)
        forward_end = self.now()
        backward_end = self.backward(loss)
        update = self.now()
        self._optimizer.step()
        updated = self.now()
        self._optimizer.zero_grad()
        self._still("compute", "forward", forward, forward_end)
        self._still("compute", "backward", forward_end, backward_end)
        self._still("compute", "optimizer", update, updated)
        self._ended = self.now()
        self._still("step", "step", begun, self._ended)
        self.number += 1
        return loss.item()

    def moved(self, label: str, nbytes: int, start: float, stop: float, exposed: float) -> None:
        channel = self._recorder.channel(
            "gradient", "all-reduce", group_size=self._group_size, link=self._link, label=label
        )
        wire = round(wire_nbytes("all-reduce", nbytes, self._group_size))
        self._recorder.add(channel, self.number, nbytes, wire, start, stop, exposed)

    def drain(self) -> None:
        """Every step has ended when it returns; the next one begins with its forward pass."""
        self._ended = None

    def ledger(self, facts: Mapping[str, Any]) -> Ledger | None:
        mine = to_bytes(self._recorder.ledger(facts))
        parts: list[bytes] | None = [b""] * self._group_size if dist.get_rank() == 0 else None
        dist.gather_object(mine, parts)
        return None if parts is None else Ledger.gather([from_bytes(part) for part in parts])

    def _still(self, kind: str, op: str, start: float, stop: float) -> None:
        link = "device" if kind == "compute" else "none"
        self._recorder.add(self._recorder.channel(kind, op, link=link), self.number, 0, 0, start, stop)


class _Naive(_Recorded):
    def backward(self, loss: torch.Tensor) -> float:
        loss.backward()
        ended = self.now()
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            start = self.now()
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self._group_size)
            stop = self.now()
            self.moved(name, parameter.grad.nbytes, start, stop, stop - start)
        return ended


class _Ddp(_Recorded):
    def wrap(self, model: nn.Module) -> nn.Module:
        self._flights: list[list[float]] = []
        wrapped = nn.parallel.DistributedDataParallel(model)
        # A lambda, since DDP compares annotations with its types, and ours are text.
        wrapped.register_comm_hook(None, lambda state, bucket: self._hook(bucket.buffer()))
        return wrapped

    def backward(self, loss: torch.Tensor) -> float:
        self._flights.clear()
        loss.backward()
        returned = self.now()
        # The last bucket leaves when the last gradient is ready; from then on backward() only waits.
        ended = max((start for start, *_ in self._flights), default=returned)
        cursor = ended
        for index, (start, stop, nbytes) in enumerate(sorted(self._flights, key=lambda flight: flight[1])):
            exposed = max(0.0, stop - max(cursor, start))
            cursor = max(cursor, stop)
            self.moved(f"b{index:02d}", int(nbytes), start, stop, exposed)
        return ended

    def _hook(self, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        flight = [self.now(), float("nan"), float(gradient.nbytes)]
        self._flights.append(flight)
        gradient.div_(self._group_size)
        work = dist.all_reduce(gradient, async_op=True)
        assert work is not None

        def landed(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            flight[1] = self.now()
            return future.value()[0]

        landing: torch.futures.Future[torch.Tensor] = work.get_future().then(landed)
        return landing
