"""The fit stands outliers, the hash tells plans apart, and no plan is changed for noise."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.engine.tune import fit_link, plan_hash, should_replan
from tonnage.errors import EngineError
from tonnage.plan import Timing

SIZES = [2**k for k in range(10, 26)]


@given(st.floats(0, 1e-2), st.floats(6, 11))
def test_an_exact_line_is_found_again(latency, rate):
    bandwidth = 10.0**rate
    fit = fit_link((size, latency + size / bandwidth) for size in SIZES)
    assert fit.link.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert fit.link.latency == pytest.approx(latency, rel=1e-3, abs=1e-6 * SIZES[-1] / bandwidth)
    assert fit.error < 1e-3


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_a_quarter_of_late_transfers_does_not_bend_the_line(seed):
    random = np.random.default_rng(seed)
    samples = []
    for size in SIZES:
        for repeat in range(9):
            late = 50 if repeat < 2 else 1
            samples.append((size, (1e-3 + size / 1e8) * random.uniform(0.98, 1.02) * late))
    fit = fit_link(samples)
    assert fit.link.bandwidth == pytest.approx(1e8, rel=0.05)
    assert fit.link.latency == pytest.approx(1e-3, rel=0.1)
    assert fit.num_samples == len(samples)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(1e-6, 10)), max_size=30))
def test_a_line_that_is_found_rises_and_starts_at_zero_or_later(samples):
    try:
        fit = fit_link(samples)
    except EngineError:
        return
    assert fit.link.latency >= 0
    assert fit.link.bandwidth > 0
    assert np.isfinite(fit.error)


@pytest.mark.parametrize(
    ("samples", "what"),
    [
        ([], "has 0"),
        ([(8, 1.0), (8, 2.0)], "has 1"),
        ([(8, 1.0), (16, float("nan"))], "16 bytes in nan"),
        ([(8, 1.0), (16, 0.0)], "16 bytes in 0.0"),
        ([(8, 2.0), (16, 1.0)], "no longer"),
    ],
)
def test_samples_that_show_no_line_are_refused(samples, what):
    with pytest.raises(EngineError, match=what):
        fit_link(samples)


@given(st.lists(st.tuples(st.text(), st.lists(st.integers(0, 9), max_size=3)), min_size=2, max_size=6))
def test_plans_that_differ_in_anything_hash_differently(tensors):
    names, shapes = [name for name, _ in tensors], [shape for _, shape in tensors]
    count = len(names)
    hashes = [plan_hash((count,), names, shapes), plan_hash((1, count), names, shapes)]
    swapped = [names[1], names[0], *names[2:]], [shapes[1], shapes[0], *shapes[2:]]
    if swapped != (names, shapes):
        hashes.append(plan_hash((count,), *swapped))
    assert len(set(hashes)) == len(hashes)
    assert all(-(2**63) <= each < 2**63 for each in hashes)


def test_another_process_hashes_alike():
    code = "from tonnage.engine.tune import plan_hash; print(plan_hash([1, 2], ['a', 'b'], [(2, 3), ()]))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == plan_hash((1, 2), ["a", "b"], [[2, 3], []])


def test_borders_that_do_not_fit_the_tensors_have_no_hash():
    with pytest.raises(EngineError, match="borders"):
        plan_hash((1, 3), ["a", "b"], [(), ()])


def lasting(seconds):
    return Timing(reduced=seconds, forward=0.0, exposed=0.0, num_buckets=1)


@pytest.mark.parametrize(
    ("best", "cost", "worth"),
    [(1.0, 0.0, False), (0.98, 0.0, False), (0.9, 1.0, True), (0.9, 101.0, False), (1.1, 0.0, False)],
)
def test_a_plan_is_changed_only_for_what_it_earns(best, cost, worth):
    assert should_replan(lasting(1.0), lasting(best), cost=cost) is worth
