"""Ray Train over the engine: the two changed lines are marked (1) and (2).

python examples/train_ray.py --workers 2           # on this machine, or on a whole Ray cluster
python examples/train_ray.py --workers 2 --ddp     # the same with torch DDP
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import ScalingConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tonnage.engine.integrations.ray import prepare_model

CONTEXT = 16


def train(config: dict[str, Any]) -> None:
    """What each worker does."""
    source = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    windows = torch.frombuffer(bytearray(source), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 7)
    loader = DataLoader(TensorDataset(windows[:, :-1], windows[:, -1]), batch_size=32, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    torch.manual_seed(7)
    model: Any = nn.Sequential(
        nn.Embedding(256, 64), nn.Flatten(), nn.Linear(64 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)
    )
    if config["ddp"]:
        model = ray.train.torch.prepare_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        model = prepare_model(model)  # (1)
        optimizer = model.optimizer(torch.optim.AdamW, lr=3e-3)  # (2)

    first = ray.train.get_context().get_world_rank() == 0
    for step, (tokens, wanted) in zip(range(config["steps"]), loader, strict=False):
        loss = nn.functional.cross_entropy(model(tokens), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ray.train.report({"loss": loss.item()})
        if first and (step % 10 == 0 or step == config["steps"] - 1):
            with Path(config["log"]).open("a") as log:
                print(f"step {step:3}  loss {loss.item():.4f}", file=log)
    if first and config["weights"]:
        torch.save(model.module.state_dict(), config["weights"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ddp", action="store_true", help="torch DistributedDataParallel instead")
    parser.add_argument("--weights", help="where to write the trained weights, an absolute path")
    parser.add_argument("--out", default="ray-results", help="folder for Ray's own results")
    args = parser.parse_args()

    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    config = {"steps": args.steps, "ddp": args.ddp, "weights": args.weights, "log": str(out / "losses.txt")}
    ray.init(include_dashboard=False, num_cpus=args.workers + 1, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(storage_path=str(out)),
    )
    trainer.fit()
    print((out / "losses.txt").read_text(), end="")


if __name__ == "__main__":
    main()
