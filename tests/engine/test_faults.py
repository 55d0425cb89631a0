from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).with_name("training_job.py")

# The default of torch is 30 minutes. We ask for seconds, and leave room for a busy machine.
SOON = 20.0


class Job:
    """Ranks of one script, as a launcher would start them."""

    def __init__(self, how: str, num_ranks: int, folder: Path, **env: str) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        env = {
            **os.environ,
            **env,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(num_ranks),
        }
        self.ranks = []
        for rank in range(num_ranks):
            with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
                command = [sys.executable, str(SCRIPT), how]
                self.ranks.append(
                    subprocess.Popen(command, env={**env, "RANK": str(rank)}, stdout=out, stderr=err)
                )

    def wait_for_steps(self, num_steps: int) -> None:
        """Until every rank has printed so many."""
        deadline = time.monotonic() + 60
        while any(
            (self.folder / f"out{r}").read_bytes().count(b"\n") < num_steps for r in range(len(self.ranks))
        ):
            for rank, process in enumerate(self.ranks):
                assert process.poll() is None, self.said(rank)
            assert time.monotonic() < deadline, "the job does not get going"
            time.sleep(0.02)

    def ends(self, ranks: list[int]) -> float:
        """Seconds until these have ended by themselves."""
        begun = time.monotonic()
        for rank in ranks:
            self.ranks[rank].wait(timeout=SOON + 40)
        return time.monotonic() - begun

    def said(self, rank: int) -> str:
        return (self.folder / f"err{rank}").read_text()

    def close(self) -> None:
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for each in started:
        each.close()


def start(jobs: list[Job], how: str, num_ranks: int, folder: Path, **env: str) -> Job:
    jobs.append(Job(how, num_ranks, folder, **env))
    return jobs[-1]


@pytest.mark.parametrize(("victim", "schedule"), [(2, "shard"), (0, "shard"), (1, "allreduce")])
def test_a_killed_rank_is_named_by_all_others_within_seconds(
    jobs: list[Job], tmp_path: Path, victim: int, schedule: str
) -> None:
    job = start(jobs, "train", 3, tmp_path, SCHEDULE=schedule)
    job.wait_for_steps(5)
    job.ranks[victim].send_signal(signal.SIGKILL)
    others = [rank for rank in range(3) if rank != victim]
    assert job.ends(others) < SOON
    for rank in others:
        assert job.ranks[rank].returncode == 1
        assert "RankFailure" in job.said(rank)
        assert f"rank {victim} " in job.said(rank).split("RankFailure:")[-1].splitlines()[0]
        assert f"noticed by rank {rank} of 3" in job.said(rank)


@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_stands_still_is_named_by_all_others(
    jobs: list[Job], tmp_path: Path, victim: int
) -> None:
    job = start(jobs, "train", 3, tmp_path)
    job.wait_for_steps(5)
    job.ranks[victim].send_signal(signal.SIGSTOP)
    others = [rank for rank in range(3) if rank != victim]
    assert job.ends(others) < SOON
    for rank in others:
        assert job.ranks[rank].returncode == 1
        assert f"rank {victim} " in job.said(rank).split("RankFailure:")[-1].splitlines()[0]


def test_a_rank_that_leaves_early_is_named_by_the_others(jobs: list[Job], tmp_path: Path) -> None:
    job = start(jobs, "leave", 3, tmp_path)
    job.wait_for_steps(5)
    assert job.ends([0, 1, 2]) < SOON
    for rank in (0, 2):
        assert job.ranks[rank].returncode == 1
        assert "rank 1 " in job.said(rank).split("RankFailure:")[-1].splitlines()[0]


@pytest.mark.parametrize("how", ["exit", "destroy"])
def test_a_script_that_just_ends_breaks_nobody_and_does_not_hang(
    jobs: list[Job], tmp_path: Path, how: str
) -> None:
    job = start(jobs, how, 2, tmp_path)
    job.ends([0, 1])
    assert [process.returncode for process in job.ranks] == [0, 0], job.said(0) + job.said(1)
    assert (job.said(0), job.said(1)) == ("", "")
