"""The bound and the gap: two terms, three parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.report.bound import Bound, find_bound, find_gap

SECONDS = st.floats(0.001, 100)


@given(SECONDS, SECONDS)
def test_a_schedule_that_hides_all_it_can_and_nothing_else_has_no_gap(compute: float, link: float) -> None:
    bound = Bound(compute=compute, link=link)
    exposed = max(0.0, link - compute)
    gap = find_gap(bound, step=compute + exposed, compute=compute, exposed=exposed)
    assert (gap.seconds, gap.standing, gap.slowed, gap.rest) == pytest.approx((0, 0, 0, 0), abs=1e-9)


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_each_cause_shows_in_its_own_part(
    compute: float, link: float, standing: float, slowed: float, rest: float
) -> None:
    bound = Bound(compute=compute, link=link)
    exposed = max(0.0, link - compute) + standing
    gap = find_gap(bound, step=compute + slowed + exposed + rest, compute=compute + slowed, exposed=exposed)
    assert (gap.standing, gap.slowed, gap.rest) == pytest.approx((standing, slowed, rest), abs=1e-6)


def test_without_compute_rows_its_part_lies_in_the_rest() -> None:
    gap = find_gap(Bound(compute=1.0, link=0.5), step=1.5, compute=0.0, exposed=0.2)
    assert gap.slowed is None
    assert gap.rest == pytest.approx(0.3)


def test_a_bound_needs_one_of_its_terms() -> None:
    assert find_bound(compute_time=None, link_rate=None, wire_nbytes=8) is None
    assert find_bound(compute_time=None, link_rate=4.0, wire_nbytes=0) is None
    assert find_bound(compute_time=None, link_rate=4.0, wire_nbytes=8) == Bound(compute=None, link=2.0)
    assert find_bound(compute_time=3.0, link_rate=None, wire_nbytes=8) == Bound(compute=3.0, link=None)
