"""The fit stands outliers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.engine.fit import fit_link
from tonnage.errors import EngineError

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
