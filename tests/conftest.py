"""What every test shares: reproducible examples, one thread a process, and what a marker asks for.

A test that a machine can't run is skipped there with the reason. In CI (``CI`` is set) what
``.ci/run`` can install is there, so that a missing piece fails instead: a check that nobody runs
would go unnoticed. Only what the kernel refuses is skipped there too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from functools import cache

import pytest
from hypothesis import HealthCheck, settings

# Several ranks share few cores: as under torchrun, each computes in one thread. Set before torch loads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time. `pytest --hypothesis-profile=explore` looks for new ones.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("fixed"), derandomize=False, max_examples=2000)
settings.load_profile("fixed")

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


@cache
def _lacks_ranks() -> str:
    return "" if importlib.util.find_spec("torch") else "torch is not installed"


@cache
def _lacks_browser() -> str:
    if not importlib.util.find_spec("playwright"):
        return "playwright is not installed"
    return "" if any(map(shutil.which, CHROMIUMS)) else "no Chromium is installed"


@cache
def _lacks_root() -> str:
    if not (shutil.which("ip") and shutil.which("tc") and shutil.which("unshare")):
        return "ip, tc or unshare is not installed"
    command = ["unshare", "--user", "--map-root-user", "--net", "true"]
    if os.geteuid() == 0:
        command = ["unshare", "--net", "true"]
    made = subprocess.run(command, capture_output=True, check=False)
    return "" if made.returncode == 0 else _KERNEL_REFUSES


_KERNEL_REFUSES = "the kernel refuses new network namespaces"
_LACKS = {"ranks": _lacks_ranks, "browser": _lacks_browser, "root": _lacks_root}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, lacks in _LACKS.items():
        if item.get_closest_marker(marker) is None or not (reason := lacks()):
            continue
        if os.environ.get("CI") and reason != _KERNEL_REFUSES:
            pytest.fail(f"{reason}, and in CI it must be: .ci/run installs it", pytrace=False)
        pytest.skip(reason)
