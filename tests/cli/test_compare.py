"""``tonnage compare``."""

from __future__ import annotations

import json

import pytest

from tonnage.cli import main


def test_it_compares_after_warm_up(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *two]) == 0
    out = capsys.readouterr().out
    assert out.startswith("20 % slower from before to after: 1.00 s → 1.20 s a step.")
    assert "-80 %" in out


@pytest.mark.parametrize(
    ("conditions", "status", "lines"),
    [
        (["step>+3%"], 1, ["step>+3% holds: step 1.00 s → 1.20 s (+20 %)"]),
        (["step>+25%"], 0, []),
        (["calls<-50%"], 1, ["calls<-50% holds: calls 10 → 2 (-80 %)"]),
        (["step>+30%", "calls<-50%", "wire>+0%"], 1, ["calls<-50% holds: calls 10 → 2 (-80 %)"]),
    ],
)
def test_it_fails_when_a_condition_holds_and_says_which(
    two: tuple[str, str],
    conditions: list[str],
    status: int,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [flag for condition in conditions for flag in ("--fail-if", condition)]
    assert main(["compare", *two, *flags]) == status
    assert capsys.readouterr().err.splitlines() == lines
    assert main(["compare", *two, *flags, "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["failed"] == lines
    assert document["schema"] == "tonnage.comparison/1"


def test_a_condition_that_is_none_is_wrong_use(
    two: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *two, "--fail-if", "step is slow"]) == 2
    assert "'step is slow' is no condition" in capsys.readouterr().err
