from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import LayoutError
from tonnage.plan import Cluster, device_cluster, device_names, load_cluster, read_cluster
from tonnage.plan.cluster import _table


@pytest.mark.parametrize("name", device_names())
def test_every_card_has_a_source_and_figures_in_order(name: str) -> None:
    device = device_cluster(name, 8).device
    assert device.source
    assert 0 < device.sustained["bf16"] <= device.matmul <= device.flops["bf16"]
    assert all(device.rate(fmt) <= device.peak(fmt) for fmt in device.flops)
    assert list(device.flops.values()) == sorted(device.flops.values())
    assert device.memory > 1e9


@pytest.mark.parametrize(
    ("card", "bf16", "memory", "hbm", "nvlink", "nic", "matmul"),
    [
        ("H100-SXM", 989, 80, 3350, 450, 50, 794.5),
        ("A100-80GB", 312, 80, 2000, 300, 25, 271.2),
        ("B200", 2250, 180, 8000, 900, 50, 1745),
        ("GB200", 2450, 186, 8000, 900, 50, 1822),
        ("MI300X", 1300, 192, 5300, 448, 50, 668.4),
    ],
)
def test_presets_hold_the_collected_facts(
    card: str, bf16: float, memory: float, hbm: float, nvlink: float, nic: float, matmul: float
) -> None:
    row = _table()[card]
    found = (
        row["flops"]["bf16"] / 1e12,
        row["memory"] / 1e9,
        row["hbm"] / 1e9,
        row["nvlink"] / 1e9,
        row["nic"] / 1e9,
        row["matmul"] / 1e12,
    )
    assert found == pytest.approx((bf16, memory, hbm, nvlink, nic, matmul))


@given(count=st.integers(1, 100_000))
def test_a_short_name_means_that_many_cards(count: int) -> None:
    assert load_cluster(f"h100x{count}").num_devices == count


def test_hosts_of_cards_are_domains() -> None:
    cluster = load_cluster("4x8xA100")
    assert (cluster.num_devices, cluster.domain, cluster.device.name) == (32, 8, "A100-80GB")
    assert load_cluster("2x4xRTX-4090").scaleup_level == "pcie"


def test_a_file_changes_a_preset_card(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'card = "h100"\nnum_devices = 64\npod = 32\noversubscription = 2.0\nprice = 2.5\n'
        '[nic]\nrate = "200gbit"\nefficiency = 0.9\n[device]\nmemory = 96e9\n'
    )
    cluster = load_cluster(path)
    assert cluster.nic.rate == 25e9
    assert cluster.nic.bandwidth == pytest.approx(22.5e9)
    assert cluster.spine.rate == 12.5e9
    assert cluster.device.memory == 96e9
    assert cluster.device.flops["bf16"] == 989e12


@pytest.mark.parametrize(
    ("text", "said", "do"),
    [
        ("num_devices = 8\n", "names no card", "card ="),
        ('card = "h100"\n', "num_devices", "num_devices = 8"),
        ('card = "h100"\nnum_devices = 8\nnick = 3\n', "'nick'", "did you mean nic"),
        ('card = "h100"\nnum_devices = 8\n[nic]\nrate = "fast"\n', "fast", "write it like"),
        ('card = "h100"\nnum_devices = 8\n[nic]\nrate = -1\n', "-1", "rate ="),
        ('card = "h1000"\nnum_devices = 8\n', "h1000", "did you mean h100"),
        ('card = "h100"\nnum_devices = 8\n[device]\nflops = { bf16 = 1979e12 }\n', "2:4 sparsity", "989e12"),
        ("card = \n", "no TOML", ""),
    ],
)
def test_a_file_with_a_fault_is_refused_with_the_mend(tmp_path: Path, text: str, said: str, do: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(LayoutError) as caught:
        load_cluster(path)
    assert said in caught.value.what
    assert do in caught.value.hint


@pytest.mark.parametrize("text", ["h100", "8", "", "h100x0", "x8", "none.toml", "zx80x8"])
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        load_cluster(text)


def test_an_oversubscribed_spine_slows_what_leaves_a_pod() -> None:
    import dataclasses

    from tonnage.plan import Batch, Layout, load_model, predict

    flat = device_cluster("h100", 64)
    narrow: Cluster = dataclasses.replace(flat, pod=32, oversubscription=4.0)
    model, batch = load_model("llama3-8b"), Batch(sequences=64, seq=4096)
    layout = Layout(dp=64, zero=3)
    one, two = (predict(model, each, layout, batch) for each in (flat, narrow))
    assert two.seconds > one.seconds
    assert "spine" in two.ledger.frame["link"].to_list()
    assert "spine" not in one.ledger.frame["link"].to_list()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('card = "h100"\nnum_devices = "8"\n', "num_devices is '8'"),
        ('card = "h100"\nnum_devices = 99999999\n', "99,999,999 cards"),
        ('card = "h100"\nnum_devices = 8\ndevice = 3\n', "device = 3"),
        ('card = "h100"\nnum_devices = 8\ndomain = 0.5\n', "domain = 0.5"),
        ('card = "h100"\nnum_devices = 8\ndomain = inf\n', "domain = inf"),
        ('card = "h100"\nnum_devices = 8\nprice = -3\n', "price = -3"),
        ('card = "h100"\nnum_devices = 8\nname = 5\n', "name = 5"),
        ('card = "h100"\nnum_devices = 8\noversubscription = 0.5\n', "oversubscription of 0.5"),
        ('card = "h100"\nnum_devices = 8\n[nic]\nrate = 0\n', "rate of 0"),
        ('card = "h100"\nnum_devices = 8\n[nic]\nlatency = nan\n', "latency = nan"),
        ('card = "h100"\nnum_devices = 8\n[nic]\nefficiency = nan\n', "efficiency = nan"),
        ('card = "h100"\nnum_devices = 8\n[device]\nmemory = "80GB"\n', "memory = '80GB'"),
        ('card = "h100"\nnum_devices = 8\n[device]\nhbm = 0\n', "hbm = 0"),
        ('card = "h100"\nnum_devices = 8\n[device.flops]\nbf16 = "x"\n', "bf16 = 'x'"),
        ("num_devices = 8\n[device]\nflops = {fp8 = 1e12}\nmemory = 1e10\nhbm = 1e11\nsms = 4\n", "no bf16"),
    ],
)
def test_a_value_that_can_not_be_meant_is_refused_in_one_sentence(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(LayoutError) as caught:
        read_cluster(path)
    assert said in caught.value.what
    assert caught.value.hint


def test_a_card_of_80_gb_has_79_gib() -> None:
    # PyTorch's out-of-memory messages name 79.1 GiB on A100 and H100, and torchtitan's logs 95.04 of 96.
    for name, size in (("h100", 79.1), ("a100", 79.1), ("h100-96gb-hbm2e-500w", 95.04), ("h200", 139.8)):
        assert device_cluster(name, 1).device.memory / 2**30 == pytest.approx(size, rel=0.005)
