"""What lossy codecs still owe: one flat residual a bucket, which outlives buckets and world sizes.

A rank's residual covers elements ``[start, stop)`` of a bucket: the whole bucket for the gradients that
it sends, its own shard for what it hands on after summing. In a checkpoint it is cut at the parameters'
borders, and each stretch is known by the parameter's name and the elements of it, so that another bucket
plan finds its own.

Gradients are averaged, so what the model is still owed is the *mean* of the ranks' residuals. Loading on
another world size gives every rank that mean: the same is owed, and spread evenly it is smaller on each.
On the same world size each rank takes its own back, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

import torch

from tonnage.engine.bucket import Bucket
from tonnage.errors import EngineError

FORMAT = 1
"""Version of the state's layout."""


class Stretch(TypedDict):
    """Elements of one parameter, from ``start`` on, and what is owed of them."""

    start: int
    values: torch.Tensor


class FeedbackState(TypedDict):
    """What one rank writes into a checkpoint."""

    format: int
    rank: int
    world_size: int
    owed: dict[str, list[Stretch]]


class ErrorFeedback:
    """The residuals of one rank.

    Args:
        buckets: how the gradients are cut.
        rank: this rank.
        device: where the residuals live; 4 bytes an element of what they cover.
        own_shard: cover this rank's shard of each bucket alone, not the whole bucket.
    """

    def __init__(
        self, buckets: Sequence[Bucket], *, rank: int, device: torch.device | str, own_shard: bool = False
    ) -> None:
        self._buckets = buckets
        self._rank = rank
        self._own_shard = own_shard
        self._ranges = [bucket.shard(rank) if own_shard else (0, bucket.numel) for bucket in buckets]
        self._flat = [
            torch.zeros(stop - start, dtype=torch.float32, device=device) for start, stop in self._ranges
        ]

    def residual(self, index: int, start: int, stop: int) -> torch.Tensor:
        """The residual of elements ``[start, stop)`` of bucket ``index``, to be given to a codec."""
        begin, end = self._ranges[index]
        assert begin <= start <= stop <= end
        return self._flat[index][start - begin : stop - begin]

    @property
    def flats(self) -> list[torch.Tensor]:
        """The residuals themselves, one a bucket."""
        return self._flat

    def nbytes(self) -> int:
        """Memory that the residuals take."""
        return sum(flat.nbytes for flat in self._flat)

    def norm(self) -> float:
        """Their 2-norm: one that grows without end says that the codec loses too much."""
        squares = [torch.linalg.vector_norm(flat, dtype=torch.float32).double() ** 2 for flat in self._flat]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def reset(self) -> None:
        """Owe nothing."""
        for flat in self._flat:
            flat.zero_()

    def state_dict(self) -> FeedbackState:
        """This rank's part, by parameter name and element range. Copies, so that training may go on."""
        owed: dict[str, list[Stretch]] = {}
        for name, start, view in self._stretches():
            owed.setdefault(name, []).append({"start": start, "values": view.detach().cpu().clone()})
        return {
            "format": FORMAT,
            "rank": self._rank,
            "world_size": self._buckets[0].world_size if self._buckets else 1,
            "owed": owed,
        }

    def load_state_dict(self, states: Iterable[FeedbackState]) -> None:
        """Take over what was owed when ``states`` were saved.

        Args:
            states: those of all ranks of the job that saved them, in any order; read one after another,
                so they may be opened as they come. On the same world size this rank's own is enough.

        Raises:
            EngineError: a rank's state is missing, or of another format; nothing has been changed then.
        """
        fresh = [torch.zeros_like(flat) for flat in self._flat]
        seen: set[int] = set()
        world_size = 0
        for state in states:
            _check(state, world_size, seen)
            world_size = state["world_size"]
            if self._is_own(state):
                fresh = [torch.zeros_like(flat) for flat in self._flat]
                self._add(state, fresh, 1.0)
                seen = set(range(world_size))
                break
            seen.add(state["rank"])
            # A shard's residual is held by its owner alone: there is no mean to take.
            self._add(state, fresh, 1.0 if self._own_shard else 1.0 / world_size)
        missing = sorted(set(range(world_size)) - seen)
        if missing or not seen:
            raise EngineError(
                f"residuals of ranks {missing} are missing of a job of {world_size}"
                if seen
                else "there is no residual to load",
                hint="give the states of all ranks of the checkpoint; without them what was owed is lost, the model is not",
            )
        for flat, values in zip(self._flat, fresh, strict=True):
            flat.copy_(values)

    def _is_own(self, state: FeedbackState) -> bool:
        same_size = bool(self._buckets) and state["world_size"] == self._buckets[0].world_size
        if not (same_size and state["rank"] == self._rank):
            return False
        if not self._own_shard:
            return True
        # With other buckets the same rank owns other elements.
        kept = {(name, start, len(view)) for name, start, view in self._stretches()}
        return kept == {
            (name, s["start"], len(s["values"])) for name, each in state["owed"].items() for s in each
        }

    def _add(self, state: FeedbackState, into: Sequence[torch.Tensor], factor: float) -> None:
        for name, start, view in self._stretches(into):
            for stretch in state["owed"].get(name, ()):
                low = max(start, stretch["start"])
                high = min(start + len(view), stretch["start"] + len(stretch["values"]))
                if low < high:
                    values = stretch["values"][low - stretch["start"] : high - stretch["start"]]
                    view[low - start : high - start].add_(values.to(view.device), alpha=factor)

    def _stretches(
        self, flat: Sequence[torch.Tensor] | None = None
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Each parameter's name, first element and part of the residual."""
        for bucket, (start, stop), values in zip(
            self._buckets, self._ranges, self._flat if flat is None else flat, strict=True
        ):
            for slot in bucket.slots:
                first, last = slot.within(start, stop)
                if first < last:
                    yield slot.name, first - slot.offset, values[first - start : last - start]


def _check(state: Mapping[str, object], world_size: int, seen: set[int]) -> None:
    if state.get("format") != FORMAT:
        raise EngineError(
            f"residuals of format {state.get('format')!r}, this version reads {FORMAT}",
            hint="go on without them: what was owed is lost, the model is not",
        )
    if world_size and state["world_size"] != world_size:
        raise EngineError(f"residuals of jobs of {world_size} and of {state['world_size']} ranks, mixed")
    if state["rank"] in seen:
        raise EngineError(f"residuals of rank {state['rank']}, twice")
