"""Optimizer state on its way into a checkpoint and out of it, known by parameter name and element range.

So saved, it outlives the buckets and the number of ranks it was saved with. There are two forms:

* a *part*, what one rank holds::

    {"format": …, "rank": 1, "world_size": 4, "boundaries": [3, 9, 17],
     "state": {"layer.weight": {"first": 4096, "numel": 1024, "values": {"exp_avg": …, "step": …}}},
     "param_groups": [{"lr": …}], "compression": {…}}

* the *whole*, as the torch optimizer keeps it that was asked for, with parameters as numbers::

    {"state": {0: {"exp_avg": …, "step": …}}, "param_groups": [{"lr": …, "params": [0, 1]}]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tonnage.engine.schedule import like
from tonnage.errors import EngineError

FORMAT = "tonnage optimizer 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is known of ``numel`` elements of a parameter, from element ``first`` on.

    ``values`` has flat tensors of ``numel`` elements, and numbers that hold for all of them.
    """

    first: int
    numel: int
    values: Mapping[str, Any]


def is_part(state: object) -> bool:
    """Whether it is one rank's part, in this version's form."""
    return isinstance(state, Mapping) and state.get("format") == FORMAT


def is_whole(state: object) -> bool:
    """Whether it is in torch's form."""
    return isinstance(state, Mapping) and "format" not in state and {"state", "param_groups"} <= state.keys()


def pieces_of_parts(parts: Iterable[Mapping[str, Any]]) -> dict[str, list[Piece]]:
    """All pieces that these parts have, by parameter name."""
    found: dict[str, list[Piece]] = {}
    for part in parts:
        for name, each in part["state"].items():
            found.setdefault(name, []).append(
                Piece(first=each["first"], numel=each["numel"], values=each["values"])
            )
    return found


def pieces_of_whole(
    whole: Mapping[str, Any], parameters: Sequence[tuple[str, nn.Parameter] | None]
) -> dict[str, list[Piece]]:
    """The same of a state in torch's form.

    Args:
        whole: the state.
        parameters: name and value by their number in it; ``None`` for one that is not trained.

    Raises:
        EngineError: it has another number of parameters, or values of another shape.
    """
    numbers = [number for group in whole["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        raise EngineError(
            f"the optimizer state has {len(numbers)} parameters, this optimizer {len(parameters)}",
            hint="load the state of the same model, with the same parameter groups",
        )
    found: dict[str, list[Piece]] = {}
    for number, each in zip(numbers, parameters, strict=True):
        values = whole["state"].get(number)
        if each is None or values is None:
            continue
        name, parameter = each
        for kind, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                raise EngineError(
                    f"the optimizer state has {kind} of shape {tuple(value.shape)} for {name}, "
                    f"which has shape {tuple(parameter.shape)}",
                    hint="load the state of the same model and optimizer",
                )
        found[name] = [Piece(first=0, numel=parameter.numel(), values=flat(values, parameter))]
    return found


def filled(name: str, first: int, like: torch.Tensor, pieces: Sequence[Piece]) -> dict[str, Any]:
    """What is known of some elements, put together.

    Args:
        name: of the parameter, for errors.
        first: element that they begin with.
        like: flat, as many elements; its device is where tensors go.
        pieces: all that were saved of the parameter; none if its optimizer had seen no step.

    Raises:
        EngineError: the pieces leave elements out.
    """
    wanted = range(first, first + like.numel())
    state: dict[str, Any] = {}
    covered = 0
    for piece in pieces:
        low, high = max(first, piece.first), min(wanted.stop, piece.first + piece.numel)
        if low >= high:
            continue
        covered += high - low
        for kind, value in piece.values.items():
            if isinstance(value, torch.Tensor) and value.dim():
                target = state.setdefault(
                    kind, torch.zeros(like.shape, dtype=value.dtype, device=like.device)
                )
                target[low - first : high - first] = value[low - piece.first : high - piece.first]
            elif kind not in state:
                state[kind] = value.clone() if isinstance(value, torch.Tensor) else value
    if pieces and covered < len(wanted):
        raise EngineError(
            f"the optimizer state given has {covered} of elements {first} to {wanted.stop} of {name}",
            hint="load a list of the parts of all ranks that saved it, or one made by full_state_dict()",
        )
    return state


def shaped(values: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Values that lie flat in the shape of their parameter."""
    return {
        kind: like(value, 0, parameter).clone() if _is_flat(value, parameter) else value
        for kind, value in values.items()
    }


def flat(values: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """As the engine lays parameters out, which for channels-last ones is not their order of elements."""
    found = {}
    for kind, value in values.items():
        found[kind] = value
        # A parameter of no dimension has state without one too, and so has the count of steps of any.
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and kind != "step":
            flat = torch.empty(parameter.numel(), dtype=value.dtype, device=value.device)
            like(flat, 0, parameter).copy_(value)
            found[kind] = flat
    return found


def _is_flat(value: object, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (parameter.numel(),)


def channels_last(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> list[str]:
    """The parameters whose elements lie in that order, in buckets and so in flat state."""
    return [
        name
        for name, p in zip(names, parameters, strict=True)
        if p.dim() == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
    ]


def check_layout(saved: Sequence[str], here: Sequence[str]) -> None:
    """Elements lie in the order that they were saved in.

    Raises:
        EngineError: some don't.
    """
    odd = sorted(set(saved) ^ set(here))
    if odd:
        raise EngineError(
            f"the optimizer state was saved with another memory format of {', '.join(odd[:3])}",
            hint="bring the model to the memory format it was saved in, such as channels_last, before wrapping it",
        )
