"""Moving to other buckets changes no bit, and what is chosen is chosen by all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.ranks


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schedule=st.sampled_from(["shard", "early", "allreduce"]),
    optimizer=st.sampled_from(["AdamW", "NAdam", "SGD"]),
    seed=st.integers(0, 2**16),
    steps=st.sets(st.integers(0, 11), min_size=1, max_size=3),
    codec=st.sampled_from([None, "lossless"]),
    accumulate=st.integers(1, 2),
)
def test_other_buckets_in_mid_training_change_no_bit(
    quad: Any, schedule: str, optimizer: str, seed: int, steps: set[int], codec: str | None, accumulate: int
) -> None:
    case = {"schedule": schedule, "optimizer": optimizer, "seed": seed, "accumulate": accumulate}
    for before, after in quad.run("in_rank_tuning.cut_anew", changes=dict.fromkeys(steps, codec), **case):
        assert before == after


@pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])
@pytest.mark.parametrize(
    "changes",
    [
        {3: "int8", 6: "int8", 9: "int8"},
        {2: "bf16", 5: None},
        {2: None, 4: "int8", 6: "bf16", 8: "lossless", 10: "int8"},
    ],
)
def test_ranks_stay_alike_from_one_compression_to_another(
    quad: Any, schedule: str, changes: dict[int, str | None]
) -> None:
    found = quad.run("in_rank_tuning.moved_between_codecs", schedule=schedule, seed=5, changes=changes)
    plain = quad.run("in_rank_tuning.moved_between_codecs", schedule=schedule, seed=5, changes={})
    assert len({bits for bits, _ in found}) == 1
    for (_, loss), (_, exact) in zip(found, plain, strict=True):
        assert loss == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])
@pytest.mark.parametrize("compress", [None, "auto"])
def test_tuning_is_in_the_ledger_and_changes_no_number(
    pair: Any, schedule: str, compress: str | None
) -> None:
    found = pair.run("in_rank_tuning.tuned", schedule=schedule, steps=9, compress=compress)
    tuning = found[0]["tuning"]
    assert [each["step"] for each in tuning] == [6]
    assert tuning[0]["num_buckets"] >= 1
    assert tuning[0]["predicted_cycle"] <= tuning[0]["predicted_cycle_before"]
    assert tuning[0]["reduce"]["bandwidth"] > 0
    assert (tuning[0]["reason"] != "") == (compress == "auto")
    if tuning[0]["compress"] in (None, "lossless"):
        assert all(a == b for a, b in (each["bits"] for each in found))


def test_a_rank_that_is_late_in_every_step_is_warned_of_once_by_one_rank(pair: Any) -> None:
    first, second = pair.run("in_rank_tuning.waited_for")
    assert second == []
    assert len(first) == 1
    assert "wait for transfers" in first[0]
    assert "model.explain()" in first[0]
