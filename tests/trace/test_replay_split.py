"""Waiting against moving, with answers that are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tonnage.ledger import bus_factor
from tonnage.trace import Job, split
from tonnage.trace.replay_split import moving_speed

Jobs = Callable[[str], Job]


def test_dlrm_waits_for_rank_7(job: Jobs) -> None:
    found = split(job("dlrm_v100_8ranks"))
    seconds = sum(each.seconds for each in found.kinds)
    # 48,542 us in the kernels of all ranks, of which 46,843 us before the last rank came.
    assert seconds * 8 == pytest.approx(48_542e-6, rel=1e-6)
    assert found.waiting / seconds == pytest.approx(0.965, abs=0.0005)
    assert [(each.rank, each.times) for each in found.last] == [(7, 5), (5, 2), (4, 1)]
    assert [each.caused for each in found.last] == pytest.approx([35_552e-6, 6_282e-6, 5_009e-6])


def test_bus_bandwidth_is_that_of_moving_alone(job: Jobs) -> None:
    made = job("dlrm_v100_8ranks")
    (large,) = [each for each in made.transfers if each.nbytes == 1_576_964]
    assert moving_speed(made, large) * bus_factor("all-reduce", 8) == pytest.approx(31.7e9, rel=0.05)


def test_rank_3_came_last_to_the_first_bucket_of_every_step(job: Jobs) -> None:
    found = split(job("own_gloo_ddp_4ranks"))
    assert found.last[0].rank == 3
    assert found.last[0].times >= 6
    assert found.exposed <= found.communication


def test_one_rank_claims_neither_waiting_nor_bandwidth(job: Jobs) -> None:
    found = split(job("cpu_only_gloo_w300"))
    assert math.isnan(found.waiting)
    assert all(math.isnan(each.busbw) and math.isnan(each.waiting) for each in found.kinds)
    assert found.last == ()
