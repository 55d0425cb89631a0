"""Lightning over the engine: the one changed line is marked (1).

python examples/train_lightning.py --devices 2           # Lightning starts the processes
python examples/train_lightning.py --devices 2 --ddp     # the same with torch DDP
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tonnage.engine.integrations.lightning import Strategy

CONTEXT = 16


class NextByte(lightning.LightningModule):
    """Tells the byte that follows 16 others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(256, 64), nn.Flatten(), nn.Linear(64 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """The loss on one batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.global_rank == 0 and self.trainer.is_last_batch:
            print(f"epoch {self.current_epoch}  loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW with a short warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4, help="at which to end")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--ddp", action="store_true", help="torch DistributedDataParallel instead")
    parser.add_argument("--checkpoint", default="lightning.ckpt", help="where to write it")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    args = parser.parse_args()

    source = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    windows = torch.frombuffer(bytearray(source), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 100)
    loader = DataLoader(TensorDataset(windows[:, :-1], windows[:, -1]), batch_size=32, shuffle=True)
    lightning.seed_everything(7, verbose=False)
    trainer = lightning.Trainer(
        strategy="ddp" if args.ddp else Strategy(),  # (1)
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(NextByte(), loader, ckpt_path=args.resume)
    trainer.save_checkpoint(args.checkpoint)


if __name__ == "__main__":
    main()
