r"""Fewer synchronisations: ranks train alone for ``H`` steps, then agree on what they learnt.

::

    local = tonnage.LocalSteps(model, optimizer, every=50, compress="int8")

and the training loop stays as it was. A rank's *outer gradient* is how far it came from where all ranks
stood last, ``δ = θ_start - θ``. Its mean over the ranks drives an outer optimizer::

    v = μ v + δ        θ_start = θ_start - lr (δ + μ v)        θ = a θ + (1 - a) θ_start

``lr = 1, μ = 0`` is local SGD: the mean of all ranks' parameters. ``lr = 0.7, μ = 0.9`` is DiLoCo.

*Streaming.* The model is cut into fragments, each with its own place in the period, so that a step's
transfer is a fragment's. It runs under the next ``delay`` inner steps; what comes back is mixed with what
this rank has learnt meanwhile, of which the share ``a`` stays. Without streaming ``a = 0``, and training
stands still until all fragments are there.

*Compression.* An outer gradient is encoded for the rank that owns its shard, added up there in fp32 in rank
order, encoded once more and handed to all; what either rounding lost is owed to the next outer step.

Whatever the device of the model, the outer state (12 bytes a parameter, more with compression) lives in
the host's memory and travels over the engine's own connections: it is meant for links that are slow.
``θ_start`` is the same on all ranks, bit for bit, after each outer step.

Sources: Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767; Douillard et al.,
"DiLoCo", arXiv 2311.08105; Douillard et al., "Streaming DiLoCo with overlapping communication",
arXiv 2501.18512.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tonnage.engine.bucket import Bucket, ParameterSpec, cut_buckets, plan_hash
from tonnage.engine.record import StepLog
from tonnage.engine.schedule import parameters_of
from tonnage.engine.squeeze import Compression
from tonnage.engine.transport import (
    Buffers,
    Ticket,
    Transport,
    backend_name,
    check_same_plan,
    engine_group,
    link_level,
    open_transport,
)
from tonnage.errors import EngineError, RankFailure
from tonnage.ledger import Ledger, from_bytes, to_bytes, write_ledger

_HOST = torch.device("cpu")
_COMPRESSIONS = ("lossless", "bf16", "fp16", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov:
    """The outer optimizer.

    Attributes:
        lr: its learning rate; above 0.
        momentum: share of the velocity that an outer step keeps; from 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not (0 < self.lr < float("inf") and 0 <= self.momentum < 1):
            raise EngineError(
                f"an outer optimizer with lr {self.lr} and momentum {self.momentum}",
                hint="use lr above 0 and momentum from 0 to below 1, such as Nesterov(lr=0.7, momentum=0.9)",
            )


AVERAGE = Nesterov(lr=1.0, momentum=0.0)
"""Local SGD: the ranks' parameters are averaged."""


