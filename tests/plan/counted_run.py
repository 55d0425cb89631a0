"""Real training steps on gloo ranks that count what their collectives carry; a script, run once a rank.

Prints one JSON line on rank 0: for each case the bytes that a rank sends, by collective, from the sizes of
the tensors that reach the process group.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

HIDDEN, VOCAB, HEADS, LAYERS, SEQ, MICRO = 64, 1024, 4, 3, 16, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Head by head, so that a rank of tensor parallelism holds whole heads.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, HIDDEN // HEADS)).transpose(1, 3).unbind(1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN, bias=False), nn.LayerNorm(HIDDEN, bias=False)
        self.attn = Attention()
        self.up, self.down = (
            nn.Linear(HIDDEN, 4 * HIDDEN, bias=False),
            nn.Linear(4 * HIDDEN, HIDDEN, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


SENT: Counter[str] = Counter()


class Counting(TorchDispatchMode):
    """Sees every collective on its way to the process group."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, n = str(func), dist.get_world_size()
        if "c10d.allreduce_" in name:
            SENT["all-reduce"] += 2 * (n - 1) * sum(each.nbytes for each in args[0]) // n
        elif "c10d_functional.all_reduce" in name:
            SENT["all-reduce"] += 2 * (n - 1) * args[0].nbytes // n
        elif "c10d._allgather_base_" in name:
            SENT["all-gather"] += (n - 1) * args[0].nbytes // n
        elif "c10d._reduce_scatter_base_" in name:
            SENT["reduce-scatter"] += (n - 1) * args[1].nbytes // n
        return func(*args, **(kwargs or {}))


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (MICRO, SEQ))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(tokens()).float().square().mean()


def data_parallel(model: nn.Module) -> None:
    wrapped = nn.parallel.DistributedDataParallel(model)

    # The default reduction runs in C++, out of sight of the mode; this one does the same from Python.
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch refuses annotations kept as text
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, hook)
    with Counting():
        loss_of(wrapped).backward()


def zero_1(model: nn.Module) -> None:
    loss_of(model).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    own = torch.empty(len(flat) // dist.get_world_size())
    with Counting():
        dist.reduce_scatter_tensor(own, flat)
        weights = torch.empty(len(flat), dtype=torch.bfloat16)
        dist.all_gather_into_tensor(weights, own.to(torch.bfloat16))


def fully_sharded(model: nn.Module, *, free: bool, passes: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.embed, *model.blocks, model.head):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    with Counting():
        for _ in range(passes):
            loss_of(model).backward()


def tensor_parallel(model: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model.to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    column, row = ColwiseParallel(), RowwiseParallel()
    for block in model.blocks:
        parallelize_module(block, mesh, {"attn.qkv": column, "attn.out": row, "up": column, "down": row})
    x = torch.randn(MICRO, SEQ, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with Counting():
        y = x
        for block in model.blocks:
            y = block(y)
        y.float().square().mean().backward()


CASES: dict[str, Callable[[nn.Module], None]] = {
    "dp": data_parallel,
    "zero-1": zero_1,
    "zero-2": lambda model: fully_sharded(model, free=False, passes=1),
    "zero-3": lambda model: fully_sharded(model, free=True, passes=2),
    "tp": tensor_parallel,
}


def main() -> None:
    # Through a file: a free port that is asked for first may be somebody else's when the ranks bind it.
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size)
    found = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        SENT.clear()
        case(Decoder())
        found[name] = dict(SENT)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
