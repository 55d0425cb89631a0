"""Hugging Face Accelerate over the engine: the one changed line is marked (1).

accelerate launch --cpu --num_processes 2 examples/train_accelerate.py
torchrun --nproc-per-node 2 examples/train_accelerate.py
torchrun --nproc-per-node 2 examples/train_accelerate.py --ddp     # the same with torch DDP
"""

import argparse
import sysconfig
from pathlib import Path

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tonnage.engine.integrations.accelerate import Accelerator

CONTEXT = 16


def next_bytes() -> TensorDataset:
    """16 bytes of a Python source, and the one that follows."""
    source = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    windows = torch.frombuffer(bytearray(source), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 100)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4, help="to train now")
    parser.add_argument("--ddp", action="store_true", help="torch DistributedDataParallel instead")
    parser.add_argument("--weights", help="where to write the trained weights")
    parser.add_argument("--state", help="folder to save everything in; if it is there, to go on from")
    args = parser.parse_args()

    kind = accelerate.Accelerator if args.ddp else Accelerator  # (1)
    accelerator = kind(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    accelerate.utils.set_seed(7)
    model = nn.Sequential(
        nn.Embedding(256, 64), nn.Flatten(), nn.Linear(64 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
    loader = DataLoader(next_bytes(), batch_size=32, shuffle=True, drop_last=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    if args.state and Path(args.state).exists():
        accelerator.load_state(args.state)

    for epoch in range(args.epochs):
        for tokens, wanted in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(tokens), wanted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}  loss {loss.item():.6f}", flush=True)

    if args.state:
        accelerator.save_state(args.state)
    if args.weights:
        accelerator.wait_for_everyone()
        accelerator.save(accelerator.get_state_dict(model), args.weights)
    accelerator.end_training()


if __name__ == "__main__":
    main()
