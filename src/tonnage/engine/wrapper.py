"""Data parallelism in two lines.

::

    model = tonnage.DataParallel(model)
    optimizer = model.optimizer(torch.optim.AdamW, lr=3e-4)

and the training loop stays as it was.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from tonnage.engine.bucket import (
    Bucket,
    ParameterSpec,
    boundaries_of,
    buckets_at,
    cut_buckets,
    plan_hash,
)
from tonnage.engine.carry import hand_on
from tonnage.engine.check import Check
from tonnage.engine.compress import AUTO_CODECS
from tonnage.engine.explain import explain, waits_more_than_predicted
from tonnage.engine.join import Announcement, announce, plain_settings, take_settings
from tonnage.engine.record import StepLog
from tonnage.engine.schedule import Hook, Schedule, ScheduleName, like, parameters_of
from tonnage.engine.shard import ShardedOptimizer
from tonnage.engine.squeeze import Compression, is_power, probe_packing
from tonnage.engine.transport import (
    Buffers,
    Packing,
    Transport,
    check_same_plan,
    engine_group,
    link_level,
    open_transport,
)
from tonnage.engine.tune import Tuner, Tuning, check_agreed
from tonnage.engine.whole import EngineOptimizer, WholeOptimizer
from tonnage.errors import EngineError, RankFailure
from tonnage.ledger import Ledger, from_bytes, to_bytes, write_ledger
from tonnage.units import parse_size

_LOG = logging.getLogger("tonnage")

FIRST_CAP = 2_000_000
"""Bytes of a bucket until something has been measured."""


class DataParallel(nn.Module):
    """Trains ``module`` on every rank's own batches, as one model.

    Args:
        module: the model, on its device, the same on all ranks; rank 0's values are handed to all.
        schedule: ``"shard"`` keeps 1/N of the optimizer state on each rank and hides communication
            under the backward pass and the next forward pass; ``"early"`` updates each part of the model
            as soon as its gradients are averaged, which hides more, but forbids clipping, gradient
            scaling and skipped steps; ``"allreduce"`` hides communication under the backward pass
            alone, and works with any optimizer.
        bucket: bytes of gradients that travel as one, as a number or text like ``"2MB"``; ``"auto"``
            begins with 2 MB and cuts anew once a few steps have shown when gradients become ready and
            what the links do.
        compress: what to send fewer bytes by: ``"lossless"``, ``"bf16"``, ``"fp16"``, ``"int8"``,
            ``"topk:0.01"`` (the part that is sent), ``"sign"``, or with ``schedule="allreduce"``
            ``"power:4"`` (PowerSGD's rank). What a lossy one leaves out is sent in later steps.
            ``"auto"`` takes the least lossy of lossless, bf16 and int8 that hides under computation, or
            none where compression does not pay.
        process_group: the ranks to train over; all of them by default.
        broadcast_buffers: hand rank 0's buffers (BatchNorm's statistics) to all before each training
            forward pass, as DDP does.
        find_unused_parameters: allow parameters without a gradient. One that no rank used keeps its
            value and optimizer state; one that some ranks used counts as zero on the others.
        timeout: seconds after which a transfer that does not end is an error.
        hang_timeout: seconds without a sign of life after which a rank that is waited for is taken to
            hang. Code that holds the interpreter's lock for longer would be taken for that.
        debug: check each step, slowly: that the overlapped mean of each bucket equals that of a blocking
            exchange, that all ranks' parameters are the same bit for bit, and, by filling memory with NaN
            between its uses, that nothing is read too early or too late.

    Raises:
        EngineError: nothing to train, several devices, a device without a transport, or ranks that
            wrap different models.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        schedule: ScheduleName = "shard",
        bucket: int | str = "auto",
        compress: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        timeout: float = 300.0,
        hang_timeout: float = 10.0,
        debug: bool = False,
    ) -> None:
        super().__init__()
        if schedule not in ("shard", "early", "allreduce"):
            raise EngineError(f"no schedule {schedule!r}", hint="schedule='shard', 'early' or 'allreduce'")
        if schedule == "early" and find_unused_parameters:
            raise EngineError(
                "schedule='early' can't know during the backward pass which parameters stay unused",
                hint="schedule='shard' with find_unused_parameters=True",
            )
        self.module = module
        self._broadcast_buffers = broadcast_buffers
        named = list(parameters_of(module))
        self._trained = [p for _, p in named]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        device = _only_device(named)
        group = engine_group(process_group, device, timeout=timeout)
        world_size = group.size() if group is not None else 1
        self._specs = [
            ParameterSpec(name=n, numel=p.numel(), dtype=str(p.dtype), itemsize=p.element_size())
            for n, p in named
        ]
        cap = FIRST_CAP if bucket == "auto" else parse_size(bucket) if isinstance(bucket, str) else bucket
        self._buckets = cut_buckets(self._specs, cap=cap, world_size=world_size)
        if group is not None:
            names = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in named]
            check_same_plan(group, plan_hash(self._buckets), names, device)
        self._sharded = schedule != "allreduce"
        self._schedule_name: ScheduleName = schedule
        self._auto = bucket == "auto", compress == "auto"
        self._compress = None if compress == "auto" or world_size == 1 else compress
        self._transport = open_transport(group, device, timeout=timeout, hang_timeout=hang_timeout)
        self._log = StepLog(self._transport, link=link_level())
        self._compression = self._new_compression()
        self._memory = self._new_memory()
        self._schedule = Schedule(
            module,
            [n for n, _ in named],
            self._trained,
            self._buckets,
            self._memory,
            self._transport,
            self._log,
            name=schedule,
            find_unused=find_unused_parameters,
            check=Check(self._transport) if debug else None,
        )
        self._tuner = self._new_tuner(schedule, cut=bucket == "auto", codec=compress == "auto")
        self._warned_of: Tuning | None = None
        self._joining = False
        self._optimizer: EngineOptimizer | None = None
        self._hand_out(list(module.parameters()), "parameter", step=-1)
        self._hand_out(list(module.buffers()), "buffer", step=-1)
        self._take_parameters()
        module.register_load_state_dict_post_hook(Hook(self._take_parameters))
        # What surrounds a forward pass has nothing to gain from being compiled, and could not be.
        self._begin_forward = torch.compiler.disable(self._open_step)
        self._end_forward = torch.compiler.disable(self._schedule.end_forward)
        self._close = _Closing(self._schedule, self._transport)

    # Training.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; in training it also opens a step."""
        if not (self.training and torch.is_grad_enabled()):
            return self.module(*args, **kwargs)
        self._begin_forward()
        output = self.module(*args, **kwargs)
        self._end_forward(output)
        return output

    def _open_step(self) -> None:
        if self._close.closed:
            raise EngineError(
                "a forward pass to train after close()", hint="wrap the model again to train on"
            )
        if any(p.requires_grad for p in self._frozen):
            raise EngineError(
                "a parameter was unfrozen after the model was wrapped, and would not be averaged",
                hint="set requires_grad before tonnage.DataParallel(model)",
            )
        self._announce("forward", synchronising=self._schedule.synchronising)
        self._open_forward()

    def _open_forward(self) -> None:
        self._schedule.end_last_update()
        if self._tuner is not None and self._log.between_steps and not self._joining:
            self._tune(self._tuner)
            self._warn_of_waiting(self._tuner)
        self._schedule.begin_forward()
        if self._broadcast_buffers and self._schedule.synchronising:
            self._hand_out(list(self.module.buffers()), "buffer", step=self._log.step)

    def optimizer(
        self, kind: Callable[..., torch.optim.Optimizer], params: Any = None, **settings: Any
    ) -> torch.optim.Optimizer:
        """The optimizer ``kind(params, **settings)`` for this model.

        Args:
            kind: a class such as ``torch.optim.AdamW``.
            params: parameters or groups of them, of this model; all by default.
            settings: its other arguments.

        Raises:
            EngineError: the schedule shards, and ``kind`` can't work on parts of a parameter.
        """
        params = list(self._trained if params is None else params)
        if self._schedule.sharded:
            self._optimizer = ShardedOptimizer(
                params,
                kind,
                settings,
                transport=self._transport,
                names=[spec.name for spec in self._specs],
                parameters=self._trained,
                buckets=self._buckets,
                buffers=self._memory,
                schedule=self._schedule,
                compression=self._compression,
                laid_out=self._laid_out,
            )
        else:
            self._optimizer = WholeOptimizer(
                params,
                kind,
                settings,
                names=[spec.name for spec in self._specs],
                parameters=self._trained,
                schedule=self._schedule,
                transport=self._transport,
                compression=self._compression,
            )
        self._schedule.has_optimizer = True
        return self._optimizer

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within only add to this rank's gradients; the next one outside sends them."""
        before = self._schedule.synchronising
        self._schedule.synchronising = False
        try:
            yield
        finally:
            self._schedule.synchronising = before

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Train within on as many batches as this rank has, which may differ from the others' number.

        A rank that leaves early takes part in the others' steps with gradients of zero, so that the mean is
        over all ranks, as of DDP's ``join()``; unlike there, its optimizer steps with the others, and all are
        alike afterwards. Step learning rate schedulers outside, or by hand on the ranks that left early.

        Raises:
            EngineError: the model has no optimizer yet, or ranks that have data do different things.
        """
        if self._optimizer is None:
            raise EngineError(
                "join() on a model without an optimizer of the engine's, which all ranks step together",
                hint="optimizer = model.optimizer(torch.optim.AdamW, lr=…) first",
            )
        self._joining = True
        self._schedule.before_update = lambda: self._announce("step")
        self._schedule.observer = None
        try:
            yield
            self._schedule.before_update = None
            self._follow()
        finally:
            self._joining = False
            self._schedule.before_update = None
        if self._tuner is not None:
            self._tuner.postpone(self._log.step)

    def _announce(self, what: Literal["forward", "clip", "step"], **more: Any) -> None:
        if not self._joining:
            return
        assert self._optimizer is not None
        settings = [] if what == "clip" else plain_settings(self._optimizer.group_settings())
        mine = Announcement(what=what, settings=settings, **more)
        announce(self._transport, mine, self._memory[0].gradient.device)

    def _follow(self) -> None:
        """Do what the ranks do that still have data."""
        optimizer = self._optimizer
        assert optimizer is not None
        while (told := announce(self._transport, None, self._memory[0].gradient.device)) is not None:
            take_settings(optimizer.param_groups, told.settings or plain_settings(optimizer.group_settings()))
            if told.what == "clip":
                self._clip_grad_norm(told.max_norm)
            elif told.what == "step":
                optimizer.step()
                optimizer.zero_grad()
            elif told.synchronising:
                self._open_forward()
                self._schedule.end_forward()
                self._schedule.contribute()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``; returns the norm.

        Call it between ``backward()`` and ``step()``. It waits for all gradients, so that none of
        their transfers hides under the optimizer.
        """
        self._announce("clip", max_norm=float(max_norm))
        return self._clip_grad_norm(max_norm)

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        if not isinstance(self._optimizer, ShardedOptimizer):
            return torch.nn.utils.clip_grad_norm_(self._trained, max_norm)
        gradients = self._optimizer.averaged_gradients("clip_grad_norm_")
        device = self._memory[0].gradient.device
        squares = torch.zeros(1, dtype=torch.float64, device=device)
        for gradient in gradients:
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        total = self._transport.exchange(squares).sum().sqrt().float()
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
        return total

    def _take_parameters(self, *_: object) -> None:
        if self._compression is not None:
            self._compression.take_parameters(self._memory)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; see the optimizer's method of the same name."""
        if not set_to_none:
            self._schedule.wait_writable()
        super().zero_grad(set_to_none)

    # What reads parameters outside a forward pass gets whole ones.

    def wait(self) -> None:
        """Every parameter is whole and current when this returns."""
        self._schedule.wait_gathers()

    def drain(self) -> None:
        """Everything under way has ended, both ways; until the next forward pass no step runs."""
        self._schedule.finish()
        self._log.pause()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module, after :meth:`wait`."""
        if "_schedule" in self.__dict__:
            self.wait()
        return super().named_parameters(*args, **kwargs)

    # Laying out buckets.

    def _new_compression(self) -> Compression | None:
        if self._compress is None:
            return None
        return Compression(
            self._compress,
            buckets=self._buckets,
            shapes=[p.shape for p in self._trained],
            dtypes=self._dtypes(),
            rank=self._transport.rank,
            sharded=self._sharded,
            device=_compressing(self._trained[0].device),
        )

    def _new_memory(self) -> list[Buffers]:
        """Memory of all buckets, made known to the transport; the parameters move into it if they are sharded."""
        memory = _allocate(self._buckets, self._trained, sharded=self._sharded)
        for own, dtype, each in zip(self._buckets, self._dtypes(), memory, strict=True):
            if self._compression is not None:
                each.packing = self._compression.packing(own, dtype)
            self._transport.add_bucket(each)
        # A rank that is ahead must not send into buckets that another has yet to lay out.
        self._transport.exchange(torch.zeros(1, device=self._trained[0].device))
        return memory

    def _dtypes(self) -> list[torch.dtype]:
        return [self._trained[bucket.slots[0].index].dtype for bucket in self._buckets]

    def _warn_of_waiting(self, tuner: Tuner) -> None:
        """Once for each tuning, and by one rank."""
        if self._transport.rank or not tuner.tunings or self._warned_of is tuner.tunings[-1]:
            return
        said = waits_more_than_predicted(tuner.tunings[-1], self._log.recent)
        if said:
            self._warned_of = tuner.tunings[-1]
            _LOG.warning(said)

    def _new_tuner(self, schedule: ScheduleName, *, cut: bool, codec: bool) -> Tuner | None:
        # PowerSGD's work depends on the shapes in a bucket, which no line over bytes tells.
        codecs = AUTO_CODECS if codec and self._trained[0].device.type == "cpu" else ()
        if self._transport.world_size == 1 or not (cut or codecs) or is_power(self._compress):
            return None
        return Tuner(
            self._transport,
            self._specs,
            schedule,
            cut=cut,
            codecs=codecs,
            packing=self._probe_packing,
        )

    def _probe_packing(self, compress: str | None, numel: int) -> Packing | None:
        if compress is None:
            return None
        parameter = self._trained[0]
        return probe_packing(
            compress,
            parameter.dtype,
            numel=numel,
            world_size=self._transport.world_size,
            sharded=self._sharded,
            device=parameter.device,
        )

    def _tune(self, tuner: Tuner) -> None:
        """Between two steps: observe the one that begins, or choose buckets by what was seen."""
        step = self._log.step
        if tuner.due(step):
            self._schedule.observer = None
            self._choose(tuner, step)
        self._schedule.observer = tuner.watch(step)

    def _choose(self, tuner: Tuner, step: int) -> None:
        self.drain()
        begun, sent = self._transport.stamp(), self._transport.sent_nbytes
        step_seconds = self._log.last_seconds()
        self._transport.clear_buckets()
        largest = max(self._memory, key=lambda each: each.gradient.numel()).gradient
        tuning = tuner.choose(step, self._buckets, self._compress, values=largest, step_seconds=step_seconds)
        if tuning is None or not tuning.changed:
            for each in self._memory:
                self._transport.add_bucket(each)
            self._transport.exchange(torch.zeros(1, device=largest.device))
        else:
            del largest
            self._lay_out(tuning.boundaries, tuning.compress)
        self._log.tuned(self._transport.sent_nbytes - sent, begun, self._transport.stamp(), step=-1)

    def _lay_out(self, boundaries: Sequence[int], compress: str | None) -> None:
        """Move everything into other buckets; the transport has none, and nothing is under way."""
        old = self._compression
        world_size = self._transport.world_size
        self._buckets = buckets_at(self._specs, boundaries, world_size=world_size)
        check_agreed(self._transport, plan_hash(self._buckets), self._trained[0].device)
        self._compress = compress
        self._compression = self._new_compression()
        self._memory = []  # what lay there is freed as soon as its parameters have moved on
        self._memory = self._new_memory()
        self._schedule.lay_out(self._buckets, self._memory)
        exact: list[torch.Tensor] = []
        if old is not None:
            exact = old.exact_shards(self._transport, self._buckets)
        if self._compression is not None:
            self._take_parameters()
            if old is not None:
                self._compression.carry(old, self._transport)
        elif exact:
            hand_on(self._transport, exact, self._memory)
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.move_to(self._buckets, self._memory, self._compression, self._transport)
        elif isinstance(self._optimizer, WholeOptimizer):
            self._optimizer.compression = self._compression

    @contextlib.contextmanager
    def _laid_out(self, boundaries: Sequence[int], compress: str | None) -> Iterator[None]:
        """Within, buckets are cut like that; afterwards as before, except for what ``"auto"`` left open."""
        before = boundaries_of(self._buckets), self._compress
        self._change_to(boundaries, compress)
        yield
        auto_cut, auto_codec = self._auto
        self._change_to(boundaries if auto_cut else before[0], compress if auto_codec else before[1])

    def _change_to(self, boundaries: Sequence[int], compress: str | None) -> None:
        if (list(boundaries), compress) == (boundaries_of(self._buckets), self._compress):
            return
        self.drain()
        self._transport.clear_buckets()
        self._lay_out(boundaries, compress)

    # What was measured.

    def ledger(self, facts: Mapping[str, Any] | None = None) -> Ledger | None:
        """The ledger of all ranks on rank 0, ``None`` elsewhere. All ranks must call it together."""
        self.drain()
        shape: dict[str, Any] = {
            "world_size": self._transport.world_size,
            "num_params": sum(p.numel() for p in self._trained),
        }
        if self._compression is not None:
            shape["compress"] = self._compression.name
        if self._tuner is not None and self._tuner.tunings:
            shape["tuning"] = [each.facts() for each in self._tuner.tunings]
            shape["notes"] = [each.text() for each in self._tuner.tunings]
        own = self._log.ledger({"run": "tonnage", **shape, **dict(facts or {})})
        parts = self._transport.gather_bytes(to_bytes(own))
        return None if parts is None else Ledger.gather([from_bytes(part) for part in parts])

    def explain(self) -> str:
        """What bounds this rank now, in words: where a step's time goes, why, and what to change."""
        self.drain()
        tunings = self._tuner.tunings if self._tuner is not None else []
        return explain(
            self._log.ledger({}),
            schedule=self._schedule_name,
            compress=self._compress,
            tuning=tunings[-1] if tunings else None,
        )

    def save_ledger(self, path: str | Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write :meth:`ledger` to a file, from rank 0. All ranks must call it together."""
        ledger = self.ledger(facts)
        if ledger is not None:
            write_ledger(ledger, path)

    def close(self) -> None:
        """Let transfers end and stop the engine's threads; happens by itself when the process ends."""
        self._close()

    def _hand_out(self, tensors: list[torch.Tensor], kind: str, *, step: int) -> None:
        """Rank 0's values to all ranks, a dtype at a time."""
        if not tensors or self._transport.world_size == 1:
            return
        begun = self._transport.stamp()
        wire = nbytes = 0
        with torch.no_grad():
            for dtype in dict.fromkeys(t.dtype for t in tensors):
                alike = [t.detach() for t in tensors if t.dtype == dtype]
                flat = torch.cat([t.reshape(-1) for t in alike])
                nbytes += flat.nbytes
                wire += self._transport.broadcast([flat])
                for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                    tensor.copy_(part.view(tensor.shape))
        self._log.broadcast(kind, nbytes, wire, begun, self._transport.stamp(), step=step)


def _only_device(named: list[tuple[str, nn.Parameter]]) -> torch.device:
    if not named:
        raise EngineError(
            "the model has no parameter to train", hint="set requires_grad on some before wrapping it"
        )
    devices = {p.device for _, p in named}
    if len(devices) > 1:
        raise EngineError(
            f"the model's parameters lie on {len(devices)} devices: {', '.join(sorted(map(str, devices)))}",
            hint="move the model to one device before wrapping it",
        )
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise EngineError(f"no transport for device {device}", hint="use cpu or cuda")
    return device


def _compressing(device: torch.device) -> torch.device:
    if device.type != "cpu":
        raise EngineError(
            f"no compression for {device.type} tensors yet", hint="leave compress out, or train on CPUs"
        )
    return device


def _allocate(buckets: tuple[Bucket, ...], parameters: list[nn.Parameter], *, sharded: bool) -> list[Buffers]:
    """The flat memory of each bucket; when sharded, the parameters move into it."""
    memory = []
    device = parameters[0].device
    for bucket in buckets:
        dtype = parameters[bucket.slots[0].index].dtype
        buffers = Buffers(
            label=bucket.label,
            gradient=torch.zeros(bucket.numel, dtype=dtype, device=device),
            shard_gradient=torch.zeros(bucket.shard_numel if sharded else 0, dtype=dtype, device=device),
            parameter=torch.zeros(bucket.numel if sharded else 0, dtype=dtype, device=device),
        )
        if sharded:
            for slot in bucket.slots:
                parameter = parameters[slot.index]
                view = like(buffers.parameter, slot.offset, parameter)
                view.copy_(parameter.detach())
                parameter.data = view
        memory.append(buffers)
    return memory


class _Closing:
    """Ends the engine once: when asked to, or when the process ends.

    A rank that leaves while its last parameters are still being sent would break the others, and a
    thread that runs on while the interpreter goes down aborts the process. The model may be gone by
    then, so this holds what it needs.
    """

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        self.closed = False
        self._schedule = schedule
        self._transport = transport
        atexit.register(self._at_exit)

    def __call__(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._schedule.finish()
        self._transport.close()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        lost = isinstance(getattr(sys, "last_value", None), RankFailure)
        try:
            self._schedule.finish()
        except (EngineError, RankFailure):
            lost = True
        if lost:
            # A thread of the process group's that waits for a lost rank can't be called back, and one that
            # comes back while the interpreter goes down aborts it. What went wrong has been told by now.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self._transport.close()