class LocalSteps:
    """Synchronises ``module`` every so many steps of ``optimizer``, which it hooks into.

    Attributes:
        step: inner steps so far.

    Args:
        module: the model, not wrapped; rank 0's parameters are handed to all. Its buffers stay each rank's
            own.
        optimizer: of this rank; its state is never sent.
        every: inner steps between a fragment's outer steps.
        outer: the outer optimizer; :data:`AVERAGE` for local SGD.
        compress: what to send fewer bytes by: ``"lossless"``, ``"bf16"``, ``"fp16"`` or ``"int8"``.
        stream: let transfers run under the next inner steps.
        fragments: parts that take turns when streaming, about.
        delay: inner steps that a transfer may take when streaming; below ``every``.
        mixing: share of what a rank has that stays when a streamed outer step arrives.
        process_group: the ranks to train over; all of them by default.
        timeout: seconds after which a transfer that does not end is an error.
        hang_timeout: seconds without a sign of life after which a rank that is waited for is taken to hang.

    Raises:
        EngineError: nothing to train, a setting without meaning, ranks with different models, or a process
            group without gloo for CPU tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 50,
        outer: Nesterov = Nesterov(),
        compress: str | None = None,
        stream: bool = True,
        fragments: int = 4,
        delay: int = 2,
        mixing: float = 0.5,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = 300.0,
        hang_timeout: float = 10.0,
    ) -> None:
        _check_settings(every, compress, stream, fragments, delay, mixing)
        named = list(parameters_of(module))
        if not named:
            raise EngineError("the model has no parameter to train", hint="set requires_grad on some")
        self.every, self.outer, self.step = every, outer, 0
        self._delay, self._mixing = (delay, mixing) if stream else (0, 0.0)
        self._parameters = [p for _, p in named]
        group = engine_group(process_group, _HOST, timeout=timeout)
        buckets = _cut(named, fragments if stream else 1, world_size=group.size() if group else 1)
        if group is not None:
            _check_gloo(group)
            names = [f"{n} {tuple(p.shape)}" for n, p in named]
            check_same_plan(group, plan_hash(buckets), names, _HOST)
        self._transport = open_transport(group, _HOST, timeout=timeout, hang_timeout=hang_timeout)
        self._fragments = [
            _Fragment(bucket, offset=index * every // len(buckets) if stream else 0)
            for index, bucket in enumerate(buckets)
        ]
        self._compression = (
            Compression(
                compress,
                buckets=buckets,
                shapes=[p.shape for p in self._parameters],
                dtypes=[torch.float32] * len(buckets),
                rank=self._transport.rank,
                sharded=False,
                device=_HOST,
            )
            if compress is not None and self._transport.world_size > 1
            else None
        )
        for fragment in self._fragments:
            buffers = fragment.buffers()
            if self._compression is not None:
                buffers.packing = self._compression.packing(fragment.bucket, torch.float32)
            self._transport.add_bucket(buffers)
        # A rank that is ahead must not send into fragments that another has yet to lay out.
        self._transport.exchange(torch.zeros(1))
        self._log = StepLog(self._transport, link=link_level())
        self._begin()
        self._closing = _Closing(self._fragments, self._transport)
        self._hook = optimizer.register_step_post_hook(lambda *_: self._after_step())

    def sync(self) -> None:
        """Make the parameters of all ranks their mean; all ranks must call it after the same step.

        Before evaluating, and at the end: while training, ranks differ. The outer optimizer's velocity
        stays as it is.
        """
        for fragment in self._fragments:
            if fragment.ticket is not None:
                self._apply(fragment, self._mixing)
        stale = [each for each in self._fragments if each.settled != self.step]
        for fragment in stale:
            self._launch(fragment)
        for fragment in stale:
            self._take(fragment)
            fragment.start -= fragment.delta
            self._write(fragment, 0.0)
            fragment.settled = self.step

    def state_dict(self) -> dict[str, Any]:
        """This rank's outer state; all ranks must call it after the same step.

        Save the model's and the optimizer's beside it, of each rank: between outer steps they differ.
        """
        for fragment in self._fragments:
            if fragment.ticket is not None:
                self._transport.wait_received(fragment.ticket)
        pending = [f for f in self._fragments if f.ticket is not None]
        return {
            "step": self.step,
            "start": self._by_name("start", self._fragments),
            "velocity": self._by_name("velocity", self._fragments),
            "arrived": self._by_name("delta", pending),
            "due": {slot.name: f.due for f in pending for slot in f.bucket.slots},
            "compression": self._compression and self._compression.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave.

        Raises:
            EngineError: it is of another model, or was saved during transfers of other fragments.
        """
        names = {slot.name for f in self._fragments for slot in f.bucket.slots}
        if set(state["start"]) != names or set(state["velocity"]) != names:
            odd = sorted(names ^ set(state["start"]))
            raise EngineError(
                f"the outer state is of another model: {', '.join(odd[:3])}", hint="load it with its model"
            )
        due = [{state["due"].get(slot.name) for slot in f.bucket.slots} for f in self._fragments]
        if any(len(each) > 1 for each in due):
            raise EngineError(
                "the outer state was saved while fragments travelled that were cut in another way",
                hint="load it with the fragments that it was saved with, or call sync() before saving",
            )
        if any(f.ticket is not None for f in self._fragments):
            raise EngineError("an outer state can't be loaded during a transfer", hint="call sync() before")
        if (state["compression"] is None) != (self._compression is None):
            raise EngineError(
                "the outer state was saved with compression, or is to be used with it, not both",
                hint="give compress=… as it was when the state was saved",
            )
        if self._compression is not None:
            self._compression.load_state_dict([state["compression"]])
        self.step = state["step"]
        for fragment, (place,) in zip(self._fragments, due, strict=True):
            fragment.settled = -1
            for what, key in (("start", "start"), ("velocity", "velocity"), ("delta", "arrived")):
                if what != "delta" or place is not None:
                    self._take_over(fragment, getattr(fragment, what), state[key])
            if place is not None:
                fragment.due, fragment.ticket = place, _arrived(fragment, self._transport)

    def ledger(self, facts: Mapping[str, Any] | None = None) -> Ledger | None:
        """The ledger of all ranks on rank 0, ``None`` elsewhere. All ranks must call it together."""
        shape = {
            "world_size": self._transport.world_size,
            "num_params": sum(p.numel() for p in self._parameters),
            "local_steps": self.every,
        }
        own = self._log.ledger({"run": "local steps", **shape, **dict(facts or {})})
        parts = self._transport.gather_bytes(to_bytes(own))
        return None if parts is None else Ledger.gather([from_bytes(part) for part in parts])

    def save_ledger(self, path: str | Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write :meth:`ledger` to a file, from rank 0. All ranks must call it together."""
        ledger = self.ledger(facts)
        if ledger is not None:
            write_ledger(ledger, path)

    def close(self) -> None:
        """Let transfers end, stop the threads and leave the optimizer alone; happens at exit by itself."""
        self._hook.remove()
        self._closing()

    # Below: how.

    def _begin(self) -> None:
        """All ranks start from rank 0's parameters."""
        for fragment in self._fragments:
            self._read(fragment, fragment.start)
            begun = self._transport.stamp()
            wire = self._transport.broadcast([fragment.start])
            self._log.broadcast(
                "parameter", fragment.start.nbytes, wire, begun, self._transport.stamp(), step=-1
            )
            self._write(fragment, 0.0)
        self._log.begin_step()
        self._log.begin_compute("inner")

    def _after_step(self) -> None:
        """The inner optimizer has made a step."""
        self.step += 1
        self._log.begin_compute("outer")
        arriving = [f for f in self._fragments if f.ticket is not None and f.due <= self.step]
        for fragment in arriving:
            self._apply(fragment, self._mixing)
        leaving = [f for f in self._fragments if (self.step - f.offset) % self.every == 0]
        for fragment in leaving:
            self._launch(fragment)
        if self._delay == 0:
            for fragment in leaving:
                self._apply(fragment, 0.0)
                fragment.settled = self.step
        self._log.end_step()
        self._log.begin_compute("inner")

    def _launch(self, fragment: _Fragment) -> None:
        assert fragment.ticket is None
        if fragment.last is not None:
            self._transport.wait_sent(fragment.last)
        self._read(fragment, fragment.delta)
        torch.sub(fragment.start, fragment.delta, out=fragment.delta)
        fragment.due = self.step + self._delay
        fragment.ticket = fragment.last = self._transport.start_all_reduce(fragment.bucket.index)

    def _take(self, fragment: _Fragment) -> None:
        """The mean outer gradient is in ``delta`` when this returns."""
        ticket = fragment.ticket
        assert ticket is not None
        before = len(ticket.exposed)
        self._transport.wait_received(ticket)
        self._log.waited(ticket, before)
        self._log.transfer(ticket)
        fragment.ticket = None
        if not bool(torch.isfinite(fragment.delta.sum())):
            raise EngineError(
                f"the outer gradient of fragment {fragment.label} is not finite after step {self.step}",
                hint="some rank's training has diverged: go back to a checkpoint, with a smaller learning rate",
            )

    def _apply(self, fragment: _Fragment, mixing: float) -> None:
        """An outer step of one fragment."""
        self._take(fragment)
        lr, momentum = self.outer.lr, self.outer.momentum
        fragment.velocity.mul_(momentum).add_(fragment.delta)
        fragment.start.sub_(fragment.delta, alpha=lr).sub_(fragment.velocity, alpha=lr * momentum)
        self._write(fragment, mixing)

    def _read(self, fragment: _Fragment, out: torch.Tensor) -> None:
        for slot in fragment.bucket.slots:
            parameter = self._parameters[slot.index].detach()
            out[slot.offset : slot.offset + slot.numel].copy_(parameter.reshape(-1))

    def _write(self, fragment: _Fragment, mixing: float) -> None:
        """The parameters become the shared values, but for the share ``mixing`` of what they are."""
        with torch.no_grad():
            for slot in fragment.bucket.slots:
                parameter = self._parameters[slot.index]
                shared = fragment.start[slot.offset : slot.offset + slot.numel].view(parameter.shape)
                if mixing:
                    shared = torch.lerp(shared, parameter.to(_HOST, torch.float32), mixing)
                parameter.copy_(shared)

    def _by_name(self, what: str, fragments: Sequence[_Fragment]) -> dict[str, torch.Tensor]:
        return {
            slot.name: getattr(f, what)[slot.offset : slot.offset + slot.numel]
            .view(self._parameters[slot.index].shape)
            .clone()
            for f in fragments
            for slot in f.bucket.slots
        }

    def _take_over(self, fragment: _Fragment, into: torch.Tensor, named: Mapping[str, torch.Tensor]) -> None:
        for slot in fragment.bucket.slots:
            value = named[slot.name]
            if value.shape != self._parameters[slot.index].shape:
                raise EngineError(
                    f"{slot.name} has shape {tuple(self._parameters[slot.index].shape)}, "
                    f"and {tuple(value.shape)} in the outer state",
                    hint="load it with its model",
                )
            into[slot.offset : slot.offset + slot.numel].copy_(value.reshape(-1))


class _Fragment:
    """A part of the model that makes its outer steps by itself; all tensors are flat, fp32, on the host.

    Attributes:
        start: where all ranks stood after its last outer step.
        velocity: of the outer optimizer.
        delta: the outer gradient, this rank's until it leaves, then the mean; the exchange's in between.
        ticket: of the transfer under way.
        last: of the latest one: ``delta`` may be written when it is sent.
        due: inner step after which it is applied.
        settled: inner step after which all ranks' parameters were ``start``; -1 when they may not be.
    """

    def __init__(self, bucket: Bucket, *, offset: int) -> None:
        self.bucket, self.offset = bucket, offset
        self.label = f"outer {bucket.label}"
        self.start = torch.zeros(bucket.numel)
        self.velocity = torch.zeros(bucket.numel)
        self.delta = torch.zeros(bucket.numel)
        self.ticket: Ticket | None = None
        self.last: Ticket | None = None
        self.due = 0
        self.settled = 0

    def buffers(self) -> Buffers:
        """What the transport averages."""
        nothing = torch.zeros(0)
        return Buffers(label=self.label, gradient=self.delta, shard_gradient=nothing, parameter=nothing)


class _Closing:
    """Ends the exchange once: when asked to, or when the process ends.

    A rank that leaves while its last message is being sent would break the others.
    """

    def __init__(self, fragments: Sequence[_Fragment], transport: Transport) -> None:
        self.closed = False
        self._fragments, self._transport = fragments, transport
        atexit.register(self._at_exit)

    def __call__(self) -> None:
        if self.closed:
            return
        self.closed = True
        for fragment in self._fragments:
            if fragment.last is not None:
                self._transport.wait_received(fragment.last)
                self._transport.wait_sent(fragment.last)
        self._transport.close()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        lost = isinstance(getattr(sys, "last_value", None), RankFailure)
        try:
            if not lost:
                self()
        except (EngineError, RankFailure):
            lost = True
        if lost:
            # Threads that still send to a lost rank would keep the process; what went wrong has been told.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _check_settings(
    every: int, compress: str | None, stream: bool, fragments: int, delay: int, mixing: float
) -> None:
    if every < 1:
        raise EngineError(f"an outer step every {every} steps", hint="use every=1 or more")
    if compress is not None and compress not in _COMPRESSIONS:
        raise EngineError(
            f"outer gradients can't travel as {compress!r}: what it leaves out of one would be missing from "
            "all models until the next",
            hint=f"use one of {', '.join(_COMPRESSIONS)}",
        )
    if not stream:
        return
    if fragments < 1 or not 0 <= mixing < 1:
        raise EngineError(
            f"{fragments} fragments, of which {mixing} of a rank's own values stay",
            hint="use 1 fragment or more, and mixing from 0 to below 1",
        )
    if not 1 <= delay < every:
        raise EngineError(
            f"a transfer that may take {delay} steps, and an outer step every {every}",
            hint="use a delay of 1 or more, below every; or stream=False",
        )


def _check_gloo(group: dist.ProcessGroup) -> None:
    name = backend_name(group, _HOST)
    if name != "gloo":
        raise EngineError(
            f"outer gradients travel from the host's memory, and the process group has {name} for it",
            hint='call init_process_group("cpu:gloo,cuda:nccl")',
        )


def _cut(named: Sequence[tuple[str, nn.Parameter]], fragments: int, *, world_size: int) -> tuple[Bucket, ...]:
    """About so many fragments of about equal size, each of whole parameters."""
    specs = [ParameterSpec(name=n, numel=p.numel(), dtype="torch.float32", itemsize=4) for n, p in named]
    total = sum(4 * p.numel() for _, p in named)
    return cut_buckets(specs, cap=max(4, -(-total // fragments)), world_size=world_size)


def _arrived(fragment: _Fragment, transport: Transport) -> Ticket:
    """The ticket of a transfer that had ended when the state was saved."""
    now = transport.stamp()
    nbytes = fragment.delta.nbytes
    return Ticket("all-reduce", fragment.label, nbytes, 0, 0, now, now, received=True, sent=True)
