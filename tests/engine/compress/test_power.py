from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from tonnage.engine.compress import Matrix, PowerState, as_matrix
from tonnage.engine.compress.power import orthonormalise
from tonnage.errors import EngineError

MATRICES = (
    Matrix(name="a", offset=3, rows=40, columns=24),
    Matrix(name="b", offset=3 + 40 * 24, rows=16, columns=64),
)
NUMEL = 3 + 40 * 24 + 16 * 64 + 5


def step(
    states: list[PowerState], gradients: list[torch.Tensor], residuals: list[torch.Tensor]
) -> torch.Tensor:
    """One step of all ranks; the mean that was delivered, the same on all."""

    def sum_over_ranks(buffers: list[torch.Tensor]) -> None:
        total = torch.stack(buffers).sum(dim=0)
        for buffer in buffers:
            buffer.copy_(total)

    for state, gradient, residual in zip(states, gradients, residuals, strict=True):
        state.project(gradient, residual)
    sum_over_ranks([state.p for state in states])
    for state, residual in zip(states, residuals, strict=True):
        state.back_project(residual)
    sum_over_ranks([state.q for state in states])
    outs = [torch.full((NUMEL,), 7.0) for _ in states]
    for state, out in zip(states, outs, strict=True):
        state.deliver(out, scale=1 / len(states))
    assert all(torch.equal(torch.nan_to_num(out), torch.nan_to_num(outs[0])) for out in outs)
    return outs[0]


def job(ranks: int, rank: int = 2) -> tuple[list[PowerState], list[torch.Tensor]]:
    states = [PowerState(MATRICES, rank=rank, device="cpu") for _ in range(ranks)]
    return states, [torch.zeros(NUMEL) for _ in range(ranks)]


def gradients(ranks: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUMEL, generator=generator) for _ in range(ranks)]


def matrices_of(flat: torch.Tensor) -> torch.Tensor:
    return flat[3 : NUMEL - 5]


@given(ranks=st.integers(1, 4), rank=st.integers(1, 5), steps=st.integers(1, 6), seed=st.integers(0, 999))
@settings(max_examples=30)
def test_what_was_delivered_and_the_mean_of_what_is_owed_make_up_the_mean_gradient(
    ranks: int, rank: int, steps: int, seed: int
) -> None:
    states, residuals = job(ranks, rank)
    delivered, wanted = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for number in range(steps):
        each = gradients(ranks, seed + number)
        delivered += step(states, each, residuals)
        wanted += sum(each) / ranks
    owed = sum(residuals) / ranks
    assert torch.allclose(matrices_of(delivered + owed), matrices_of(wanted), atol=1e-4)


def test_a_gradient_of_low_rank_is_delivered_whole_after_a_few_steps() -> None:
    generator = torch.Generator().manual_seed(1)
    flat = torch.zeros(NUMEL)
    for m in MATRICES:
        low = torch.randn(m.rows, 2, generator=generator) @ torch.randn(2, m.columns, generator=generator)
        flat[m.offset : m.offset + m.rows * m.columns] = low.view(-1)
    states, residuals = job(3)
    out = step(states, [flat] * 3, residuals)
    assert torch.allclose(matrices_of(out), matrices_of(flat), atol=1e-4)
    assert residuals[0].abs().max() < 1e-4


def test_a_warm_start_comes_nearer_to_the_best_approximation_step_by_step() -> None:
    flat = gradients(1, 5)[0]
    states, _ = job(1, rank=3)
    errors = []
    for _ in range(40):
        out = step(states, [flat], [torch.zeros(NUMEL)])
        errors.append((matrices_of(out) - matrices_of(flat)).norm().item() ** 2)
    best = sum(
        torch.linalg.svdvals(flat[m.offset : m.offset + m.rows * m.columns].view(m.rows, m.columns))[3:]
        .square()
        .sum()
        .item()
        for m in MATRICES
    )
    assert best * 0.999 <= errors[-1] <= 1.01 * best
    assert errors[-1] < errors[0]


def test_what_is_no_matrix_is_left_alone() -> None:
    states, residuals = job(2)
    out = step(states, gradients(2, 0), residuals)
    assert (out[:3] == 7).all()
    assert (out[-5:] == 7).all()
    assert not residuals[0][:3].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_is_seen_by_all_and_forgotten_after(value: float) -> None:
    states, residuals = job(3)
    step(states, gradients(3, 0), residuals)
    before, warm = [r.clone() for r in residuals], states[0].state_dict()
    bad = gradients(3, 1)
    bad[1][10] = value
    out = step(states, bad, residuals)
    first, second = (out[m.offset : m.offset + m.rows * m.columns] for m in MATRICES)
    assert not torch.isfinite(first).any()
    assert torch.isfinite(second).all()
    for old, new in zip(before, residuals, strict=True):
        assert torch.equal(old[3 : 3 + 960], new[3 : 3 + 960])
    assert torch.equal(states[0].state_dict()["a"], warm["a"])
    assert torch.isfinite(step(states, gradients(3, 2), residuals)).all()


def test_a_gradient_of_zero_delivers_zero_and_does_not_end_the_search() -> None:
    states, residuals = job(2)
    assert not matrices_of(step(states, [torch.zeros(NUMEL)] * 2, residuals)).any()
    out = step(states, gradients(2, 3), residuals)
    assert matrices_of(out).norm() > 1


def test_the_state_goes_on_with_the_same_bits_in_another_bucket_plan() -> None:
    states, residuals = job(1)
    each = gradients(1, 0)
    step(states, each, residuals)
    alone = PowerState([Matrix(name="b", offset=0, rows=16, columns=64)], rank=2, device="cpu")
    alone.load_state_dict(states[0].state_dict())
    part = slice(3 + 960, 3 + 960 + 1024)
    residual = residuals[0][part].clone()
    wanted = step(states, each, residuals)[part]
    out = torch.zeros(1024)
    alone.project(each[0][part].clone(), residual)
    alone.back_project(residual)
    alone.deliver(out)
    assert torch.equal(out, wanted)
    PowerState(MATRICES, rank=3, device="cpu").load_state_dict(states[0].state_dict())  # begins anew


@given(rows=st.integers(1, 40), columns=st.integers(1, 6), seed=st.integers(0, 99))
def test_columns_become_orthonormal_or_zero(rows: int, columns: int, seed: int) -> None:
    p = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if columns > 2:
        p[:, 2] = 3 * p[:, 0]
    orthonormalise(p)
    gram = p.T @ p
    sizes = gram.diagonal()
    assert torch.allclose(gram, torch.diag(sizes), atol=1e-4)
    assert ((sizes - 1).abs().lt(1e-4) | sizes.eq(0)).all()
    assert sizes.sum().round().item() <= min(rows, columns)
    assert columns <= 2 or sizes[2] == 0


def test_vectors_and_small_matrices_travel_as_they_are() -> None:
    assert as_matrix("bias", 0, (512,), rank=1) is None
    assert as_matrix("scalar", 0, (), rank=1) is None
    assert as_matrix("thin", 0, (512, 2), rank=1) is None
    assert as_matrix("conv", 8, (64, 32, 3, 3), rank=2) == Matrix(name="conv", offset=8, rows=64, columns=288)
    with pytest.raises(EngineError):
        PowerState(MATRICES, rank=0, device="cpu")
