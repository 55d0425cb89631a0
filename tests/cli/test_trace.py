"""``tonnage trace``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tonnage.cli import main

TRACES = Path(__file__).parents[1] / "data" / "traces"
DLRM = str(TRACES / "dlrm_v100_8ranks")
GLOO = str(TRACES / "own_gloo_ddp_4ranks")


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_the_verdict_comes_first_and_80_columns_suffice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", DLRM, "--what-if", "nic=2x", "--what-if", "straggler=none,compress=bf16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Waiting, not the network: 96.5% of the time in collectives is waiting")
    assert max(map(len, out.splitlines())) <= 80
    assert "straggler=none,compress=bf16" in out
    assert "\x1b" not in out


def test_json_is_one_versioned_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", GLOO, "--what-if", "straggler=none", "--definitions", "hta", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "tonnage.trace/1"
    assert document["ranks"] == [0, 1, 2, 3]
    assert document["num_steps"] == 3
    assert [each["rank"] for each in document["stragglers"]] == [3]
    assert document["what_if"][0]["saved"] == pytest.approx(0.03, rel=0.1)
    assert len(document["hta"]) == 4


def test_files_are_written_beside_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, out, perfetto = (tmp_path / name for name in ("r.html", "o.json", "p.json.gz"))
    command = ["trace", GLOO, "--html", str(page), "--json", str(out), "--perfetto", str(perfetto)]
    assert main([*command, "--steps", "3:"]) == 0
    shown = capsys.readouterr()
    assert "rank 3" in shown.out
    assert shown.err == f"page: {page}\nperfetto: {perfetto}\n"
    assert json.loads(out.read_text(encoding="utf-8"))["num_steps"] == 2
    assert "rank 3 thread" in page.read_text(encoding="utf-8")
    assert json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]


def test_two_runs_stand_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", GLOO, "--compare", DLRM]) == 0
    out = capsys.readouterr().out
    assert "before" in out
    assert "53.6 ms" in out
    assert "20.8 ms" in out


def test_chinese_has_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", DLRM, "--lang", "zh"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("是等待，不是网络")
    assert "96.5%" in out


def test_what_a_broken_file_lost_is_told_and_the_rest_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(TRACES / "malformed" / "01_truncated_mid_event.json")]) == 0
    shown = capsys.readouterr()
    assert "note: rank 0, 01_truncated_mid_event.json" in shown.err
    assert shown.out


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        (["/nowhere/at/all"], 2, "no trace here"),
        ([GLOO, "--what-if", "foo=1"], 2, "no such change"),
        ([GLOO, "--what-if", "straggler=99"], 2, "rank 99 is not in the trace"),
        ([GLOO, "--steps", "90:91"], 2, "no step in 90:91"),
        ([str(TRACES / "malformed" / "18_empty.json")], 1, "no events"),
        ([GLOO, "--html", "/nowhere/at/all.html"], 2, "can't write the page"),
    ],
)
def test_errors_say_what_to_do(
    command: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *command]) == status
    shown = capsys.readouterr()
    assert words in shown.err
    assert "do:" in shown.err or status == 1


def test_steps_that_are_no_range_are_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["trace", GLOO, "--steps", "three"])
    assert stopped.value.code == 2
    assert "no range of steps" in capsys.readouterr().err
