"""The page of a plan: whole, closed to the network, and with the figures of the prediction."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from tonnage.plan import Batch, Language, Layout, Prediction, device_cluster, load_model, plan_page, predict
from tonnage.units import format_time

VOID = {"meta", "rect", "br"}


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    layout = Layout(dp=16, tp=8, pp=4, sp=True, zero=1)
    return predict(
        load_model("llama3-70b"), device_cluster("h100", 512), layout, Batch(sequences=512, seq=8192)
    )


class Balance(HTMLParser):
    """Notes what is opened and never closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_page_is_whole_and_asks_nobody_for_anything(prediction: Prediction, lang: Language) -> None:
    page = plan_page([prediction, prediction], ["", "nic=100"], lang)
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert f'lang="{lang}"' in page
    assert not re.search(r"(src|href)=|url\(|<script", page)
    assert "default-src 'none'" in page


def test_the_page_has_the_figures_of_the_prediction(prediction: Prediction) -> None:
    page = plan_page([prediction], [""])
    assert format_time(prediction.seconds) in page
    assert f"{prediction.memory_total / 2**30:.1f} GiB" in page
    drawn = [each for each in prediction.simulated.events if each.lane in ("compute", "exchange")]
    assert page.count("<rect") == len(drawn)


def test_a_name_can_not_add_to_the_page(prediction: Prediction) -> None:
    model = dataclasses.replace(prediction.model, name="<script>alert(1)</script>")
    page = plan_page([dataclasses.replace(prediction, model=model)], ["<b>x</b>"])
    assert "<script" not in page
    assert "<b>x</b>" not in page
