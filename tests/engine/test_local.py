from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tonnage.engine import AVERAGE, LocalSteps, Nesterov
from tonnage.errors import EngineError

pytestmark = pytest.mark.ranks

CODECS = [None, "bf16", "int8"]

SCRIPT = Path(__file__).with_name("in_rank_local.py")
SOON = 20.0
"""Seconds in which others must name a rank that is gone, on a busy machine."""

Start = Callable[[int, str], list[subprocess.Popen[bytes]]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Start]:
    """Starts ranks as a launcher would; what rank ``r`` says lies in ``out<r>`` and ``err<r>``."""
    ranks: list[subprocess.Popen[bytes]] = []

    def begin(num_ranks: int, compress: str) -> list[subprocess.Popen[bytes]]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(num_ranks):
            env = {**os.environ, **quiet, **job, "RANK": str(rank)}
            with (tmp_path / f"out{rank}").open("wb") as out, (tmp_path / f"err{rank}").open("wb") as err:
                command = [sys.executable, str(SCRIPT), compress]
                ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))
        return ranks

    yield begin
    for each in ranks:
        if each.poll() is None:
            each.kill()
        each.wait()


@pytest.mark.parametrize("pool", ["pair", "quad"])
def test_an_average_after_every_step_is_plain_data_parallel_sgd(
    pool: str, request: pytest.FixtureRequest
) -> None:
    ranks: Any = request.getfixturevalue(pool)
    assert max(ranks.run("in_rank_local.beside_plain_data_parallel", steps=10)) < 2e-6


@pytest.mark.parametrize("pool", ["pair", "quad"])
def test_outer_steps_are_those_of_diloco_in_one_process(pool: str, request: pytest.FixtureRequest) -> None:
    ranks: Any = request.getfixturevalue(pool)
    assert max(ranks.run("in_rank_local.against_one_process", every=5, rounds=4)) < 1e-5


@pytest.mark.parametrize("compress", [*CODECS, "lossless"])
@pytest.mark.parametrize("stream", [False, True])
def test_ranks_share_the_same_bits_after_every_outer_step(
    quad: Any, compress: str | None, stream: bool
) -> None:
    found = quad.run("in_rank_local.outer_steps", compress=compress, stream=stream, every=6, steps=25)
    first = found[0]
    for other in found[1:]:
        assert other["shared"] == first["shared"]
        assert other["synced"] == first["synced"]
    changes = sum(a != b for a, b in zip(first["shared"], first["shared"][1:], strict=False))
    # Streamed fragments, three or four of them, take turns; each has its own outer steps.
    assert 9 <= changes <= 16 if stream else changes == 4
    # Between outer steps ranks go their own ways.
    apart = [found[1]["same"][i] != each for i, each in enumerate(first["same"])]
    assert apart.count(False) == (0 if stream else 4)
    assert all(each["losses"][1] < each["losses"][0] for each in found)


@pytest.mark.parametrize("compress", CODECS)
def test_the_ledger_holds_the_outer_gradients_bytes(quad: Any, compress: str | None) -> None:
    found = quad.run(
        "in_rank_local.outer_steps", compress=compress, stream=False, every=6, steps=12, fragments=1
    )
    rows, numel = found[0]["rows"], found[0]["numel"]
    assert {(row["op"], row["label"]) for row in rows} == {("all-reduce", "outer b00")}
    assert {row["rank"] for row in rows} == {0, 1, 2, 3}
    per_value = {None: 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}[compress]
    for row in rows:
        assert row["nbytes"] == pytest.approx(4 * numel, rel=0.03)
        assert row["wire_nbytes"] == pytest.approx(2 * 3 / 4 * per_value * numel, rel=0.06)


def test_fifty_steps_and_int8_move_a_hundred_times_fewer_bytes_a_token(pair: Any) -> None:
    found = pair.run("in_rank_local.outer_steps", compress="int8", stream=True, every=50, steps=151)
    rows, numel = found[0]["rows"], found[0]["numel"]
    moved = sum(row["wire_nbytes"] for row in rows if row["rank"] == 0)
    # Two ranks of plain data parallelism send the gradients' bytes once a step. The readings of sync()
    # before evaluation are moved as well.
    assert 151 * 4 * numel / moved > 100


@pytest.mark.parametrize("compress", CODECS)
@pytest.mark.parametrize("stop", [6, 7, 11])
def test_a_training_taken_up_again_goes_on_bit_for_bit(pair: Any, compress: str | None, stop: int) -> None:
    # After 7 steps a fragment is under way.
    assert pair.run("in_rank_local.resumed", compress=compress, stop=stop, steps=20) == [[], []]


def test_halves_and_frozen_parameters_are_taken_as_they_are(pair: Any) -> None:
    assert pair.run("in_rank_local.with_halves_and_frozen_ones") == [[True, True]] * 2


def test_ranks_with_unlike_models_are_told_so(pair: Any) -> None:
    for answer in pair.answers("in_rank_local.unlike_models"):
        assert isinstance(answer, EngineError)
        assert "different models" in answer.what


def test_a_rank_that_diverged_stops_all(pair: Any) -> None:
    for answer in pair.answers("in_rank_local.diverged"):
        assert isinstance(answer, EngineError)
        assert "not finite" in answer.what


@pytest.mark.parametrize(("victim", "compress"), [(2, "int8"), (0, "int8"), (1, "")])
def test_a_killed_rank_is_named_by_all_others(
    started: Start, tmp_path: Path, victim: int, compress: str
) -> None:
    ranks = started(3, compress)
    deadline = time.monotonic() + 60
    while any((tmp_path / f"out{r}").read_bytes().count(b"\n") < 12 for r in range(3)):
        assert all(each.poll() is None for each in ranks)
        assert time.monotonic() < deadline, "the job does not get going"
        time.sleep(0.02)
    ranks[victim].send_signal(signal.SIGKILL)
    for rank in {0, 1, 2} - {victim}:
        assert ranks[rank].wait(timeout=SOON) == 1
        said = (tmp_path / f"err{rank}").read_text()
        assert f"rank {victim} " in said.split("RankFailure:")[-1].splitlines()[0]


def test_one_process_makes_outer_steps_too() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    local = LocalSteps(model, optimizer, every=4, compress="int8", outer=AVERAGE, fragments=2)
    for _ in range(9):
        model(torch.ones(3, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    local.sync()
    ledger = local.ledger()
    local.close()
    assert ledger is not None
    assert local.step == 9


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"every": 0}, "every 0 steps"),
        ({"every": 1}, "delay of 1 or more, below every"),
        ({"delay": 50}, "may take 50 steps"),
        ({"mixing": 1.0}, "mixing"),
        ({"fragments": 0}, "0 fragments"),
        ({"compress": "power:2"}, "can't travel as 'power:2'"),
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any], told: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(EngineError, match=told):
        LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"momentum": 1.0}, {"lr": float("nan")}])
def test_an_outer_optimizer_without_meaning_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(EngineError, match="outer optimizer"):
        Nesterov(**settings)
