"""Replays: the run as it was, and as it would have been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tonnage.errors import UsageError
from tonnage.trace import Job, check_change, read_trace, replay, stragglers
from tonnage.trace.graph import Moment, solve
from tonnage.trace.replay_job import replay_job, step_times
from tonnage.trace.replay_pace import at_others_pace

Jobs = Callable[[str], Job]
TRACES = Path(__file__).parents[1] / "data" / "traces"
SEVERAL = ["dlrm_v100_8ranks", "own_gloo_ddp_4ranks", "own_gloo_manual_4ranks", "sampled_2of128"]
ALL = [*SEVERAL, "nsys_2gpu", "cpu_only_gloo_w300"]
CHANGES = [
    "nic=2x",
    "compress=bf16",
    "bucket=25MB",
    "bucket=100kB",
    "fuse=yes",
    "straggler=none",
    "slow=none",
    "early=yes",
    "overlap=full",
    "sync=none",
    "nic=2x,compress=int8,straggler=none",
]


@pytest.mark.parametrize("folder", ALL)
def test_the_unchanged_run_takes_as_long_as_the_trace_says(job: Jobs, folder: str) -> None:
    made = job(folder)
    solved = step_times(made, solve(made.graph))
    for rank in read_trace(TRACES / folder).ranks:
        for step in rank.steps:
            assert solved[step.number] >= 0.98 * (step.stop - step.start) * 1e-9
    longest = {
        step.number: max(
            (each.stop - each.start) * 1e-9
            for rank in read_trace(TRACES / folder).ranks
            for each in rank.steps
            if each.number == step.number
        )
        for step in read_trace(TRACES / folder).ranks[0].steps
    }
    assert solved == pytest.approx(longest, rel=0.02)
    assert replay(made).saved == pytest.approx(0, abs=0.02 * replay(made).step)


@pytest.mark.parametrize("folder", SEVERAL)
def test_times_come_from_edges_and_not_from_pins(job: Jobs, folder: str) -> None:
    made = job(folder)
    pinned = np.ones(len(made.graph), np.bool_)
    pinned[made.graph.target] = False
    # Each rank's first moment, and little else, falls at a given time.
    assert pinned.sum() <= len(made.ranks) + 2
    shift = made.graph.delay.copy()
    first = int(np.flatnonzero(pinned & (made.graph.rank == 0))[0])
    shift[first] += 10**9
    late = solve(replace(made.graph, delay=shift))
    # A second's delay of rank 0 reaches the ends of the collectives of all others.
    for rank in range(1, len(made.ranks)):
        ends = (made.graph.rank == rank) & (made.graph.kind == Moment.DONE)
        assert (late - made.graph.at)[ends].max() > 5 * 10**8


@pytest.mark.parametrize("folder", ALL)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_gives_a_time_that_can_be(job: Jobs, folder: str, change: str) -> None:
    outcome = replay(job(folder), change)
    assert 0 < outcome.step < 20 * replay(job(folder)).step


@pytest.mark.parametrize("folder", SEVERAL)
@pytest.mark.parametrize(
    "change", ["nic=2x", "compress=bf16", "straggler=none", "slow=none", "early=yes", "sync=none"]
)
def test_what_only_takes_work_away_never_costs_time(job: Jobs, folder: str, change: str) -> None:
    assert replay(job(folder), change).saved >= 0


@pytest.mark.parametrize("folder", SEVERAL)
def test_faster_links_save_more_the_faster_they_are(job: Jobs, folder: str) -> None:
    saved = [replay(job(folder), f"nic={factor}x").saved for factor in (1, 1.5, 2, 4, 100)]
    assert saved[0] == 0
    assert saved == sorted(saved)
    assert replay(job(folder), "nic=0.5x").saved <= 0


def test_the_planted_straggler_is_found_and_its_30_ms_with_it(job: Jobs) -> None:
    found = stragglers(job("own_gloo_ddp_4ranks"))
    assert [each.rank for each in found] == [3]
    assert found[0].seconds == pytest.approx(0.030, rel=0.1)
    outcome = replay(job("own_gloo_ddp_4ranks"), "straggler=none")
    assert outcome.saved == pytest.approx(0.030, rel=0.1)
    assert outcome.note == "rank 3 at the others' pace"


def test_without_the_straggler_the_other_ranks_move(job: Jobs) -> None:
    made = job("own_gloo_ddp_4ranks")
    changed, late = at_others_pace(made, made.graph)
    assert late == (3,)
    earlier = made.graph.at - solve(changed)
    for rank in range(3):
        assert earlier[made.built.borders[rank][-1][2]] > 3 * 0.025 * 1e9


def test_no_straggler_is_named_where_there_is_none(job: Jobs) -> None:
    assert stragglers(job("sampled_2of128")) == ()
    one = replay(job("cpu_only_gloo_w300"), "straggler=none")
    assert (one.saved, one.note) == (0, "one rank's trace doesn't tell who is late")


def test_joining_24_all_reduces_saves_their_latency(job: Jobs) -> None:
    outcome = replay(job("own_gloo_manual_4ranks"), "fuse=yes")
    assert outcome.touched == 72
    assert outcome.saved > 0.5 * replay(job("own_gloo_manual_4ranks")).step


def test_steps_can_be_chosen(job: Jobs) -> None:
    made = replay_job(read_trace(TRACES / "own_gloo_ddp_4ranks", steps=range(3, 4)))
    assert made.num_steps == 1
    assert list(step_times(made, made.graph.at)) == [3]
    assert replay(made).step < 1.5 * replay(job("own_gloo_ddp_4ranks")).step


def test_edges_only_lead_forward_in_measured_time(job: Jobs) -> None:
    for folder in ALL:
        graph = job(folder).graph
        assert (graph.at[graph.target] >= graph.at[graph.source]).all()


@pytest.mark.parametrize(
    "change", ["", " , ", "foo=1", "nic=fast", "nic=0", "nic=-2x", "bucket=0", "compress=wool", "straggler=x"]
)
def test_what_is_no_change_is_refused(change: str) -> None:
    with pytest.raises(UsageError):
        check_change(change)


def test_a_rank_that_is_not_there_is_refused(job: Jobs) -> None:
    with pytest.raises(UsageError, match="rank 99"):
        replay(job("own_gloo_ddp_4ranks"), "straggler=99")
