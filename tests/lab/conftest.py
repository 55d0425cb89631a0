"""The ways to make a lab, each skipped where this machine refuses it."""

from __future__ import annotations

import pytest

from tonnage.lab import Way, probe


@pytest.fixture(params=["root", "user"])
def way(request: pytest.FixtureRequest) -> Way:
    reason = probe(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param
