from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.cli import main
from tonnage.ledger import read_ledger

WAYS = ["naive", "ddp", "tonnage"]


@pytest.mark.ranks
def test_the_demo_trains_three_ways_to_the_same_loss_and_keeps_their_ledgers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, page = tmp_path / "ledgers", tmp_path / "demo.html"
    command = ["demo", "--ranks", "2", "--link", "none", "--steps", "3", "--json"]
    assert main([*command, "--out", str(out), "--html", str(page)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["schema"]
    assert "2 ranks: " in printed.err
    assert page.read_text().startswith("<!")
    ledgers = [read_ledger(out / f"{way}.ledger") for way in WAYS]
    losses = [ledger.facts["loss"] for ledger in ledgers]
    assert all(loss == pytest.approx(losses[0], abs=1e-4) for loss in losses)
    assert all((ledger.ranks, ledger.steps) == ([0, 1], [0, 1, 2]) for ledger in ledgers)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "0"], "--ranks 0"),
        (["--ranks", "17"], "--ranks 17"),
        (["--steps", "1"], "--steps 1"),
        (["--link", "fast"], "'fast' is no rate"),
        (["--text", "/absent/folder"], "no folder"),
        (["--html", "/absent/folder/demo.html"], "no folder"),
    ],
)
def test_wrong_use_is_told_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["demo", *arguments]) == 2
    assert told in capsys.readouterr().err
