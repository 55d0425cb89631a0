"""A job is told what bounds it: ledgers that were made so that one thing does."""

from __future__ import annotations

import dataclasses

import pytest

from tonnage.engine.explain import explain, waits_more_than_predicted
from tonnage.engine.fit import LinkFit
from tonnage.engine.tune import Tuning, Way
from tonnage.ledger import Ledger, Recorder
from tonnage.plan import Link

NBYTES = 10_000_000


def ledger(compute: float, exposed: float, transfer: float, steps: int = 12) -> Ledger:
    """Steps of ``compute + exposed`` seconds with one transfer each way that ends with the step."""
    recorder = Recorder(0)
    add, channel = recorder.add, recorder.channel
    now = 0.0
    for step in range(steps):
        end = now + compute + exposed
        add(channel("step", "step"), step, 0, 0, now, end)
        add(channel("compute", "backward", link="device"), step, 0, 0, now, now + compute)
        for op, kind, waited in (("reduce-scatter", "gradient", 0.9), ("all-gather", "parameter", 0.1)):
            at = channel(kind, op, group_size=2, link="nic", label="b00")
            add(at, step, NBYTES, NBYTES // 2, end - transfer, end, waited * exposed)
        now = end
    return recorder.ledger({})


def tuning(seconds: float) -> Tuning:
    """On a link that needs so many seconds for a step's two transfers."""
    fit = LinkFit(link=Link(rate=2 * NBYTES / seconds), error=0.0, num_samples=9)
    return Tuning(
        step=6,
        boundaries=(1,),
        compress=None,
        changed=False,
        cycle=1.0,
        before=1.0,
        compute=1.0,
        way=Way(compress=None, reduce=fit, gather=fit),
    )


@pytest.mark.parametrize(
    ("compute", "exposed", "transfer", "needed", "told"),
    [
        (1.0, 0.01, 0.5, 0.5, "Computation sets the pace"),
        (0.2, 0.8, 1.0, 0.95, "The link sets the pace"),
        (0.5, 0.5, 1.0, 0.1, "a rank that is late"),
        (1.0, 0.3, 0.4, 0.3, "gradients that the optimizer waits for: 90% of the waiting"),
    ],
)
def test_what_bounds_a_job_is_named(compute, exposed, transfer, needed, told):
    text = explain(ledger(compute, exposed, transfer), schedule="shard", compress=None, tuning=tuning(needed))
    assert told in text
    assert text.count(" the pace") <= 1


def test_a_job_of_few_steps_or_one_rank_is_told_so():
    few = explain(ledger(1.0, 0.1, 0.2, steps=4), schedule="shard", compress=None, tuning=None)
    assert "Too few steps" in few
    recorder = Recorder(0)
    for step in range(9):
        recorder.add(recorder.channel("step", "step"), step, 0, 0, step, step + 1.0)
    alone = explain(recorder.ledger({}), schedule="shard", compress=None, tuning=None)
    assert "one rank" in alone


@pytest.mark.parametrize(
    ("num_steps", "waited", "cycle", "warned"),
    [
        (8, 0.60, 1.0, True),  # nothing was predicted to show
        (8, 0.60, 1.5, False),  # about half was
        (8, 0.20, 1.0, False),  # within what a machine that others use adds
        (7, 0.60, 1.0, False),  # too early to tell
    ],
)
def test_less_overlap_than_predicted_is_warned_of(
    num_steps: int, waited: float, cycle: float, warned: bool
) -> None:
    chosen = dataclasses.replace(tuning(0.5), cycle=cycle)
    before = [(step, 1.0, 0.9) for step in range(chosen.step + 1)]
    after = [(chosen.step + 1 + k, 1.0, waited) for k in range(num_steps)]
    text = waits_more_than_predicted(chosen, [*before, *after])
    assert ("model.explain()" in text) is warned
    assert ("600 ms of each step (60%)" in text) is warned
