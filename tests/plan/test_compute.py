from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.plan import Batch, Layout, Recipe, load_model
from tonnage.plan.cluster import device_cluster
from tonnage.plan.compute import KERNEL_GAP, Work, duration, layer_work, matmul_seconds, padded_vocab
from tonnage.plan.grid import grid_of
from tonnage.plan.model import Layer

H100 = device_cluster("h100", 1).device
B300 = device_cluster("b300", 1).device

# Batch, M, N, K and TFLOP/s of bf16 products on an H100, from OpenXLA's table of measured products
# (xla/service/gpu/model/matmul_interpolator_data.h); short runs, so at the best rate, not the sustained.
MEASURED = [
    (4, 4096, 4096, 2048, 765),
    (2, 4096, 4096, 512, 608),
    (1, 4096, 2048, 4096, 758),
    (1, 2048, 2048, 1024, 494),
    (1, 512, 4096, 4096, 644),
    (4, 2048, 4096, 4096, 802),
    (2, 2048, 4096, 4096, 779),
    (1, 4096, 4096, 1024, 677),
    (2, 1024, 1024, 2048, 519),
    (1, 1024, 1024, 4096, 470),
    (4, 2048, 2048, 512, 542),
    (2, 4096, 256, 2048, 508),
    (1, 2048, 4096, 512, 450),
    (1, 4096, 2048, 256, 304),
]


@pytest.mark.parametrize(("groups", "m", "n", "k", "measured"), MEASURED)
def test_a_product_of_this_shape_is_near_its_measured_rate(
    groups: int, m: int, n: int, k: int, measured: float
) -> None:
    seconds = float(matmul_seconds(m, n, k, device=H100, groups=groups)) + KERNEL_GAP
    # Scaled to a short run at the card's best: without the power limit and the rest of a step.
    rate = 2 * groups * m * n * k / seconds / 1e12 * H100.matmul / (H100.sustained["bf16"] * 0.925)
    assert rate == pytest.approx(measured, rel=0.35)


@pytest.mark.parametrize(
    ("precision", "measured"),
    [("bf16", 4.250e-3), ("fp8-cs", 2.158e-3), ("mxfp8", 2.365e-3), ("nvfp4", 1.254e-3)],
)
def test_a_layers_products_on_b300_are_near_nvidias_table(precision: str, measured: float) -> None:
    # 15,872 tokens, hidden 4096, MLP 16384, forward: TransformerEngine docs/examples/gemm_profiling.
    size = {"bf16": 2.0, "nvfp4": 0.5}.get(precision, 1.0)
    shapes = [(4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)]
    seconds = sum(
        float(matmul_seconds(15872, n, k, device=B300, precision=precision, in_nbytes=size))
        for k, n in shapes
    )
    # Within a training step products reach 0.925 of it.
    assert seconds * 0.925 == pytest.approx(measured, rel=0.12)


def test_a_grouped_mxfp8_product_on_gb200_is_near_the_published_rate() -> None:
    # 2,672 TFLOP/s at K 7168, N 2048: Megatron-LM docs/discussions, "Optimizing DeepSeek-V3 Training Performance
    # on NVIDIA GB200 NVL72", section 1.
    device = device_cluster("gb200", 1).device
    seconds = float(
        matmul_seconds(8192, 2048, 7168, device=device, precision="mxfp8", groups=8, in_nbytes=1.0)
    )
    assert 2 * 8 * 8192 * 2048 * 7168 / seconds / 1e12 == pytest.approx(2672, rel=0.05)


def routed(host_kernels: float, experts: float, **recipe: Any) -> tuple[float, float]:
    """Seconds of 2 ms of work, part of it of experts, that runs ahead and that waits."""
    grid = grid_of(
        [Layout(dp=8, ep=8, recipe=Recipe(**recipe))],
        load_model("mixtral-8x7b"),
        Batch(sequences=8, seq=4096),
    )
    work = Work(matmul=2e-3, other=0.0, kernels=10, routed=np.full(1, host_kernels), experts=experts)
    return float(duration(work, grid)[0]), float(np.ravel(duration(work, grid, waits=True))[0])


@given(kernels=st.integers(1, 400), share=st.floats(0, 1))
def test_waiting_for_the_experts_counts_never_saves_time(kernels: int, share: float) -> None:
    ahead, waiting = routed(kernels, share * 2e-3)
    assert ahead <= waiting + 1e-12
    recorded = routed(kernels, share * 2e-3, graphs="all")
    assert recorded[0] == recorded[1] <= waiting


def test_a_host_that_cannot_run_ahead_shows_beside_the_rest_of_the_layer() -> None:
    # 100 kernels of 24 µs are 2.4 ms of the host: under 2 ms of the card nearly all hides where it may.
    ahead, waiting = routed(100, 0.5e-3)
    assert ahead == pytest.approx(110 * 24e-6)
    assert waiting == pytest.approx(1.5e-3 + 10 * KERNEL_GAP + 100 * 24e-6)


def test_blocking_launches_add_the_host_to_the_card() -> None:
    assert routed(100, 0.0, blocking=True)[0] == pytest.approx(2e-3 + 110 * 24e-6)


def test_attention_on_a_card_with_few_exponentials_is_slower_at_narrow_heads_above_all() -> None:
    b200, b300 = (device_cluster(card, 1).device for card in ("b200", "b300"))
    assert b200.exps < b300.exps == 1
    model = load_model("llama3-8b")
    grid = grid_of([Layout(recipe=Recipe(attention="flash3"))], model, Batch(sequences=1, seq=65536))
    narrow = dataclasses.replace(model.layers[0][0], qk_dim=64, v_dim=64, heads=64)

    def seconds(layer: Layer, card: str) -> float:
        return float(layer_work(layer, model, grid, device_cluster(card, 1)).forward.other[0])

    wide_loss = seconds(model.layers[0][0], "b200") / seconds(model.layers[0][0], "b300")
    assert 1.05 < wide_loss < seconds(narrow, "b200") / seconds(narrow, "b300")


@given(m=st.integers(1, 20000), n=st.integers(1, 20000), k=st.integers(1, 20000))
def test_no_product_beats_the_peak_or_the_memory(m: int, n: int, k: int) -> None:
    seconds = float(matmul_seconds(m, n, k, device=H100))
    assert seconds >= 2 * m * n * k / H100.flops["bf16"]
    assert seconds >= 2 * (m * k + k * n) / H100.hbm


@given(k=st.integers(8, 1024).map(lambda n: 8 * n), factor=st.integers(2, 4))
def test_a_longer_product_takes_longer(k: int, factor: int) -> None:
    one = float(matmul_seconds(4096, 4096, k, device=H100))
    assert one < float(matmul_seconds(4096, 4096, k * factor, device=H100)) < factor * one * 1.01


def test_a_size_that_is_no_multiple_of_eight_costs_more_than_padding_it() -> None:
    odd, padded = (float(matmul_seconds(4096, 4096, k, device=H100)) for k in (1020, 1024))
    assert odd > padded


@given(vocab=st.integers(1, 300_000), tp=st.sampled_from([1, 2, 4, 8]))
def test_a_padded_vocabulary_splits_evenly_and_wastes_little(vocab: int, tp: int) -> None:
    padded = int(padded_vocab(vocab, tp))
    assert padded % (128 * tp) == 0
    assert vocab <= padded < vocab + 128 * tp
