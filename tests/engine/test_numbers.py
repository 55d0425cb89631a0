from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.ranks

layers = st.lists(
    st.tuples(
        st.sampled_from(["linear", "wide", "norm", "conv1d", "conv2d", "embedding"]),
        st.sampled_from(["float32", "float32", "float64", "bfloat16"]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=layers,
    bucket=st.sampled_from([1, 100, 700, 3000, 1 << 24]),
    num_ranks=st.integers(1, 4),
    schedule=st.sampled_from(["shard", "early", "allreduce"]),
    accumulate=st.integers(1, 2),
    groups=st.booleans(),
)
def test_training_equals_one_process_that_averages_all_gradients(quad: Any, **case: Any) -> None:
    # SGD is linear in its gradients, so what differs is rounding alone.
    worst = quad.run("in_rank_numbers.against_average", **case)
    halves = any(dtype == "bfloat16" for _, dtype, _, _ in case["layers"])
    assert max(worst) < (4 if halves else 60)


@pytest.mark.parametrize("model", ["Mixed", "perceptron"])
@pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_two_ranks_train_to_the_same_bits_as_ddp(
    pair: Any, model: str, schedule: str, optimizer: str
) -> None:
    case = {"model": model, "schedule": schedule, "optimizer": optimizer, "steps": 20}
    for differing, _, losses in pair.run("in_rank_numbers.beside_ddp", **case):
        assert differing == []
        assert all(ours == theirs for ours, theirs in losses)


@pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_four_ranks_lose_as_ddp_does_to_within_rounding(quad: Any, schedule: str, optimizer: str) -> None:
    case = {"model": "Mixed", "schedule": schedule, "optimizer": optimizer, "steps": 20}
    for _, _, losses in quad.run("in_rank_numbers.beside_ddp", **case):
        assert all(ours == pytest.approx(theirs, abs=1e-5) for ours, theirs in losses)
        assert losses[-1][0] < losses[0][0]


def test_disjoint_groups_train_models_of_their_own_at_once(quad: Any) -> None:
    assert quad.run("in_rank_numbers.two_groups_at_once") == [[]] * 4
