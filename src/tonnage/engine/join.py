"""What ranks tell each other within ``join()``, where the data of some ends earlier.

Before whatever needs all ranks (a forward pass to train, clipping, a step) each says what it is about to do. One
whose data has ended does the same, with gradients of zero and with the others' settings, so that every rank's
parameters and optimizer state stay what they would be had its last batches had no gradient.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from tonnage.engine.carry import everybodys
from tonnage.engine.transport import Transport
from tonnage.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a rank that has data is about to do.

    Attributes:
        what: it.
        synchronising: of a forward pass, whether gradients will be averaged after it.
        max_norm: of clipping.
        settings: of a forward pass or a step, each group's learning rate and the like.
    """

    what: Literal["forward", "clip", "step"]
    synchronising: bool = True
    max_norm: float = 0.0
    settings: list[dict[str, Any]] = field(default_factory=list)


def announce(transport: Transport, mine: Announcement | None, device: torch.device) -> Announcement | None:
    """What the ranks that have data are about to do; ``None`` when none has any left. All ranks call it together.

    Raises:
        EngineError: they are about to do different things.
    """
    said = b"" if mine is None else json.dumps(asdict(mine)).encode()
    told = {rank: json.loads(each) for rank, each in enumerate(everybodys(transport, said, device)) if each}
    if not told:
        return None
    first, *others = told
    for rank in others:
        for name in ("what", "synchronising", "max_norm"):
            if told[rank][name] != told[first][name]:
                raise EngineError(
                    f"within join() rank {first} has {name} {told[first][name]!r} and rank {rank} {told[rank][name]!r}",
                    where=f"rank {transport.rank}",
                    hint="ranks that still have data must do the same: accumulate over as many batches, clip alike",
                )
    return Announcement(**told[first])


def plain_settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings of groups that JSON can carry, which are all that change."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    kept = (bool, int, float, str, tuple, type(None))
    return [
        {name: plain(value) for name, value in group.items() if isinstance(plain(value), kept)}
        for group in groups
    ]


def take_settings(groups: Sequence[dict[str, Any]], settings: Sequence[Mapping[str, Any]]) -> None:
    """Give groups the settings of another rank's."""
    for group, told in zip(groups, settings, strict=True):
        for name, value in told.items():
            mine = group.get(name)
            if isinstance(mine, torch.Tensor):
                mine.fill_(value)
            elif name in group:
                group[name] = tuple(value) if isinstance(value, list) else value
