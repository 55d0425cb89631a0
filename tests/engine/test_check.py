from __future__ import annotations

from typing import Any

import pytest

from tonnage.errors import EngineError

pytestmark = pytest.mark.ranks

every_schedule = pytest.mark.parametrize("schedule", ["allreduce", "shard", "early"])


@every_schedule
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_checked_run_equals_ddp_and_raises_nothing(pair: Any, schedule: str, set_to_none: bool) -> None:
    case = {"schedule": schedule, "set_to_none": set_to_none, "accumulate": 2}
    assert pair.run("in_rank_check.beside_ddp", **case) == [[], []]


@every_schedule
@pytest.mark.parametrize("compress", ["int8", "lossless"])
def test_a_compressed_run_can_be_checked_too(pair: Any, schedule: str, compress: str) -> None:
    assert pair.run("in_rank_check.compressed", schedule=schedule, compress=compress) == [True, True]


@every_schedule
def test_a_gradient_written_after_its_bucket_left_is_found(pair: Any, schedule: str) -> None:
    for error in pair.answers("in_rank_check.written_late", schedule=schedule):
        assert isinstance(error, EngineError)
        assert "is not that of a blocking exchange" in str(error)
        assert "0" in error.where


def test_parameters_that_drift_apart_are_named_on_every_rank(pair: Any) -> None:
    for error in pair.answers("in_rank_check.drifted"):
        assert isinstance(error, EngineError)
        assert "1 of 12 parameters differ between ranks" in str(error)
        assert error.where == "rank 0 and rank 1"


def test_what_a_step_used_is_not_left_to_be_read_again(pair: Any) -> None:
    assert pair.run("in_rank_check.left_behind") == [(True, False)] * 2
