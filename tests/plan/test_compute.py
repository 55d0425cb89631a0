from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.plan.cluster import device_cluster
from tonnage.plan.compute import KERNEL_GAP, matmul_seconds, padded_vocab

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
