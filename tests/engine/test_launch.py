from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.engine.launch import hosts_of, init_process_group, place_in_job
from tonnage.errors import EngineError

SCRIPT = Path(__file__).with_name("launched.py")

# What the launchers set, as they were seen to: torchrun of PyTorch 2.13, Open MPI 4.1, MPICH 4.0; Slurm's from
# srun(1), "OUTPUT ENVIRONMENT VARIABLES".
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29400",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "123",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "64",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[01-16]",
    "SLURM_STEP_NODELIST": "gpu[03,07]",
}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size", "local", "addr"),
    [
        (TORCHRUN, "torchrun", 3, 4, 1, "node7"),
        (OPENMPI, "openmpi", 1, 2, 1, "127.0.0.1"),
        (MPICH, "mpi", 1, 2, 1, "127.0.0.1"),
        (SLURM, "slurm", 5, 8, 1, "gpu03"),
        ({}, "none", 0, 1, 0, ""),
    ],
)
def test_each_launcher_is_understood(
    environ: dict[str, str], launcher: str, rank: int, size: int, local: int, addr: str
) -> None:
    place = place_in_job(environ)
    assert (place.launcher, place.rank, place.world_size) == (launcher, rank, size)
    assert (place.local_rank, place.master_addr) == (local, addr)


@pytest.mark.parametrize("outer", [OPENMPI, MPICH, SLURM])
def test_torchrun_under_another_launcher_is_torchrun(outer: dict[str, str]) -> None:
    assert place_in_job({**outer, **TORCHRUN}).launcher == "torchrun"


def test_mpirun_inside_a_slurm_job_is_mpirun_on_the_jobs_first_host() -> None:
    over_hosts = {**SLURM, **OPENMPI, "OMPI_COMM_WORLD_SIZE": "16"}
    place = place_in_job(over_hosts)
    assert (place.launcher, place.master_addr) == ("openmpi", "gpu01")


@pytest.mark.parametrize("environ", [OPENMPI, MPICH, SLURM])
def test_all_ranks_work_out_the_same_meeting_place(environ: dict[str, str]) -> None:
    ranks = {name for name in environ if name.endswith(("RANK", "PROCID", "LOCALID", "RANKID"))}
    first = place_in_job({**environ, **dict.fromkeys(ranks, "0")})
    here = place_in_job(environ)
    assert (first.master_addr, first.master_port) == (here.master_addr, here.master_port)
    # Below the ports that the system hands out for outgoing connections.
    assert 20_000 <= here.master_port < 32_768


def test_what_is_given_wins() -> None:
    place = place_in_job({**SLURM, "MASTER_ADDR": "me", "MASTER_PORT": "4000"})
    assert (place.master_addr, place.master_port) == ("me", 4000)


def test_two_jobs_on_a_host_meet_at_different_ports() -> None:
    ports = {place_in_job({**SLURM, "SLURM_JOB_ID": str(job)}).master_port for job in range(50)}
    assert len(ports) > 45


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({**TORCHRUN, "RANK": "4"}, "rank 4 in a job of 4"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "'many', not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4"}, "does not say which host rank 0 is on"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[3-1]"}, "not a range of hosts"),
    ],
)
def test_what_is_incomplete_is_said_with_what_to_do(environ: dict[str, str], said: str) -> None:
    with pytest.raises(EngineError) as caught:
        place_in_job(environ)
    assert said in str(caught.value)


def test_a_slurm_batch_script_that_forgot_srun_is_warned() -> None:
    outside = {name: value for name, value in SLURM.items() if "STEP" not in name}
    with pytest.warns(UserWarning, match="srun did not start this process"):
        assert place_in_job(outside).launcher == "none"


@given(
    prefix=st.text("abcdefghij-", min_size=1, max_size=6),
    first=st.integers(0, 200),
    more=st.integers(0, 30),
    width=st.integers(1, 4),
    single=st.integers(500, 600),
)
def test_a_list_of_hosts_is_spelt_out(prefix: str, first: int, more: int, width: int, single: int) -> None:
    text = f"{prefix}[{first:0{width}}-{first + more:0{width}},{single}]-ib,login"
    wanted = [f"{prefix}{n:0{width}}-ib" for n in range(first, first + more + 1)]
    assert list(hosts_of(text)) == [*wanted, f"{prefix}{single}-ib", "login"]


@pytest.mark.parametrize("text", ["", "a b", "gpu[1", "gpu[x]", "[]", ","])
def test_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(EngineError):
        list(hosts_of(text))


def launched(*command: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """What each rank of a real launch printed, by rank."""
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, str(SCRIPT)],
        env={**os.environ, **quiet, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("program", "words", "launcher"),
    [
        (
            sys.executable,
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"],
            "torchrun",
        ),
        (
            "mpirun.openmpi",
            ["--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable],
            "openmpi",
        ),
        ("mpiexec.hydra", ["-n", "3", sys.executable], "mpi"),
    ],
)
def test_ranks_of_a_real_launcher_find_each_other(program: str, words: list[str], launcher: str) -> None:
    if shutil.which(program) is None:
        if os.environ.get("CI"):
            pytest.fail(f"{program} is not installed, though .ci/run installs it")
        pytest.skip(f"{program} is not installed")
    ranks = launched(program, *words)
    assert [(each["launcher"], each["rank"], each["local"]) for each in ranks] == [
        (launcher, rank, rank) for rank in range(3)
    ]
    assert {each["total"] for each in ranks} == {3.0}


@pytest.mark.ranks
def test_a_process_that_nobody_launched_trains_alone() -> None:
    alone = {name: "" for name in (*TORCHRUN, *OPENMPI, *MPICH, *SLURM) if name in os.environ}
    [rank] = launched(sys.executable, env=alone)
    assert (rank["launcher"], rank["of"], rank["total"]) == ("none", 1, 0.0)


@pytest.mark.ranks
def test_a_first_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError) as caught:
        init_process_group(device="cpu", timeout=2)
    assert "the 4 ranks did not meet at 127.0.0.1 port 1" in str(caught.value)
    assert "started by torchrun" in caught.value.where
