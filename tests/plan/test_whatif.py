from __future__ import annotations

import pytest

from tonnage.errors import LayoutError, UsageError
from tonnage.plan import Batch, Layout, Scenario, change, device_cluster, load_model, predict

BASE = Scenario(
    name="now",
    model=load_model("llama3-70b"),
    cluster=device_cluster("h100", 512),
    layout=Layout(dp=16, tp=8, pp=4, sp=True, zero=1, virtual=5),
    batch=Batch(sequences=512, seq=8192),
)


def test_a_slower_network_is_slower_and_a_smaller_gradient_is_not() -> None:
    now, slow, small = (
        predict(each.model, each.cluster, each.layout, each.batch)
        for each in (BASE, change(BASE, "nic=100"), change(BASE, "compress=int8"))
    )
    assert slow.cluster.nic.rate == 12.5e9
    assert slow.seconds > now.seconds >= small.seconds
    assert small.layout.recipe.compress == "int8"


def test_data_parallel_takes_what_other_degrees_leave() -> None:
    changed = change(BASE, "tp=4,pp=8,virtual=2")
    assert (changed.layout.dp, changed.layout.tp, changed.layout.pp, changed.layout.virtual) == (16, 4, 8, 2)
    alone = change(BASE, "pp=1,tp=1")
    assert (alone.layout.dp, alone.layout.virtual, alone.layout.sp) == (512, 1, False)
    assert change(BASE, "cards=1024").layout.dp == 32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nic", "no change"),
        ("nik=100", "'nik'"),
        ("tp=none", "tp is 'none'"),
        ("nic=soon", "'soon'"),
        ("keep=lots", "'lots'"),
        ("overlap-grad=maybe", "'maybe'"),
    ],
)
def test_a_change_without_meaning_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        change(BASE, text)
    assert said in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize("text", ["tp=3", "compress=zip", "recompute=most", "zero=7", "card=h9"])
def test_a_change_that_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        change(BASE, text)
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "local-steps=100",
        "keep=1%",
        "trainable=0.01",
        "oversubscription=4",
        "seq=4096",
        "overlap-tp=no",
        "card=b200",
        "micro-batch=2",
        "recompute=full",
        "zero=0",
    ],
)
def test_every_kind_of_change_is_predicted(text: str) -> None:
    changed = change(BASE, text)
    assert predict(changed.model, changed.cluster, changed.layout, changed.batch).seconds > 0
    assert changed.name == text
