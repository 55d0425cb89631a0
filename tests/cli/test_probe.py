"""``tonnage probe`` as it is typed: real ranks on this host, interrupted ones too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tonnage.cli import main

pytestmark = pytest.mark.ranks


def probe(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    pytest.importorskip("torch", reason="measuring needs torch")
    return subprocess.Popen(
        [sys.executable, "-m", "tonnage", "probe", *arguments],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_ranks_are_measured_and_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = probe("--ranks", "2", "--largest", "1MiB", "--repeat", "3", "--json", folder=tmp_path)
    out, err = command.communicate(timeout=200)
    assert command.returncode == 0, err
    document = json.loads(out)
    assert document["schema"] == "tonnage.probe/1"
    assert document["fit"]["scaleup"]["error"] >= 0
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.toml"]
    options = ["--cluster", str(tmp_path / "cluster.toml"), "--seq", "512", "--global-batch", "8", "--json"]
    assert main(["plan", "llama3.2-1b", *options]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["cluster"]["num_devices"] == 2
    assert {row["link"] for row in planned["movements"]} == {"loopback"}


def test_an_interrupted_probe_leaves_nothing(tmp_path: Path) -> None:
    command = probe("--ranks", "2", "--repeat", "500", folder=tmp_path)
    deadline = time.monotonic() + 60
    # torchrun is at work once it keeps its log.
    while not any(tmp_path.glob("*/logs/*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 130
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--largest", "1KiB"], "fewer than two sizes"),
        (["--largest", "much"], "much"),
        (["--out", "none/cluster.toml"], "no such folder"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *arguments]) == 2
    assert said in capsys.readouterr().err
