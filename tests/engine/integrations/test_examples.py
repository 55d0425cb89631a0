"""Each framework's loop over the engine, beside the same loop over torch DDP: the examples, as a user runs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
CLOSE = 2e-5
"""How far weights may lie apart after some ten steps: the norm is added up in another order."""

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def run(folder: Path, *words: str) -> str:
    """What the interpreter printed, run with ``words`` in ``folder``."""
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two models, which have the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def load(path: Path) -> Any:
    """What torch wrote there, on this machine."""
    return torch.load(path, map_location="cpu", weights_only=False)


@needs("accelerate")
def test_accelerate_trains_as_with_ddp_and_goes_on_from_what_either_saved(tmp_path: Path) -> None:
    example = str(EXAMPLES / "train_accelerate.py")
    both = {"ours": (), "ddp": ("--ddp",)}
    for name, words in both.items():
        trained = ("--epochs", "2", "--weights", f"{name}.pt", "--state", f"{name}.state")
        run(tmp_path, *TORCHRUN, "2", example, *trained, *words)
    ours, theirs = load(tmp_path / "ours.pt"), load(tmp_path / "ddp.pt")
    assert furthest(ours, theirs) < CLOSE
    # Weights keep memory of their own: a file of their size, not of the flat buffer behind them.
    assert (tmp_path / "ours.pt").stat().st_size < sum(t.nbytes for t in ours.values()) + 20_000

    # Two ranks go on from what DDP saved, and one, where there is no group at all, from what two of ours did.
    for name, words in (("ddp", (*TORCHRUN, "2")), ("ours", ())):
        went_on = ("--epochs", "1", "--weights", f"{name}-on.pt", "--state", f"{name}.state")
        assert "loss" in run(tmp_path, *words, example, *went_on)
        assert furthest(load(tmp_path / f"{name}-on.pt"), ours) > 1e-3


@needs("lightning")
def test_lightning_trains_as_with_ddp_and_resumes_to_the_same_weights(tmp_path: Path) -> None:
    example = str(EXAMPLES / "train_lightning.py")
    run(tmp_path, example, "--epochs", "2", "--checkpoint", "ours.ckpt")
    run(tmp_path, example, "--epochs", "2", "--checkpoint", "ddp.ckpt", "--ddp")
    ours, theirs = load(tmp_path / "ours.ckpt"), load(tmp_path / "ddp.ckpt")
    assert furthest(ours["state_dict"], theirs["state_dict"]) < CLOSE
    # The optimizer's state in it is whole, though each rank holds a part, and torch's own layout.
    moments = [each["optimizer_states"][0]["state"] for each in (ours, theirs)]
    assert moments[0].keys() == moments[1].keys()
    for name in ("exp_avg", "exp_avg_sq"):
        pair = [{str(k): v[name] for k, v in each.items()} for each in moments]
        assert furthest(pair[0], pair[1]) < CLOSE

    run(tmp_path, example, "--epochs", "1", "--checkpoint", "half.ckpt")
    run(tmp_path, example, "--epochs", "2", "--resume", "half.ckpt", "--checkpoint", "rest.ckpt")
    rest = load(tmp_path / "rest.ckpt")
    assert furthest(rest["state_dict"], ours["state_dict"]) < CLOSE


@needs("transformers")
@needs("accelerate")
def test_the_trainer_trains_as_with_ddp_and_resumes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    example = str(EXAMPLES / "train_transformers.py")
    few = ("--steps", "8", "--save-every", "4")
    ours = run(tmp_path, *TORCHRUN, "2", example, *few, "--out", "ours")
    theirs = run(tmp_path, *TORCHRUN, "2", example, *few, "--out", "ddp", "--ddp")
    assert ours.splitlines()[-1].split()[:2] == theirs.splitlines()[-1].split()[:2] == ["step", "8"]
    weights = {
        name: load_file(tmp_path / name / "model.safetensors")
        for name in ("ours", "ddp", "ours/checkpoint-4")
    }
    assert furthest(weights["ours"], weights["ddp"]) < CLOSE

    newest = tmp_path / "ours" / "checkpoint-8"
    newest.rename(tmp_path / "put-away")
    run(tmp_path, *TORCHRUN, "2", example, *few, "--out", "ours", "--resume")
    resumed = load_file(tmp_path / "ours" / "model.safetensors")
    assert furthest(resumed, weights["ours"]) < CLOSE
    assert furthest(weights["ours/checkpoint-4"], weights["ours"]) > 1e-3


@needs("ray")
@pytest.mark.slow
def test_ray_trains_as_with_ddp(tmp_path: Path) -> None:
    run(tmp_path, str(Path(__file__).with_name("ray_job.py")), str(EXAMPLES), str(tmp_path))
    assert furthest(load(tmp_path / "ours.pt"), load(tmp_path / "ddp.pt")) < CLOSE
    assert (tmp_path / "ours.txt").read_text() == (tmp_path / "ddp.txt").read_text()
