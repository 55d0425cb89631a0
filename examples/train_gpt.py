"""Train a small byte-level GPT on Python's own library source, data-parallel.

    python examples/train_gpt.py --steps 20                              # one process
    torchrun --nproc-per-node 4 examples/train_gpt.py --steps 20         # four
    torchrun --nproc-per-node 4 examples/train_gpt.py --steps 20 --ddp   # the same with torch DDP
    mpirun -n 4 python examples/train_gpt.py --steps 20                  # Open MPI starts them
    srun -n 4 python examples/train_gpt.py --steps 20                    # Slurm does

Two lines differ from a script for DistributedDataParallel: those marked (1) and (2).
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tonnage

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 256, 4, 4, 128, 4


class Block(nn.Module):
    """Causal attention and an MLP, each added to what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As ``x``: (batch, seq, width)."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Next-byte logits; 3.3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq, 256) from bytes (batch, seq)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.position(places))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ddp", action="store_true", help="torch DistributedDataParallel instead")
    parser.add_argument("--ledger", default="run.ledger", help="where to write what was measured")
    parser.add_argument("--weights", help="where to write the trained weights")
    args = parser.parse_args()

    job = tonnage.init_process_group()  # from the environment of torchrun, mpirun or srun
    device, rank = job.device, job.rank
    if args.ddp and not dist.is_initialized():
        parser.error("--ddp needs several processes: start it with torchrun")

    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    sampler = torch.Generator().manual_seed(1000 + rank)  # every rank reads its own windows

    torch.manual_seed(7)
    model = Gpt().to(device)
    if args.ddp:
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        model = tonnage.DataParallel(model)  # (1)
        optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)  # (2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    for step in range(args.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=sampler).tolist()
        windows = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).long().to(device)
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)

    if args.weights and rank == 0:
        torch.save(model.module.state_dict(), args.weights)
    if not args.ddp:
        model.save_ledger(args.ledger)  # every rank calls it; rank 0 writes
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
