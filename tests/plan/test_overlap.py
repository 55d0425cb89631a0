"""The simulated step: laws of the schedule, and agreement with the closed form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.plan import Batch, Layout, Recipe, device_cluster, load_model, predict
from tonnage.plan.grid import grid_of
from tonnage.plan.overlap import StepPlan, Task, gathered_pass, run, simulate, stage_order, text_timeline
from tonnage.plan.steptime import step_time


def plan(p: int, v: int, m: int, **rest: object) -> StepPlan:
    chunks = p * v
    return StepPlan(
        forward=(1.0 / v,) * chunks,
        backward=(2.0 / v,) * chunks,
        stages=p,
        micro_batches=m,
        **rest,  # type: ignore[arg-type]
    )


@given(p=st.integers(1, 8), v=st.integers(1, 4), groups=st.integers(1, 6))
def test_equal_stages_have_the_bubble_of_the_paper(p: int, v: int, groups: int) -> None:
    v = v if p > 1 else 1
    m = p * groups
    assert simulate(plan(p, v, m)).seconds == pytest.approx(3 * m + 3 * (p - 1) / v)


@given(p=st.integers(1, 8), v=st.integers(1, 4), m=st.integers(1, 40))
def test_no_schedule_locks_up_and_each_pass_happens_once(p: int, v: int, m: int) -> None:
    v = v if p > 1 else 1
    for stage in range(p):
        order = stage_order(stage, stages=p, virtual=v, micro_batches=m)
        assert len(set(order)) == len(order) == 2 * v * m
    result = simulate(plan(p, v, m))
    assert result.seconds >= 3 * m
    assert all(busy == pytest.approx(3 * m) for busy in result.busy)


@settings(deadline=None)
@given(p=st.integers(2, 6), v=st.integers(1, 3), groups=st.integers(8, 14), send=st.floats(0, 0.3))
def test_a_long_step_continues_at_the_pace_that_was_simulated(
    p: int, v: int, groups: int, send: float
) -> None:
    from tonnage.plan.overlap import _simulate

    whole = plan(p, v, p * groups, send=send, blocking_sends=True, reduce=(2.0,) * p, buckets=(4,) * p)
    assert simulate(whole).seconds == pytest.approx(_simulate(whole, whole.micro_batches).seconds, rel=0.01)


def test_gradients_hide_under_the_last_backward_pass_but_for_one_bucket() -> None:
    hidden = simulate(plan(1, 1, 4, reduce=(1.0,), buckets=(10,)))
    assert hidden.seconds == pytest.approx(12.1)
    shown = simulate(plan(1, 1, 4, reduce=(1.0,), buckets=(10,), overlap_reduce=False))
    assert shown.seconds == pytest.approx(13.0)
    assert shown.shown == (pytest.approx(1.0),)


@given(send=st.floats(0.01, 0.5), p=st.integers(2, 6))
def test_sends_cost_at_most_two_a_micro_batch_and_more_when_they_block(send: float, p: int) -> None:
    m = 8 * p
    none, free, blocking = (
        simulate(plan(p, 1, m, **rest)).seconds  # type: ignore[arg-type]
        for rest in ({}, {"send": send}, {"send": send, "blocking_sends": True})
    )
    assert none < free <= blocking + 1e-9
    assert blocking <= none + 2 * (m + p) * send + 1e-9


@given(
    layers=st.lists(st.floats(0.1, 2.0), min_size=1, max_size=12),
    gather=st.floats(0.0, 3.0),
    reduce=st.floats(0.0, 3.0),
)
def test_gathered_layers_take_at_least_either_stream_and_at_most_both(
    layers: list[float], gather: float, reduce: float
) -> None:
    seconds = gathered_pass(layers, gather, reduce)
    exchange = len(layers) * (gather + reduce)
    assert seconds >= max(sum(layers) + gather, exchange) - 1e-9
    assert seconds <= sum(layers) + exchange + 1e-9


def test_a_stream_works_in_the_order_of_issue() -> None:
    tasks = [
        Task(stream=0, seconds=2.0),
        Task(stream=1, seconds=1.0, after=(0,)),
        Task(stream=0, seconds=1.0),
        Task(stream=0, seconds=1.0, after=(1,)),
    ]
    starts, stops = run(tasks, 2)
    assert starts == [0.0, 2.0, 2.0, 3.0]
    assert stops == [2.0, 3.0, 3.0, 4.0]


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    v=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 3]),
    groups=st.integers(1, 8),
    overlap=st.booleans(),
)
def test_the_closed_form_is_near_the_simulation(
    tp: int, pp: int, v: int, zero: int, groups: int, overlap: bool
) -> None:
    # The search ranks by the closed form what it then simulates; 5 % is what ranking by it may lose.
    model = load_model("llama3-8b")
    layout = Layout(
        dp=64 // (tp * pp),
        tp=tp,
        pp=pp,
        sp=tp > 1,
        virtual=v if pp > 1 else 1,
        zero=zero if pp == 1 else min(zero, 1),
        recipe=Recipe(overlap_grad=overlap, overlap_p2p=overlap),
    )
    batch = Batch(sequences=layout.dp * pp * groups, seq=4096)
    cluster = device_cluster("h100", 64)
    closed = float(step_time(model, grid_of([layout], model, batch), cluster).total[0])
    assert closed == pytest.approx(predict(model, cluster, layout, batch).seconds, rel=0.05)


def test_the_timeline_shows_each_stage() -> None:
    lines = text_timeline(simulate(plan(4, 1, 8, optimizer=(1.0,) * 4)), 4, width=60)
    assert len(lines) == 4
    assert all({"F", "B", "o"} <= set(line) for line in lines)
    assert "." in lines[3]
