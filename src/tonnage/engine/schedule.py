"""When each bucket moves: the state of one training step.

Three schedules. ``allreduce``: a bucket's gradients are averaged on every rank, hidden under the rest of
the backward pass, all done when ``backward()`` returns. ``shard``: under the backward pass each rank
averages only its shard (reduce-scatter); the optimizer updates that shard; the new parameters travel
back (all-gather) under the *next* forward pass, each module waiting just before it runs, and only for
its own buckets. ``early``: the same, but a shard is updated and handed on as soon as its gradients are
there, still under the backward pass, so that a link's both directions have work all the time; then
nothing may come between ``backward()`` and ``step()``.

Two guarantees hold in both, whatever is late:

1. A bucket leaves when the last of its gradients has been written, never before.
2. What a transfer delivers is read only when it has ended: gradients by the optimizer, parameters by
   a module's forward.

This is the only module that knows of autograd's hooks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from tonnage.engine.bucket import Bucket
from tonnage.engine.check import Check
from tonnage.engine.record import StepLog
from tonnage.engine.transport import Buffers, Ticket, Transport
from tonnage.errors import EngineError

ScheduleName = Literal["shard", "early", "allreduce"]


class Updater(Protocol):
    """What the ``early`` schedule asks of the optimizer."""

    def sample(self) -> None:
        """The settings as they are now hold for this step."""
        ...

    def update(self, index: int) -> None:
        """Update the own shard of this bucket; runs on the transport's thread."""
        ...


class Observer(Protocol):
    """Who is told how computation goes; called at every module and gradient, so it must be quick."""

    def begin_forward(self) -> None:
        """A forward pass begins."""
        ...

    def reached(self) -> None:
        """A module that reads trained parameters is about to wait for them."""
        ...

    def begins(self, reads: frozenset[int]) -> None:
        """It has them, and computes."""
        ...

    def end_forward(self) -> None:
        """The forward pass has ended."""
        ...

    def gradient(self, index: int) -> None:
        """This parameter's gradient is written."""
        ...


