"""The page as text: whole, closed to the network, and nothing of a ledger in it unescaped."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tonnage.errors import TonnageError
from tonnage.ledger import Ledger
from tonnage.report import render_html, write_html

HOSTILE = "</script><img src=x onerror=alert(1)>&\u2028$policy ${data}"


def hostile_ledger() -> Ledger:
    return Ledger.from_rows(
        [
            {"step": 0, "kind": "step", "op": "step", "start": 0.0, "stop": 2.0},
            {"step": 0, "kind": "compute", "op": HOSTILE, "start": 0.0, "stop": 1.0},
            {
                "step": 0,
                "kind": HOSTILE,
                "op": HOSTILE,
                "label": HOSTILE,
                "link": HOSTILE,
                "nbytes": 8,
                "start": 0.5,
                "stop": 1.5,
                "exposed": 0.5,
            },
        ],
        {"run": HOSTILE, "title": HOSTILE, "link_note": HOSTILE, "notes": [HOSTILE], "loss": [1.0, 0.5]},
    )


def embedded(page: str) -> dict[str, list[dict[str, object]]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    # Not even half a tag: "<!--<script" alone would hide the end of the element from the parser.
    assert not set("<>&") & set(found[1])
    data: dict[str, list[dict[str, object]]] = json.loads(found[1])
    return data


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_the_page_asks_for_nothing_from_elsewhere(three: Sequence[Ledger]) -> None:
    page = render_html(three)
    assert set(re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', without_scripts(page))) == {"data:,"}
    assert "url(" not in without_scripts(page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in policy[1]


def test_the_policy_allows_just_the_two_scripts_of_the_page(three: Sequence[Ledger]) -> None:
    page = render_html(three)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page
    assert page.count("'sha256-") == 2


def test_hostile_text_is_shown_and_never_markup() -> None:
    page = render_html([hostile_ledger()], title=HOSTILE)
    assert "<img" not in without_scripts(page)
    assert page.count("</script>") == 3
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;&amp; $policy ${data}" in page
    assert str(embedded(page)["runs"][0]["name"]).startswith("</script><img")


def test_tables_and_verdict_are_there_without_a_script(three: Sequence[Ledger]) -> None:
    page = without_scripts(render_html(three))
    for text in (
        "tonnage is the fastest",
        "1.71 x",
        "reduce-scatter",
        "500 Mbit/s each way",
        "same to the last bit",
    ):
        assert text in page
    assert page.count("<table") == 4


def test_numbers_in_tables_carry_their_bare_value(three: Sequence[Ledger]) -> None:
    values = re.findall(r'data-value="([^"]*)"', render_html(three))
    assert len(values) > 50
    assert all(float(value) >= 0 for value in values)


def test_a_long_run_is_embedded_in_bounded_space(make: Callable[..., Ledger]) -> None:
    short, long = (len(render_html([make("ddp", num_steps=n)])) for n in (12, 3000))
    assert long - short < 700_000


def test_the_page_is_written_whole_and_leaves_nothing_beside_it(
    three: Sequence[Ledger], tmp_path: Path
) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    assert write_html(three, target) == target
    assert target.read_text(encoding="utf-8").endswith("</html>\n")
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_page_that_cannot_be_written_is_the_users_to_mend(three: Sequence[Ledger], tmp_path: Path) -> None:
    with pytest.raises(TonnageError, match="can't write the page: No such file or directory"):
        write_html(three, tmp_path / "missing" / "report.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TonnageError, match="can't write the page"):
        write_html(three, tmp_path / "folder")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_no_ledger_makes_a_page_that_says_so() -> None:
    assert "nothing to report" in render_html([])


def test_every_fact_that_runs_share_is_told_once(three: Sequence[Ledger]) -> None:
    page = without_scripts(render_html(three))
    assert page.count("shaped by a token bucket") == 1
    assert page.count("3.3 M parameters on 4 ranks") == 3
