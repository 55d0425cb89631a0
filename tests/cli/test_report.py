"""``tonnage report``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.cli import main


def test_it_prints_the_verdict_first(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *two]) == 0
    out = capsys.readouterr().out
    assert out.startswith("before is the fastest: 1.00 s a step, 1.20 times as fast as after (1.20 s).")
    assert "\x1b" not in out


def test_json_is_one_document_on_stdout_and_the_page_is_named_on_stderr(
    two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert main(["report", *two, "--json", "--html", str(page)]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["schema"] == "tonnage.report/1"
    assert [run["steps"]["median"] for run in document["runs"]] == [1.0, pytest.approx(1.2)]
    assert shown.err == f"page: {page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_file_that_is_no_ledger_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "note.txt").write_text("hello, this is no ledger")
    assert main(["report", str(tmp_path / "note.txt")]) == 1
    assert "error: not a ledger" in capsys.readouterr().err


def test_a_page_in_a_missing_folder_is_told_and_nothing_printed(
    two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *two, "--html", str(tmp_path / "missing" / "r.html")]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "can't write the page" in shown.err
