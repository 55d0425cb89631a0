from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

_CASE = "in_rank_compiled.equal_to_ddp"
every_schedule = pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])


@every_schedule
@pytest.mark.parametrize(
    "how", ["before", "in place", "by block", "blocks replaced", "after", "after, in place"]
)
def test_a_compiled_model_trains_as_ddp_does(pair: Any, how: str, schedule: str) -> None:
    for far, _ in pair.run(_CASE, how=how, schedule=schedule, alone=False):
        assert far < 1e-6


@pytest.mark.parametrize("how", ["before", "in place", "by block"])
def test_a_part_of_a_compiled_model_called_by_itself_is_up_to_date(pair: Any, how: str) -> None:
    for far, _ in pair.run(_CASE, how=how, schedule="shard", alone=True):
        assert far < 1e-6


@every_schedule
@pytest.mark.parametrize(("how", "graphs"), [("before", 1), ("in place", 1), ("by block", 3)])
def test_the_engine_s_hooks_break_no_graph(pair: Any, how: str, graphs: int, schedule: str) -> None:
    for _, counted in pair.run(_CASE, how=how, schedule=schedule, alone=False):
        assert counted <= graphs
        assert counted > 0


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_checkpoint_is_the_same_compiled_or_not(pair: Any, tmp_path: Path, compiled_first: bool) -> None:
    case = {"folder": str(tmp_path / "saved"), "compiled_first": compiled_first}
    for names, far in pair.run("in_rank_compiled.carried", **case):
        assert far == 0
        assert "first.weight" in names
