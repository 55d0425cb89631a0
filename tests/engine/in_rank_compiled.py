"""What the ranks of ``test_compiled.py`` run: models under ``torch.compile``, beside torch's DDP without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from models import WIDTH, features, largest_difference, seeded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tonnage.engine import DataParallel
from tonnage.engine.checkpoint import load_checkpoint, save_checkpoint

_BACKEND = "aot_eager"  # everything of torch.compile but the code generator, whose sums round otherwise


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class _Counting:
    """A backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        backend = torch._dynamo.lookup_backend(_BACKEND)
        return cast("Callable[..., Any]", backend(graph, inputs))


def _compiled(how: str, schedule: str, backend: Any) -> tuple[nn.Module, nn.Module, DataParallel]:
    """The model that is called, the one without wraps, and the wrapper between."""
    net = seeded(_Net)
    inner: Any = net
    if how == "before":
        inner = torch.compile(net, backend=backend)
    elif how == "in place":
        net.compile(backend=backend)
    elif how == "by block":
        for block in cast("nn.ModuleList", net.blocks):
            block.compile(backend=backend)
    elif how == "blocks replaced":
        net.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in net.blocks)
    wrapped = DataParallel(inner, schedule=schedule, bucket=1500)
    called: Any = wrapped
    if how == "after":
        called = torch.compile(wrapped, backend=backend)
    elif how == "after, in place":
        wrapped.compile(backend=backend)
    return called, net, wrapped


def equal_to_ddp(how: str, schedule: str, alone: bool) -> tuple[float, int]:
    """The largest difference, and how many graphs there were.

    Args:
        alone: between two steps, a block of the compiled model is called by itself.
    """
    with warnings.catch_warnings():
        # torch's own look at what a graph is given
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return _beside_ddp(how, schedule, alone)


def _beside_ddp(how: str, schedule: str, alone: bool) -> tuple[float, int]:
    torch._dynamo.reset()
    backend = _Counting()
    model, net, wrapped = _compiled(how, schedule, backend)
    theirs = DistributedDataParallel(seeded(_Net))
    optimizers = (
        wrapped.optimizer(torch.optim.AdamW, lr=1e-2),
        torch.optim.AdamW(theirs.parameters(), lr=1e-2),
    )
    far = 0.0
    for step in range(4):
        x = features(5, dist.get_rank(), step)
        for each, optimizer in zip((model, theirs), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if alone:
            with torch.no_grad():
                mine, other = net.blocks[1](x), theirs.module.blocks[1](x)  # type: ignore[index]
            far = max(far, float((mine - other).abs().max()))
    values = {name.replace("_orig_mod.", ""): value for name, value in net.state_dict().items()}
    plain = _Net()
    plain.load_state_dict(values)
    far = max(far, largest_difference(plain, theirs.module))
    wrapped.close()
    return far, backend.graphs


def carried(folder: str, compiled_first: bool) -> tuple[list[str], float]:
    """Save a model, compiled or not, and load it into one that is the other; its names, and how far it is."""
    found: list[nn.Module] = []
    names: list[str] = []
    for how in ("before", "not") if compiled_first else ("not", "before"):
        _, net, wrapped = _compiled(how, "shard", _BACKEND)
        optimizer = wrapped.optimizer(torch.optim.AdamW, lr=1e-2)
        if not found:
            with torch.no_grad():
                net.first.weight.add_(1.0)  # type: ignore[union-attr, operator]
            save_checkpoint(folder, wrapped, optimizer)
        else:
            load_checkpoint(folder, wrapped, optimizer)
        found.append(net)
        names = [spec.name for spec in wrapped._specs]
        wrapped.close()
    return names, largest_difference(found[0], found[1])
