"""Traces of several ranks, read once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tonnage.trace import Job, read_trace, replay_job

TRACES = Path(__file__).parents[1] / "data" / "traces"


@cache
def _job(folder: str) -> Job:
    return replay_job(read_trace(TRACES / folder))


@pytest.fixture(scope="session")
def job() -> Callable[[str], Job]:
    """The job of a folder of traces."""
    return _job
