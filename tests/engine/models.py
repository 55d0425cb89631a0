"""Models and batches that the cases train, small and with every kind of layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 12


class Mixed(nn.Module):
    """An embedding tied to the head, a layer norm, convolutions and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.up = nn.Linear(3 * WIDTH, 40)
        self.down = nn.Linear(40, WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.frozen(self.embed(tokens))
        y = self.conv(x.view(-1, 1, 3, WIDTH // 3)).flatten(1)
        return self.head(self.norm(self.down(F.gelu(self.up(y)))))


def tokens(seed: int, rank: int, step: int, batch: int = 5) -> torch.Tensor:
    """The batch of this rank and step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank * 1009 + step)
    return torch.randint(0, 16, (batch,), generator=generator)


def features(seed: int, rank: int, step: int, batch: int = 5) -> torch.Tensor:
    """The same for models of :func:`perceptron`'s kind."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank * 1009 + step)
    return torch.randn(batch, WIDTH, generator=generator)


def perceptron(depth: int = 4, width: int = 24) -> nn.Sequential:
    """Linear layers with norms between them."""
    layers: list[nn.Module] = [nn.Linear(WIDTH, width)]
    for _ in range(depth - 2):
        layers += [nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Linear(width, WIDTH))


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same model in every process."""
    torch.manual_seed(seed)
    return make()


class Step(nn.Module):
    """One layer of :class:`Stack`: its own dtype, applied to and added to what comes in."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        made: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 50), nn.Tanh(), nn.Linear(50, WIDTH, bias=False)),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "conv1d": lambda: nn.Conv1d(1, 1, 3, padding=1),
            "conv2d": lambda: nn.Conv2d(1, 4, 3, padding=1),
            "embedding": lambda: nn.Embedding(7, WIDTH),
        }
        self.layer = made[kind]().to(dtype)
        if kind == "conv2d":
            self.layer = self.layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.dtype)
        if self.kind == "embedding":
            return x + self.layer((x.detach().abs().float().sum(1) * 10).long() % 7)
        if self.kind == "conv1d":
            return x + self.layer(x.unsqueeze(1)).squeeze(1)
        if self.kind == "conv2d":
            return x + self.layer(x.view(-1, 1, 3, WIDTH // 3)).mean(1).flatten(1)
        return x + torch.tanh(self.layer(x))


class Stack(nn.Module):
    """Layers after a description: ``(kind, dtype, frozen, tied)`` each; tied ones share the one before."""

    def __init__(self, layers: Sequence[tuple[str, str, bool, bool]]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.ModuleList()
        for kind, dtype, frozen, tied in layers:
            made = Step(kind, getattr(torch, dtype))
            if tied and len(self.steps):
                made = self.steps[-1]  # type: ignore[assignment]
            elif frozen:
                made.requires_grad_(False)
            self.steps.append(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for step in self.steps:
            x = step(x)
        return x.float()


def twin(model: nn.Module) -> nn.Module:
    """A copy of its own."""
    return copy.deepcopy(model)


def differing(ours: nn.Module, theirs: nn.Module) -> list[str]:
    """Names of parameters and buffers whose bits differ."""
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    return [name for name, value in mine.items() if not torch.equal(value, other[name])]


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Over all parameters and buffers."""
    mine, other = ours.state_dict(), theirs.state_dict()
    return max(float((mine[name].double() - other[name].double()).abs().max()) for name in mine)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
}
