"""The page in a browser, opened as a file."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tonnage.ledger import Ledger
from tonnage.report import write_html

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
# Pixels of a canvas that are not of its most frequent colour, as a share of all.
INK = """id => {
  const canvas = document.querySelector(`#${id} canvas`);
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) || 0) + 1);
  return 1 - Math.max(...counts.values()) / pixels.length;
}"""
CHARTS = ("timeline", "pieces", "loss")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield running
        running.close()


class Opened:
    """A page with all that it complained of and asked for."""

    def __init__(self, browser: Any, path: Path, **how: Any) -> None:
        self.page = browser.new_page(**how)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def ink(self, name: str) -> float:
        return float(self.page.evaluate(INK, name))

    def until(self, expression: str, arg: Any = None) -> None:
        """Wait for a condition; Playwright's own wait evaluates text, which the page's policy forbids."""
        deadline = time.monotonic() + 10
        while not self.page.evaluate(expression, arg):
            assert time.monotonic() < deadline, f"never came true: {expression}"

    def shown(self) -> tuple[float, float]:
        """What stretch of time the timeline shows, in microseconds."""
        zoom = self.page.evaluate("tonnageCharts.timeline.getOption().dataZoom[0]")
        return zoom["startValue"], zoom["endValue"]


@pytest.fixture(scope="module")
def page_of_three(three: Sequence[Ledger], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_html(three, tmp_path_factory.mktemp("page") / "report.html")


@pytest.mark.parametrize(
    "how",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark"},
        {"viewport": {"width": 420, "height": 900}},
    ],
    ids=["light", "dark", "phone"],
)
def test_it_opens_as_a_file_without_a_complaint_or_a_request(
    browser: Any, page_of_three: Path, how: dict[str, Any]
) -> None:
    opened = Opened(browser, page_of_three, **how)
    assert {name: opened.ink(name) > 0.02 for name in CHARTS} == dict.fromkeys(CHARTS, True)
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.complaints == []
    assert opened.requests == [page_of_three.as_uri()]


def test_dark_and_light_are_drawn_in_different_colours_and_follow_the_system(
    browser: Any, page_of_three: Path
) -> None:
    opened = Opened(browser, page_of_three, color_scheme="light")
    colours = []
    for scheme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=scheme)
        opened.until(
            "tonnageCharts.loss.getOption().textStyle.color === getComputedStyle(document.body).getPropertyValue('--ink').trim()"
        )
        colours.append(opened.page.evaluate("tonnageCharts.loss.getOption().textStyle.color"))
    assert len(set(colours)) == 2


def test_print_is_drawn_light_even_where_the_screen_is_dark(browser: Any, page_of_three: Path) -> None:
    opened = Opened(browser, page_of_three, color_scheme="dark")
    opened.page.emulate_media(media="print", color_scheme="dark")
    opened.until("tonnageCharts.loss.getOption().textStyle.color === '#000000'")
    assert len(opened.page.pdf()) > 20_000


def test_the_timeline_zooms_by_buttons_and_by_wheel(browser: Any, page_of_three: Path) -> None:
    opened = Opened(browser, page_of_three)
    start, stop = opened.shown()
    opened.page.focus('[data-zoom="in"]')
    opened.page.keyboard.press("Enter")
    closer = opened.shown()
    assert start < closer[0] < closer[1] < stop
    opened.page.click('[data-zoom="right"]')
    assert opened.shown()[0] > closer[0]
    opened.page.click('[data-zoom="step"]')
    assert opened.shown() == pytest.approx((start, stop))
    opened.page.locator("#timeline").scroll_into_view_if_needed()
    box = opened.page.locator("#timeline").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    opened.page.keyboard.down("Control")
    opened.page.mouse.wheel(0, -300)
    opened.page.keyboard.up("Control")
    opened.until(
        "before => { const zoom = tonnageCharts.timeline.getOption().dataZoom[0]; return zoom.endValue - zoom.startValue < before }",
        arg=(stop - start) * 0.99,
    )


def test_hovering_tells_of_a_transfer(browser: Any, page_of_three: Path) -> None:
    opened = Opened(browser, page_of_three)
    opened.page.locator("#timeline").scroll_into_view_if_needed()
    box = opened.page.locator("#timeline").bounding_box()
    # The second lane of the first run, in the middle of the time in which it only sends.
    x, y = opened.page.evaluate("tonnageCharts.timeline.convertToPixel({ gridIndex: 0 }, [500000, 2])")
    opened.page.mouse.move(box["x"] + x, box["y"] + y)
    opened.until("document.body.innerText.includes('on the wire\\ncomputation stood still')")
    assert "all-reduce layers." in opened.page.inner_text("#timeline")


def test_all_ranks_can_be_shown(browser: Any, page_of_three: Path) -> None:
    opened = Opened(browser, page_of_three)
    opened.page.select_option("#rank", "all")
    lanes = opened.page.evaluate("tonnageCharts.timeline.getOption().yAxis[0].data.length")
    assert lanes == 3 * (1 + 4 * 2)
    assert opened.ink("timeline") > 0.05


def test_one_step_can_be_chosen_and_saved(browser: Any, page_of_three: Path, tmp_path: Path) -> None:
    opened = Opened(browser, page_of_three)
    opened.page.click("#single summary")
    opened.page.select_option("#step-run", label="tonnage")
    opened.page.select_option("#step-number", "3")
    with opened.page.expect_download() as download:
        opened.page.click('[data-table="single-step"]')
    download.value.save_as(tmp_path / "step.csv")
    lines = (tmp_path / "step.csv").read_text().splitlines()
    assert lines[0] == '"rank","kind","op","calls","payload","wire","time","exposed"'
    assert len(lines) == 1 + 4 * 2
    assert lines[1].startswith('"0","gradient","reduce-scatter",15,17')


def test_a_cell_that_a_spreadsheet_would_compute_is_saved_as_text(browser: Any, tmp_path: Path) -> None:
    row = {"step": 0, "kind": '=HYPERLINK("x")', "op": "-1+1", "nbytes": 8}
    opened = Opened(
        browser, write_html([Ledger.from_rows([row], {"run": "@run"})], tmp_path / "formula.html")
    )
    with opened.page.expect_download() as download:
        opened.page.click('[data-table="moved"]')
    download.value.save_as(tmp_path / "moved.csv")
    assert (
        (tmp_path / "moved.csv")
        .read_text()
        .splitlines()[1]
        .startswith(""""'@run","'=HYPERLINK(""x"")","'-1+1",1.0,8.0,""")
    )


def test_hostile_text_is_inert(browser: Any, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=document.title=1><b>=1+1"
    rows = [
        {"step": 0, "kind": "step", "op": "step", "start": 0.0, "stop": 1.0},
        {"step": 0, "kind": "compute", "op": "forward", "start": 0.0, "stop": 0.2},
        {"step": 0, "kind": hostile, "op": hostile, "label": hostile, "nbytes": 8, "start": 0.2, "stop": 1.0},
    ]
    facts = {"run": hostile, "title": hostile, "notes": [hostile], "link_note": hostile, "loss": [2, 1]}
    opened = Opened(
        browser, write_html([Ledger.from_rows(rows, facts)], tmp_path / "hostile.html", title="safe")
    )
    opened.page.locator("#timeline").scroll_into_view_if_needed()
    box = opened.page.locator("#timeline").bounding_box()
    x, y = opened.page.evaluate("tonnageCharts.timeline.convertToPixel({ gridIndex: 0 }, [600000, 2])")
    opened.page.mouse.move(box["x"] + x, box["y"] + y)
    opened.until("document.querySelector('#timeline').innerText.includes('onerror')")
    opened.page.click("#single summary")
    assert opened.page.title() == "safe"
    assert opened.page.locator("img").count() == 0
    assert opened.page.locator("main b").count() == opened.page.locator(".card b, .chart b").count()
    assert opened.complaints == []


def test_a_ledger_of_totals_alone_hides_the_pictures_it_cannot_draw(
    browser: Any, make: Callable[..., Ledger], tmp_path: Path
) -> None:
    row = {"step": 0, "kind": "gradient", "op": "all-reduce", "calls": 3, "nbytes": 30, "wire_nbytes": 30}
    opened = Opened(browser, write_html([Ledger.from_rows([row])], tmp_path / "totals.html"))
    assert opened.page.is_hidden("#timeline")
    assert opened.page.is_hidden("#loss")
    assert opened.ink("pieces") > 0.02
    opened.page.click("#single summary")
    assert opened.page.inner_text("#single-step tbody").split("\t")[-2:] == ["–", "0 s"]
    assert opened.complaints == []


def test_an_empty_ledger_and_none_open_without_complaint(browser: Any, tmp_path: Path) -> None:
    for name, ledgers in (("none", []), ("empty", [Ledger.empty()])):
        opened = Opened(browser, write_html(ledgers, tmp_path / f"{name}.html"))
        assert opened.complaints == []
