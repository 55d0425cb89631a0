from __future__ import annotations

import os
import signal
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

STEPS = 12
NOTHING = {"early": [], "stale": [], "differing": []}


@pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])
@pytest.mark.parametrize("late", ["gradient", "forward"])
def test_no_bucket_leaves_early_and_nothing_stale_is_read_when_computation_is_late(
    pair: Any, schedule: str, late: str
) -> None:
    found = pair.run("in_rank_guarantees.watched", schedule=schedule, late=late, steps=STEPS)
    assert found == [NOTHING] * 2


@pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])
def test_no_bucket_leaves_early_and_nothing_stale_is_read_when_transfers_are_late(
    pair: Any, schedule: str
) -> None:
    pair.start("in_rank_guarantees.watched", schedule=schedule, late="paused", steps=STEPS)
    for step in range(STEPS):
        # A stopped rank stops sending wherever it is; the other one runs into what is missing.
        victim = step % 2
        pair.told(1 - victim)
        os.kill(pair.processes[victim].pid, signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, pair.processes[victim].pid, os.WSTOPPED | os.WNOWAIT)
        finally:
            os.kill(pair.processes[victim].pid, signal.SIGCONT)
    assert pair.collect() == [NOTHING] * 2


def test_an_exchange_does_not_overtake_gradients_that_others_wait_for(pair: Any) -> None:
    norms = pair.run("in_rank_guarantees.late_sender_meets_exchange")
    assert norms[0] == norms[1] > 0


def test_many_short_trainings_neither_hang_nor_leave_threads_behind(pair: Any) -> None:
    for before, after, steps in pair.run("in_rank_guarantees.stress", runs=25, seed=1):
        assert after == before
        assert steps >= 25


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 10))
def test_two_hundred_short_trainings_in_a_row_do_not_hang(pair: Any, seed: int) -> None:
    for before, after, _ in pair.run("in_rank_guarantees.stress", runs=25, seed=seed):
        assert after == before


def test_one_rank_may_read_the_parameters_while_the_other_goes_on(pair: Any) -> None:
    assert pair.run("in_rank_guarantees.one_rank_reads", steps=30) == [[], []]
