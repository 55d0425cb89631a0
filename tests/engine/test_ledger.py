from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tonnage.ledger import Ledger, from_bytes, wire_nbytes

pytestmark = pytest.mark.ranks

STEPS = 4
OPS = {
    "shard": ["reduce-scatter", "all-gather"],
    "early": ["reduce-scatter", "all-gather"],
    "allreduce": ["all-reduce"],
}


def recorded(pool: Any, schedule: str, delay: float = 0.0) -> tuple[Ledger, dict[str, int], int]:
    case = {"schedule": schedule, "steps": STEPS, "delay": delay}
    answers = pool.run("in_rank_ledger.recorded", **case)
    assert [data is not None for data, _, _ in answers] == [True] + [False] * (pool.size - 1)
    data, sizes, nbytes = answers[0]
    return from_bytes(data), dict(sizes), nbytes


@pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])
def test_bytes_of_each_bucket_and_step_follow_the_formula(quad: Any, schedule: str) -> None:
    ledger, sizes, _ = recorded(quad, schedule)
    for op in OPS[schedule]:
        rows = ledger.filter(op=op).frame
        assert rows.height == 4 * STEPS * len(sizes)
        for row in rows.iter_rows(named=True):
            assert row["nbytes"] == sizes[row["label"]]
            assert row["wire_nbytes"] == wire_nbytes(op, row["nbytes"], 4)
            assert (row["group"], row["group_size"], row["calls"]) == ("dp", 4, 1)
    assert set(ledger.filter(pl.col("step") >= 0).movements.frame["op"]) == set(OPS[schedule])
    assert ledger.facts["run"] == "mine"
    assert ledger.facts["world_size"] == 4


def test_the_first_values_are_handed_to_all_outside_of_steps(quad: Any) -> None:
    ledger, _, nbytes = recorded(quad, "shard")
    rows = ledger.filter(step=-1).frame
    assert set(zip(rows["kind"], rows["op"], rows["nbytes"], strict=True)) == {
        ("parameter", "broadcast", nbytes)
    }
    # Three ranks received the whole, whoever of the tree sent it.
    assert rows["wire_nbytes"].sum() == 3 * nbytes


@pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])
def test_each_step_of_each_rank_has_computation_and_no_more_exposed_time_than_there_was(
    quad: Any, schedule: str
) -> None:
    ledger, _, _ = recorded(quad, schedule)
    assert ledger.ranks == [0, 1, 2, 3]
    assert ledger.steps == list(range(STEPS))
    for rank in ledger.ranks:
        for step in ledger.steps:
            computed = ledger.filter(rank=rank, step=step, kind="compute").frame
            assert set(computed["op"]) == {"forward", "backward", "optimizer"}
    times = ledger.step_times()
    assert times.height == 4 * STEPS
    assert (times["seconds"] > 0).all()
    assert (times["exposed"] >= 0).all()
    for rank in ledger.ranks:
        own = times.filter(pl.col("rank") == rank).sort("step")
        # A step's parameters travel under the next step's forward pass, which may have to wait for them.
        until_waited_for = own["seconds"] + own["seconds"].shift(-1, fill_value=0)
        assert (own["exposed"] <= until_waited_for + 1e-9).all()
        assert own["exposed"].sum() <= own["seconds"].sum()


@pytest.mark.parametrize(
    "schedule",
    [
        "shard",
        "early",
        "allreduce",
    ],
)
def test_no_transfer_stops_before_it_starts(quad: Any, schedule: str) -> None:
    ledger, _, _ = recorded(quad, schedule)
    assert (ledger.movements.frame["stop"] >= ledger.movements.frame["start"]).all()


@pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])
def test_transfers_run_beside_computation_that_takes_long(pair: Any, schedule: str) -> None:
    ledger, _, _ = recorded(pair, schedule, delay=0.01)
    assert ledger.step_times()["overlapped"].median() > 0


@pytest.mark.root
@pytest.mark.parametrize("num_ranks", [2])
def test_the_kernel_counts_as_many_bytes_as_the_ledger(num_ranks: int) -> None:
    from tonnage.lab import open_lab

    lines: list[str] = []
    errors: list[str] = []
    script = Path(__file__).with_name("training_job.py")
    with open_lab(num_ranks, 125e6) as hosts:
        if not hosts.shaped:
            pytest.skip(hosts.note)
        result = hosts.run(
            [sys.executable, str(script), "shaped"],
            env={"OMP_NUM_THREADS": "1"},
            on_stdout=lambda _, line: lines.append(line),
            on_stderr=lambda _, line: errors.append(line),
            timeout=120,
        )
    assert result.exit_code == 0, "\n".join(errors)
    found = json.loads(lines[-1])
    for told, counted in zip(found["ledger"], found["kernel"], strict=True):
        assert told > 25 * 13e6 / 2
        assert told == pytest.approx(counted, rel=0.03)
