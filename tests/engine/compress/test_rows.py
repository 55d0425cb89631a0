from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import nn

from tonnage.engine.compress import encode_rows, reduce_rows, rows_wire_nbytes
from tonnage.errors import EngineError


def gradient_of(tokens: list[int], table: int, width: int, seed: int) -> torch.Tensor:
    """What autograd gives for an embedding of these tokens."""
    embedding = nn.Embedding(table, width, sparse=True)
    weights = torch.randn(len(tokens), width, generator=torch.Generator().manual_seed(seed))
    (embedding(torch.tensor(tokens, dtype=torch.int64)) * weights).sum().backward()
    assert embedding.weight.grad is not None
    return embedding.weight.grad


@given(
    st.lists(st.lists(st.integers(0, 49), max_size=30), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=50)
def test_the_sum_is_that_of_the_dense_gradients_in_rank_order(
    tokens: list[list[int]], width: int, dtype: torch.dtype
) -> None:
    each = [gradient_of(t, 50, width, seed).to(dtype) for seed, t in enumerate(tokens)]
    total = torch.zeros(50, width)
    for gradient in each:
        total += gradient.coalesce().to_dense().float()
    wires = [encode_rows(gradient) for gradient in each]
    out = reduce_rows(wires, shape=(50, width), dtype=dtype, scale=0.25)
    assert out.is_coalesced()
    assert torch.equal(out.to_dense(), (total * 0.25).to(dtype))


def test_a_wire_costs_what_its_rows_cost_whatever_the_table() -> None:
    for table in (100, 100_000):
        wire = encode_rows(gradient_of([3, 5, 3], table, 64, 0))
        assert wire.numel() == rows_wire_nbytes(2, 64, torch.float32) == 16 + 16 + 2 * 64 * 4


def test_what_is_not_finite_stays_so() -> None:
    gradient = gradient_of([1, 2], 10, 4, 0).coalesce()
    gradient.values()[1, 2] = float("nan")
    out = reduce_rows([encode_rows(gradient)] * 2, shape=(10, 4), dtype=torch.float32)
    assert torch.isnan(out.to_dense()[2, 2])


def test_other_gradients_and_damaged_wires_are_refused() -> None:
    for wrong in (torch.zeros(3, 3), torch.eye(3).to_sparse()):
        with pytest.raises(EngineError):
            encode_rows(wrong)
    wire = encode_rows(gradient_of([3, 5, 7], 10, 4, 0))
    for place, value in ((0, 200), (0, 4), (16, 99), (24, 3), (32, 10)):
        damaged = wire.clone()
        damaged[place] = value
        with pytest.raises(EngineError):
            reduce_rows([damaged], shape=(10, 4), dtype=torch.float32)
    for wires in ([], [wire[:8]], [wire[:-16]]):
        with pytest.raises(EngineError):
            reduce_rows(wires, shape=(10, 4), dtype=torch.float32)
