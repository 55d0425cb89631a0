"""The example, run as its docstring says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tonnage.ledger import read_ledger

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

pytestmark = pytest.mark.ranks


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter with ``words`` in ``folder``."""
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    """The losses that the example printed."""
    assert done.returncode == 0, done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("example")


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path) -> list[float]:
    """Losses of two ranks over the engine; leaves ``two.ledger`` in the folder."""
    return losses(python(folder, *TORCHRUN, str(SCRIPT), "--steps", "4", "--ledger", "two.ledger"))


def test_two_changed_lines_train_as_ddp_does(folder: Path, on_two_ranks: list[float]) -> None:
    assert len(on_two_ranks) == 2
    assert on_two_ranks[-1] < on_two_ranks[0]
    assert on_two_ranks == losses(python(folder, *TORCHRUN, str(SCRIPT), "--steps", "4", "--ddp"))


@pytest.mark.usefixtures("on_two_ranks")
def test_its_ledger_can_be_reported(folder: Path) -> None:
    assert read_ledger(folder / "two.ledger").facts["world_size"] == 2
    told = python(folder, "-m", "tonnage", "report", "two.ledger")
    assert told.returncode == 0, told.stderr
    assert "reduce-scatter" in told.stdout
    assert "all-gather" in told.stdout


def test_one_process_needs_no_launcher_and_sends_nothing(tmp_path: Path) -> None:
    first, last = losses(python(tmp_path, str(SCRIPT), "--steps", "3"))
    assert last < first
    assert read_ledger(tmp_path / "run.ledger").frame["wire_nbytes"].sum() == 0


def test_ddp_in_one_process_asks_for_torchrun(tmp_path: Path) -> None:
    done = python(tmp_path, str(SCRIPT), "--ddp")
    assert done.returncode == 2
    assert "start it with torchrun" in done.stderr