class Schedule:
    """Drives the transport from autograd's hooks.

    Args:
        module: the user's model.
        names: names of the trained parameters, in order of registration.
        parameters: the trained parameters themselves, in the same order.
        buckets: how they are cut.
        buffers: each bucket's memory.
        transport: what moves them.
        log: what is told of it.
        name: which schedule.
        find_unused: whether parameters may stay without a gradient.
        check: watches every step, for whoever debugs.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        buffers: Sequence[Buffers],
        transport: Transport,
        log: StepLog,
        *,
        name: ScheduleName,
        find_unused: bool,
        check: Check | None = None,
    ) -> None:
        self.sharded = name != "allreduce"
        self.early = name == "early"
        self.synchronising = True
        self.has_optimizer = False
        self.updater: Updater | None = None
        self.updates_pending = False
        self.before_update: Callable[[], None] | None = None
        self.unused: frozenset[int] = frozenset()
        self._names = names
        self._parameters = parameters
        self._transport = transport
        self._log = log
        self._find_unused = find_unused
        self._check = check
        self._in_order = transport.ordered or not self.sharded
        self._fired: set[int] = set()
        self._in_backward = False
        self._end_is_queued = False
        self._accumulated = False
        self._armed = False
        self._reductions: dict[int, Ticket] = {}
        self._unsent: list[Ticket] = []
        self._gathers: dict[int, Ticket] = {}
        self._last_gathers: dict[int, Ticket] = {}
        self._hooks: list[_ModuleHook] = []
        self._called: list[_ModuleHook] = []
        self._learnt = False
        self.observer: Observer | None = None
        self._add_hooks(module)
        self.lay_out(buckets, buffers)

    def lay_out(self, buckets: Sequence[Bucket], buffers: Sequence[Buffers]) -> None:
        """Work on these buckets from now on; only after :meth:`finish`, between two steps.

        Gradients that are there move over.
        """
        self._buckets = buckets
        self._buffers = buffers
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(self._parameters)
        self._bucket_of = [0] * len(self._parameters)
        for bucket, memory in zip(buckets, buffers, strict=True):
            for slot in bucket.slots:
                parameter = self._parameters[slot.index]
                self._views[slot.index] = like(memory.gradient, slot.offset, parameter)
                self._bucket_of[slot.index] = bucket.index
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view
        self._missing = [len(bucket.slots) for bucket in buckets]
        self._left = [False] * len(buckets)
        self._next_in_order = 0
        self._versions: list[int] = []
        self._reductions.clear()
        self._gathers.clear()
        self._last_gathers.clear()
        self._priority = [len(buckets) - 1 - k for k in range(len(buckets))]
        for hook in self._hooks:
            hook.buckets = tuple(sorted({self._bucket_of[i] for i in hook.reads}))
        if self._learnt:
            self._order_by_need()

    # Forward.

    def end_last_update(self) -> None:
        """Where somebody else's optimizer steps, or the step was skipped, it ends with the next forward pass."""
        if self._reductions and not self.updates_pending:
            self.end_update()

    def begin_forward(self) -> None:
        """A training forward pass begins."""
        if self.updates_pending:
            raise EngineError(
                "a forward pass without optimizer.step() after the last backward pass, whose gradients "
                "have been applied already",
                hint="schedule='shard' lets you skip or change a step after backward()",
            )
        self._log.begin_step()
        if self.observer is not None:
            self.observer.begin_forward()
        self._armed = True
        self._end_is_queued = False
        if self._check is not None:
            self.wait_gathers()
            self._check.agree(self._parameters, self._names)
        self._log.begin_compute("forward")

    def end_forward(self, output: object = None) -> None:
        """The forward pass has ended; the loss and the backward pass follow.

        Reentrant checkpointing runs backward passes of its own inside, and a callback that is queued there is
        called at the end of such a part. The gradient of the output is the first of the whole.
        """
        for tensor in _tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._queue_end)
        if self.sharded and not self._learnt:
            self._learn()
        if self.observer is not None:
            self.observer.end_forward()
        self._log.begin_compute("backward")
        self.wait_writable()
        if self._check is not None:
            for view, parameter in zip(self._views, self._parameters, strict=True):
                if parameter.grad is None:  # to be written, and read by nobody before
                    view.fill_(torch.nan)

    def wait_writable(self) -> None:
        """Gradient buckets may be written: what was in them has left, and the own part was added up."""
        for ticket in self._unsent:
            self._transport.wait_sent(ticket)
            self._receive(ticket)
        self._unsent.clear()

    def before_module(self, hook: _ModuleHook) -> None:
        """A module that reads parameters of ``hook.buckets`` is about to run."""
        if not self._learnt and hook not in self._called:
            self._called.append(hook)
        observer = self.observer if hook.reads else None
        if observer is not None:
            observer.reached()
        if self._gathers:
            for index in hook.buckets:
                ticket = self._gathers.pop(index, None)
                if ticket is not None:
                    self._receive(ticket)
        if observer is not None:
            observer.begins(hook.reads)

    def wait_gathers(self, *_: object) -> None:
        """All parameters are whole and current when this returns."""
        for index in sorted(self._gathers, key=lambda k: self._priority[k]):
            self._receive(self._gathers.pop(index))

    # Backward.

    def on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Autograd has written this parameter's gradient."""
        if not self._in_backward:
            self._begin_backward()
        self._keep_in_bucket(index, parameter)
        bucket = self._bucket_of[index]
        self._transport.wrote(bucket)
        self._fired.add(index)
        if self.observer is not None:
            self.observer.gradient(index)
        if not self.synchronising:
            return
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self._send_ready(bucket)

    def on_backward_end(self) -> None:
        """Autograd is done: send what still lacks gradients, and see which were never used."""
        self._in_backward = False
        self._armed = False
        self._accumulated = not self.synchronising
        if not self.synchronising:
            self._fired.clear()
            self._log.end_compute()
            return
        self._fill_unused()
        for bucket in self._buckets:
            if not self._left[bucket.index]:
                self._leave(bucket.index)
        self._log.end_compute()
        if not self.sharded:
            self.wait_writable()  # the user may clip or change gradients from here on
        if self._check is not None:
            self.wait_reductions()
            self._check.averaged(self._buffers)
        self._agree_on_unused()
        if self.early and not self._transport.updates_early:
            self._update_all()
        self._versions = [memory.gradient._version for memory in self._buffers]
        self._missing = [len(bucket.slots) for bucket in self._buckets]
        self._left = [False] * len(self._buckets)
        self._next_in_order = 0
        self._fired.clear()

    # The optimizer's step, called in this order.

    def begin_update(self) -> None:
        """The optimizer is about to read averaged gradients.

        Raises:
            EngineError: there are none, or they were changed after the backward pass.
        """
        if not self._reductions:
            raise EngineError(
                "optimizer.step() without a synchronised backward pass before it",
                hint="call loss.backward() outside no_sync() before optimizer.step()",
            )
        if self.sharded:
            self._check_untouched()
        if self.before_update is not None:
            self.before_update()
        self._log.begin_compute("optimizer")

    def reduced(self, index: int) -> None:
        """Wait until this bucket's averaged gradients may be read and its own shard be written."""
        self._receive(self._reductions[index])
        earlier = self._gathers.pop(index, None)
        if earlier is not None:
            self._receive(earlier)
        earlier = self._last_gathers.pop(index, None)
        if earlier is not None:
            self._transport.wait_sent(earlier)

    def updated(self, index: int) -> None:
        """The own shard of this bucket's parameters is new: hand it to all."""
        ticket = self._transport.start_all_gather(index, self._priority[index])
        self._gathers[index] = self._last_gathers[index] = ticket
        self._log.transfer(ticket)

    def end_update(self) -> None:
        """The step is over."""
        if self._check is not None:
            self.wait_gathers()
            self._check.used(self._buffers)
        self.updates_pending = False
        self._log.end_compute()
        self._reductions.clear()
        self._log.end_step()

    def wait_reductions(self) -> None:
        """All averaged gradients may be read."""
        for ticket in self._reductions.values():
            self._receive(ticket)

    def finish(self) -> None:
        """Everything under way has ended, both ways."""
        self.wait_gathers()
        self.wait_writable()
        for ticket in self._last_gathers.values():
            self._transport.wait_sent(ticket)

    # Below: how.

    def _receive(self, ticket: Ticket) -> None:
        before = len(ticket.exposed)
        self._transport.wait_received(ticket)
        self._log.waited(ticket, before)

    def contribute(self) -> None:
        """A backward pass without data: what was accumulated and not yet sent, else zeros."""
        self._open_backward()
        for view, parameter in zip(self._views, self._parameters, strict=True):
            kept = self._accumulated and parameter.grad is view
            if not kept:
                view.zero_()
                parameter.grad = None if self._find_unused else view
        self.on_backward_end()

    def _begin_backward(self) -> None:
        self._open_backward()
        if not self._end_is_queued:
            _when_backward_ends(self.on_backward_end)

    def _open_backward(self) -> None:
        if self.synchronising and not self._armed:
            raise EngineError(
                "a second backward pass without a forward pass before it",
                hint="add the losses and call backward() once, or run the first ones inside model.no_sync()",
            )
        if self.sharded and not self.has_optimizer:
            raise EngineError(
                "a sharding schedule without its optimizer: each rank would update nothing",
                hint="optimizer = model.optimizer(torch.optim.AdamW, lr=…), or schedule='allreduce'",
            )
        self._in_backward = True
        if self.synchronising:
            self._reductions.clear()
            if self.early:
                assert self.updater is not None
                self.updater.sample()
                self.updates_pending = True

    def _queue_end(self, _: torch.Tensor) -> None:
        if not self._end_is_queued:
            self._end_is_queued = True
            _when_backward_ends(self._end_if_begun)

    def _end_if_begun(self) -> None:
        """``torch.autograd.grad()`` passes through the output, too, and reaches no parameter."""
        self._end_is_queued = False
        if self._in_backward:
            self.on_backward_end()

    def _keep_in_bucket(self, index: int, parameter: torch.Tensor) -> None:
        view, gradient = self._views[index], parameter.grad
        assert gradient is not None
        if gradient is view:
            return
        if gradient.is_sparse:
            raise EngineError(
                f"the gradient of {self._names[index]} is sparse", hint="use nn.Embedding(…, sparse=False)"
            )
        if gradient.requires_grad:
            raise EngineError(
                f"the gradient of {self._names[index]} has a graph of its own",
                hint="call backward() without create_graph=True on a model that tonnage.DataParallel wraps",
            )
        # After zero_grad() autograd hands over memory of its own; from here on it adds into the bucket.
        view.copy_(gradient)
        parameter.grad = view

    def _send_ready(self, bucket: int) -> None:
        if self._left[bucket]:
            raise EngineError(
                f"a gradient of bucket {self._buckets[bucket].label} came after the bucket had left",
                hint="reentrant checkpointing does this: use torch.utils.checkpoint with use_reentrant=False",
            )
        if not self._in_order:
            self._leave(bucket)
            return
        while self._next_in_order < len(self._buckets) and self._missing[self._next_in_order] == 0:
            self._leave(self._next_in_order)
            self._next_in_order += 1

    def _leave(self, index: int) -> None:
        self._left[index] = True
        if self._check is not None:
            self._check.leaves(index, self._buffers[index])
        if not self.sharded:
            ticket = self._transport.start_all_reduce(index)
        else:
            # A bucket that no module asked for: its peers' gradients must not come before its parameters.
            late = self._gathers.pop(index, None)
            if late is not None:
                self._receive(late)
            early = self.early and self._transport.updates_early
            ticket = self._transport.start_reduce_scatter(
                index, self._planned_update(index) if early else None
            )
        self._reductions[index] = ticket
        self._unsent.append(ticket)
        self._log.transfer(ticket)

    def _planned_update(self, index: int) -> Callable[[], None]:
        """What happens to a bucket once its gradients are there; whoever needs it can wait from now on."""
        assert self.updater is not None
        update = self.updater.update
        priority = self._priority[index]
        ticket = self._transport.planned_all_gather(index, priority)
        self._gathers[index] = self._last_gathers[index] = ticket
        self._log.transfer(ticket)

        def then() -> None:
            update(index)
            self._transport.start_all_gather(index, priority, ticket)

        return then

    def _update_all(self) -> None:
        assert self.updater is not None
        for index in range(len(self._buckets)):
            self.reduced(index)
            self.updater.update(index)
            self.updated(index)

    def _fill_unused(self) -> None:
        unused = [
            i for i, p in enumerate(self._parameters) if i not in self._fired and p.grad is not self._views[i]
        ]
        if unused and not self._find_unused:
            named = ", ".join(self._names[i] for i in unused[:3]) + (", …" if len(unused) > 3 else "")
            raise EngineError(
                f"{len(unused)} of {len(self._parameters)} parameters got no gradient: {named}",
                where=f"rank {self._transport.rank}",
                hint="freeze them with requires_grad=False, or pass find_unused_parameters=True",
            )
        for index in unused:
            self._views[index].zero_()
        self.unused = frozenset(unused)

    def _agree_on_unused(self) -> None:
        """A parameter that only some ranks used counts as used, with zeros from the others, as in DDP."""
        if not self._find_unused:
            return
        flags = torch.zeros(len(self._parameters), dtype=torch.uint8, device=self._views[0].device)
        flags[[i for i in range(len(self._parameters)) if i not in self.unused]] = 1
        used = self._transport.exchange(flags).amax(dim=0).tolist()
        self.unused = frozenset(i for i, each in enumerate(used) if not each)
        if not self.sharded:
            for index, parameter in enumerate(self._parameters):
                parameter.grad = None if index in self.unused else self._views[index]

    def _check_untouched(self) -> None:
        for memory, version in zip(self._buffers, self._versions, strict=True):
            if memory.gradient._version != version:
                raise EngineError(
                    f"gradients of bucket {memory.label} were changed after the backward pass, "
                    "but had been sent by then",
                    hint="clip with model.clip_grad_norm_(…), scale with tonnage.GradScaler; "
                    "to change gradients yourself use schedule='allreduce'",
                )

    def _learn(self) -> None:
        """From the first forward pass: which module waits for what, and what goes first from now on.

        Some modules read a child's parameters without calling it (``nn.MultiheadAttention`` its output
        projection): whoever holds such a child, and was called, waits for the child's buckets too.
        """
        by_name = {hook.name: hook for hook in self._hooks}
        for hook in self._hooks:
            holder = hook.name
            while hook.reads and by_name[holder] not in self._called and holder:
                holder = holder.rpartition(".")[0]
            if holder != hook.name:
                by_name[holder].reads |= hook.reads
                by_name[holder].buckets = tuple(sorted({self._bucket_of[i] for i in by_name[holder].reads}))
        self._learnt = True
        self._order_by_need()

    def _order_by_need(self) -> None:
        """What the forward pass reads first goes first."""
        needed = dict.fromkeys(k for hook in self._called for k in hook.buckets)
        order = [*needed, *(k for k in reversed(range(len(self._buckets))) if k not in needed)]
        for place, index in enumerate(order):
            self._priority[index] = place

    def _add_hooks(self, module: nn.Module) -> None:
        on_gradient = torch.compiler.disable(self.on_gradient)
        before_module = torch.compiler.disable(self.before_module)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(Hook(on_gradient, index))
        place = {id(p): i for i, p in enumerate(self._parameters)}
        if not self.sharded:
            return
        compiled: list[str] = []
        for name, each in module.named_modules():
            inside = any(name.startswith(f"{outer}." if outer else "") for outer in compiled)
            whole = not inside and is_compiled(each)
            own = frozenset(place[id(p)] for p in each.parameters(recurse=whole) if id(p) in place)
            hook = _ModuleHook(before_module, name, own, inside=inside)
            self._hooks.append(hook)
            if whole:
                compiled.append(name)
            if whole and each._compiled_call_impl is not None:
                each._compiled_call_impl = _After(hook, each._compiled_call_impl)
            else:
                each.register_forward_pre_hook(hook)
            each.register_state_dict_pre_hook(_Gate(self.wait_gathers))
            each.register_load_state_dict_pre_hook(_Gate(self.wait_gathers))
            # Whoever copies or pickles a module goes through its attributes in order: the gates come first.
            each.__dict__["_parameters"] = each.__dict__.pop("_parameters")


