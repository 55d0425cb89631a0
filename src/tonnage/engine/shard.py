"""The optimizer on a shard: each rank updates its part of every bucket, with 1/N of the state.

Within a bucket the own shard is cut at the parameters' borders into *segments*: flat views of the
parameters and of their averaged gradients. An optimizer that treats each element alone computes on
segments just what it would compute on whole parameters.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tonnage.engine.bucket import Bucket, boundaries_of
from tonnage.engine.carry import Segment, carry_state, whole_state
from tonnage.engine.schedule import Schedule
from tonnage.engine.squeeze import Compression
from tonnage.engine.state import (
    FORMAT,
    Piece,
    channels_last,
    check_layout,
    filled,
    is_part,
    is_whole,
    pieces_of_parts,
    pieces_of_whole,
    shaped,
)
from tonnage.engine.transport import Buffers, Packing, Transport
from tonnage.engine.whole import COMPRESSION, EngineOptimizer, loss_of, settings_of, with_compression
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
_NOT_ELEMENTWISE = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


class ShardedOptimizer(EngineOptimizer):
    """One small optimizer a bucket, over this rank's segments of it."""

    def __init__(
        self,
        params: Any,
        make: Callable[..., torch.optim.Optimizer],
        settings: Mapping[str, Any],
        *,
        transport: Transport,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        buffers: Sequence[Buffers],
        schedule: Schedule,
        compression: Compression | None,
        laid_out: Callable[[Sequence[int], str | None], contextlib.AbstractContextManager[None]],
    ) -> None:
        super().__init__(params, make, settings)
        _refuse_unless_elementwise(type(self.template))
        self._schedule = schedule
        self._transport = transport
        self._rank = transport.rank
        self._names = names
        self._parameters = parameters
        self._laid_out = laid_out
        self._numels = {name: p.numel() for name, p in zip(names, parameters, strict=True)}
        place = {id(p): index for index, p in enumerate(parameters)}
        self._order = [place.get(id(p)) for group in self.param_groups for p in group["params"]]
        self._make = make
        self._settings = settings
        self._group_of = _group_of(self.param_groups, parameters)
        self._sampled: list[dict[str, Any]] = []
        self._lay_out(buckets, buffers, compression)
        schedule.updater = self

    def _lay_out(
        self, buckets: Sequence[Bucket], buffers: Sequence[Buffers], compression: Compression | None
    ) -> None:
        self.compression = compression
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
        before, old = self._buckets, self._segments()
        self._lay_out(buckets, buffers, compression)
        carry_state(transport, before, old, self._segments())

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the own shard of each bucket as its gradients arrive, and send it on at once."""
        loss = loss_of(closure)
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
        self._sampled = [settings_of(group) for group in self.param_groups]

    def update(self, index: int) -> None:
        """Update the own shard of bucket ``index``, whose gradients are there."""
        with torch.no_grad():
            self._parts[index].step(self._sampled, self._schedule.unused)

    def _check_settings(self) -> None:
        if self._sampled != [settings_of(group) for group in self.param_groups]:
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

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's gradient scaler asks in its ``step()``, to refuse those that divide whole gradients.

        They have been sent by then, and dividing them leaves no trace in their version counters.
        """
        asking = sys._getframe(1).f_locals.get("self")
        if isinstance(asking, torch.amp.GradScaler) and not getattr(asking, "knows_shards", False):
            raise EngineError(
                "torch's GradScaler with a sharding schedule, whose gradients have been sent by now",
                hint="tonnage.GradScaler, or schedule='allreduce'",
            )
        return False

    def averaged_gradients(self, asking: str) -> list[torch.Tensor]:
        """This rank's parts of the averaged gradients, to be read or changed before ``step()``.

        Waits for all of them, so that none of their transfers hides under the optimizer.

        Args:
            asking: what wants them, for the error.

        Raises:
            EngineError: the schedule is ``early``.
        """
        if self._schedule.early:
            raise EngineError(
                f"{asking} with schedule='early', which has applied the gradients by now",
                hint="schedule='shard' hides all but a sixth of the communication and lets you change gradients",
            )
        self._schedule.wait_reductions()
        return [g for part in self._parts for i, g in part.gradients if i not in self._schedule.unused]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, by parameter name and element range.

        :meth:`load_state_dict` takes it back on the same rank, or all ranks' parts on any number of ranks.
        """
        state = {
            "format": FORMAT,
            "rank": self._rank,
            "world_size": self._transport.world_size,
            "boundaries": boundaries_of(self._buckets),
            "channels_last": self.channels_last(),
            "state": {
                name: {"first": piece.first, "numel": piece.numel, "values": piece.values}
                for name, piece in self.pieces().items()
            },
            "param_groups": self.group_settings(),
        }
        return with_compression(state, self.compression)

    def full_state_dict(self) -> dict[str, Any] | None:
        """The whole state as the torch optimizer keeps it, on rank 0 in the host's memory; ``None`` elsewhere.

        All ranks must call it together. Any number of ranks can load it, and so can the optimizer that was
        asked for, with the bare model.
        """
        self._schedule.wait_gathers()
        state = whole_state(self._transport, self._buckets, self._segments())
        owed = None if self.compression is None else self.compression.gather(self._transport)
        if self._transport.rank:
            return None
        numbers = {index: number for number, index in enumerate(self._order) if index is not None}
        counted = itertools.count()
        groups = [
            {**settings_of(g), "params": [next(counted) for _ in g["params"]]} for g in self.param_groups
        ]
        formed = {numbers[i]: shaped(values, self._parameters[i]) for i, values in state.items()}
        whole: dict[str, Any] = {"state": dict(sorted(formed.items())), "param_groups": groups}
        return whole if owed is None else {**whole, COMPRESSION: owed}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take back what was saved; all ranks must call it together, after loading the model's parameters.

        Args:
            state_dict: what :meth:`state_dict` gave on this rank; a list of what it gave on all ranks of a
                job of any size; or what :meth:`full_state_dict` or a torch optimizer of this kind gave.

        Raises:
            EngineError: it is of other parameters, groups or ranks than this optimizer's.
        """
        self._schedule.wait_gathers()
        parts = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        if len(parts) == 1 and is_part(parts[0]) and parts[0]["world_size"] > 1:
            with self._as_saved(parts[0]):
                self.take(pieces_of_parts(parts), parts[0]["param_groups"], _compressions(parts))
        elif parts and all(is_part(part) for part in parts):
            _check_parts(parts)
            check_layout(parts[0]["channels_last"], self.channels_last())
            self.take(pieces_of_parts(parts), parts[0]["param_groups"], _compressions(parts))
        elif len(parts) == 1 and is_whole(parts[0]):
            known = [None if i is None else (self._names[i], self._parameters[i]) for i in self._order]
            self.take(pieces_of_whole(parts[0], known), parts[0]["param_groups"], _compressions(parts))
        else:
            raise EngineError(
                "this is no optimizer state of this engine or of torch",
                hint="give what optimizer.state_dict() or full_state_dict() returned",
            )

    # What checkpoints ask for.

    @property
    def transport(self) -> Transport:
        """What moves its buckets."""
        return self._transport

    def numel(self, name: str) -> int:
        """Elements of the parameter of that name."""
        return self._numels[name]

    def channels_last(self) -> list[str]:
        """Parameters whose elements lie in that order."""
        return channels_last(self._names, self._parameters)

    def owned(self) -> dict[str, Piece]:
        """What elements of which parameters this rank has the state of."""
        return {
            self._names[s.index]: Piece(first=s.first, numel=s.tensor.numel(), values={})
            for s in self._segments()
        }

    def pieces(self) -> dict[str, Piece]:
        """The state itself, as far as there is any; not a copy."""
        self._schedule.wait_gathers()
        return {
            self._names[s.index]: Piece(first=s.first, numel=s.tensor.numel(), values=dict(s.state()))
            for s in self._segments()
            if s.state()
        }

    def compression_state(self) -> dict[str, Any]:
        """What compression owes; empty without."""
        return {} if self.compression is None else self.compression.state_dict()

    def take(
        self,
        pieces: Mapping[str, Piece | Sequence[Piece]],
        groups: Sequence[Mapping[str, Any]],
        compressions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Go on from these.

        Args:
            pieces: by parameter name.
            groups: settings of each group; parameters in them are passed over.
            compressions: what was owed by this rank, or by all; empty if nothing was.

        Raises:
            EngineError: they are of another model, or leave elements out; nothing has been changed then.
        """
        unknown = sorted(set(pieces) - set(self._names))
        if unknown or len(groups) != len(self.param_groups):
            raise EngineError(
                f"the optimizer state is of another model: it knows {', '.join(unknown[:3])}"
                if unknown
                else f"the optimizer state has {len(groups)} parameter groups, this optimizer {len(self.param_groups)}",
                hint="load it with the model and the parameter groups that it was saved with",
            )
        segments = self._segments()
        ready = []
        for segment in segments:
            name = self._names[segment.index]
            found = pieces.get(name, ())
            ready.append(
                filled(name, segment.first, segment.tensor, [found] if isinstance(found, Piece) else found)
            )
        if self.compression is not None and compressions:
            self.compression.load_state_dict(compressions)
        for segment, state in zip(segments, ready, strict=True):
            segment.optimizer.state.pop(segment.tensor, None)
            if state:
                segment.optimizer.state[segment.tensor] = state
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(settings_of(saved))

    @contextlib.contextmanager
    def _as_saved(self, part: Mapping[str, Any]) -> Iterator[None]:
        """With the buckets of one rank's part, so that this rank owns what it had; all ranks together."""
        here = self._rank, self._transport.world_size
        if (part["rank"], part["world_size"]) != here:
            raise EngineError(
                f"the optimizer state is that of rank {part['rank']} of {part['world_size']}, "
                f"and this is rank {here[0]} of {here[1]}",
                hint="load a list of the parts of all ranks that saved it, or one made by full_state_dict()",
            )
        name = part.get(COMPRESSION, {}).get("name")
        check_layout(part["channels_last"], self.channels_last())
        with self._laid_out(part["boundaries"], name):
            yield

    def _segments(self) -> list[Segment]:
        return [segment for part in self._parts for segment in part.segments()]

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
            make([{**settings_of(groups[g]), "params": by_group[g]} for g in self._groups], **settings)
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


def _compressions(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What the checkpoint owes; one from a training without compression owes nothing."""
    return [state[COMPRESSION] for state in states if COMPRESSION in state]


def _check_parts(parts: Sequence[Mapping[str, Any]]) -> None:
    ranks, sizes = sorted(part["rank"] for part in parts), {part["world_size"] for part in parts}
    if len(sizes) > 1 or ranks != list(range(sizes.pop())):
        raise EngineError(
            f"the optimizer state has the parts of ranks {', '.join(map(str, ranks))} of a job of "
            f"{parts[0]['world_size']}",
            hint="give each part of one job once",
        )


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
