"""The example's training function twice in the same workers, over the engine and over torch DDP: one start of Ray.

A script: the folder of the examples, and the one to write into.
"""

import sys
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
from ray.train import RunConfig, ScalingConfig


def both(config: dict[str, Any]) -> None:
    """What each worker does."""
    sys.path.insert(0, config["examples"])
    from train_ray import train

    for name in ("ours", "ddp"):
        weights = str(Path(config["out"]) / f"{name}.pt")
        log = str(Path(config["out"]) / f"{name}.txt")
        train({"steps": 8, "ddp": name == "ddp", "weights": weights, "log": log})


if __name__ == "__main__":
    ray.init(include_dashboard=False, num_cpus=3, log_to_driver=False)
    ray.train.torch.TorchTrainer(
        both,
        train_loop_config={"examples": sys.argv[1], "out": sys.argv[2]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[2]),
    ).fit()