def _when_backward_ends(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _tensors_in(output: object) -> Iterator[torch.Tensor]:
    """The tensors of an output, in containers and dataclasses too (as Hugging Face's are)."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (tensor for each in output.values() for tensor in _tensors_in(each))
    elif isinstance(output, (list, tuple, set)):
        yield from (tensor for each in output for tensor in _tensors_in(each))
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = (getattr(output, field.name) for field in dataclasses.fields(output))
        yield from (tensor for each in fields for tensor in _tensors_in(each))


class Hook:
    """A hook that stays behind when its module is copied or pickled.

    ``copy.deepcopy(model.module)`` for an average of the weights must not copy threads and links.
    """

    def __init__(self, function: Callable[..., None], *first: Any) -> None:
        self._function: Callable[..., None] | None = function
        self._first = first

    def __call__(self, *rest: Any, **_: Any) -> None:
        """Run it, unless it was left behind."""
        if self._function is not None:
            self._function(*self._first, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return _detached(type(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (type(self),)


class _ModuleHook(Hook):
    """Before a module runs; ``reads`` are the parameters that it does, ``buckets`` what they lie in.

    One ``inside`` a compiled module has nothing to do while that runs, which waits for all it reads.
    """

    def __init__(
        self, function: Callable[[_ModuleHook], None], name: str, reads: frozenset[int], *, inside: bool
    ) -> None:
        super().__init__(function)
        self.name = name
        self.inside = inside
        self.reads = reads
        self.buckets: tuple[int, ...] = ()

    def __call__(self, *_: Any, **__: Any) -> None:
        """Run it, unless it was left behind; the module and its inputs don't matter."""
        if self._function is None or (self.inside and torch.compiler.is_compiling()):
            return
        self._function(self)


class _After:
    """What ``module.compile()`` left to be called, after its hook; hooks of its own would be compiled, too."""

    def __init__(self, hook: _ModuleHook, call: Callable[..., Any]) -> None:
        self._hook = hook
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, then run."""
        self._hook()
        return self._call(*args, **kwargs)


class _Gate(Hook):
    """A hook that is waited for when its module is copied or pickled, too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        self()
        return super().__deepcopy__(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        self()
        return super().__reduce__()


def _detached(kind: type[Hook]) -> Hook:
    hook = kind.__new__(kind)
    hook._function, hook._first = None, ()
    return hook


def like(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """The part of ``flat`` from ``offset`` on in the shape of ``parameter``, and its memory format."""
    part = flat[offset : offset + parameter.numel()]
    if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
        return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
    return part.view(parameter.shape)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` made it, or ``module.compile()`` was called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def parameters_of(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Name and value of each trained parameter, tied ones once, in order of registration."""
    return ((plain_name(name), p) for name, p in module.named_parameters() if p.requires_grad)


def plain_name(name: str) -> str:
    """Of a parameter or buffer, without what ``torch.compile(module)`` adds: the same, compiled or not."""
    return name.replace("_orig_mod.", "")
