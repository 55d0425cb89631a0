"""Hugging Face's Trainer over the engine: the one changed line is marked (1).

torchrun --nproc-per-node 2 examples/train_transformers.py
torchrun --nproc-per-node 2 examples/train_transformers.py --ddp     # the same with torch DDP
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import transformers

from tonnage.engine.integrations.transformers import Trainer

CONTEXT = 32


def windows() -> list[dict[str, torch.Tensor]]:
    """Bytes of a Python source, each to be told from those before it."""
    source = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    pieces = torch.frombuffer(bytearray(source), dtype=torch.uint8).long().unfold(0, CONTEXT, CONTEXT)
    return [{"input_ids": each, "labels": each} for each in pieces]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ddp", action="store_true", help="torch DistributedDataParallel instead")
    parser.add_argument("--out", default="trained", help="folder for checkpoints and the model")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint there")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    args = parser.parse_args()

    transformers.set_seed(7)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    settings = transformers.TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=3e-3,
        logging_steps=2,
        save_steps=args.save_every,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
    )
    kind = transformers.Trainer if args.ddp else Trainer  # (1)
    trainer = kind(model=transformers.GPT2LMHeadModel(config), args=settings, train_dataset=windows())
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model()
    if trainer.is_world_process_zero():
        for each in trainer.state.log_history:
            if "loss" in each:
                print(f"step {each['step']:3}  loss {float(each['loss']):.4f}", flush=True)


if __name__ == "__main__":
    main()
