from __future__ import annotations

from typing import Any

import pytest

from tonnage.errors import EngineError

pytestmark = pytest.mark.ranks

every_schedule = pytest.mark.parametrize("schedule", ["allreduce", "shard", "early"])


@every_schedule
@pytest.mark.parametrize("pool", ["pair", "quad"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_without_data_count_as_zeros(
    request: pytest.FixtureRequest, pool: str, schedule: str, accumulate: int
) -> None:
    ranks: Any = request.getfixturevalue(pool)
    case = {"schedule": schedule, "accumulate": accumulate, "clip": None}
    for far, alike in ranks.run("in_rank_join.uneven", **case):
        assert alike
        assert far < 1e-6


@pytest.mark.parametrize("schedule", ["allreduce", "shard"])
def test_clipping_takes_all_ranks_along(quad: Any, schedule: str) -> None:
    case = {"schedule": schedule, "accumulate": 1, "clip": 0.05}
    for far, alike in quad.run("in_rank_join.uneven", **case):
        assert alike
        assert far < 1e-6


@every_schedule
def test_what_compression_owes_is_paid_by_ranks_without_data_too(pair: Any, schedule: str) -> None:
    case = {"schedule": schedule, "accumulate": 1, "clip": None, "compress": "int8"}
    for far, alike in pair.run("in_rank_join.uneven", **case):
        assert alike
        assert far < 0.02


def test_ranks_that_left_early_follow_the_others_settings(pair: Any) -> None:
    ours, theirs = pair.run("in_rank_join.by_rates")
    # The last change came after the last step that was announced.
    assert ours == [[theirs[0][0] * 2, 0.8, 0.9]]


@every_schedule
def test_tuning_waits_until_all_ranks_have_data_again(pair: Any, schedule: str) -> None:
    assert pair.run("in_rank_join.tuned", schedule=schedule)[0] >= 1


def test_ranks_that_do_different_things_are_told(pair: Any) -> None:
    for error in pair.answers("in_rank_join.at_odds"):
        assert isinstance(error, EngineError)
        assert "rank 0 has what 'step' and rank 1 'clip'" in str(error)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("without_optimizer", "without an optimizer of the engine's"),
        ("scaled", "a gradient scaler within join()"),
    ],
)
def test_what_cannot_join_is_refused(pair: Any, how: str, said: str) -> None:
    for error in pair.answers(f"in_rank_join.{how}"):
        assert isinstance(error, EngineError)
        assert said in str(error)
