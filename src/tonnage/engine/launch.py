"""Joining a job, whoever launched it.

Every launcher tells a process its place through the environment, each by other names:

| launcher | rank | ranks | rank on the host |
| --- | --- | --- | --- |
| ``torchrun`` and whoever does as it does | ``RANK`` | ``WORLD_SIZE`` | ``LOCAL_RANK`` |
| Open MPI's ``mpirun`` | ``OMPI_COMM_WORLD_RANK`` | ``OMPI_COMM_WORLD_SIZE`` | ``OMPI_COMM_WORLD_LOCAL_RANK`` |
| MPICH's and Intel's ``mpiexec`` | ``PMI_RANK`` | ``PMI_SIZE`` | ``MPI_LOCALRANKID`` |
| Slurm's ``srun`` | ``SLURM_PROCID`` | ``SLURM_STEP_NUM_TASKS`` | ``SLURM_LOCALID`` |

Where the ranks meet (``MASTER_ADDR``, ``MASTER_PORT``) only torchrun says. For the others it is worked
out, alike on every rank, from what they do say; what was given always wins.

Sources: torchrun's documentation, "Environment Variables"; Open MPI's FAQ, "What environment variables
does Open MPI set?"; ``srun(1)``, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import itertools
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from tonnage.errors import EngineError

LauncherName = Literal["torchrun", "openmpi", "mpi", "slurm", "none"]

# Below the first port that Linux hands to outgoing connections (32768), so that none of those sits on it.
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
_DEFAULT_PORT = 29_500  # torchrun's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One process's place in its job, as the environment tells it.

    Attributes:
        launcher: who said so; ``"none"`` for a process that was started by itself.
        rank: of this process, from 0.
        world_size: ranks in the job.
        local_rank: of this process among those on its host.
        master_addr: host of rank 0, where all meet; empty without a launcher.
        master_port: port there; 0 without a launcher.
    """

    launcher: LauncherName
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = ""
    master_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What :func:`init_process_group` found and did.

    Attributes:
        launcher: who started this process; ``"none"`` if nobody did.
        rank: of this process, from 0.
        world_size: ranks in the job; 1 for a process that was started by itself.
        local_rank: of this process among those on its host.
        device: where this rank computes: its own card, or the CPU.
    """

    launcher: LauncherName
    rank: int
    world_size: int
    local_rank: int
    device: torch.device


def init_process_group(
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float = 300.0,
) -> Job:
    """Start ``torch.distributed`` from whatever launched this process, and say where it stands.

    A process that nobody launched trains alone: no group is started, and the same script runs. A group
    that is there already (Ray Train, Accelerate and Lightning start one) is left as it is. The variables
    that torchrun sets are set for whoever reads them later, unless they are there.

    Args:
        device: ``"cpu"``, ``"cuda"`` or a certain card; by default this rank's card where there are
            any, else the CPU.
        backend: by default ``nccl`` on cards and ``gloo`` on CPUs.
        timeout: seconds to wait for the other ranks, here and in the group's operations.

    Raises:
        EngineError: what the launcher says is incomplete, there are fewer cards than ranks on a host, or
            the ranks don't find each other.
    """
    place = place_in_job(os.environ)
    ready = dist.is_initialized()
    chosen = _device_of(place, device)
    if not ready and place.launcher != "none":
        _start(place, backend or ("nccl" if chosen.type == "cuda" else "gloo"), timeout)
    return Job(
        launcher=place.launcher,
        rank=dist.get_rank() if ready else place.rank,
        world_size=dist.get_world_size() if ready else place.world_size,
        local_rank=place.local_rank,
        device=chosen,
    )


def place_in_job(environ: Mapping[str, str]) -> Place:
    """This process's place, from the variables of the first launcher that set any.

    torchrun's come first, since it may itself be started by Slurm or mpirun, one on each host, and mpirun's
    before Slurm's, for the same reason.

    Raises:
        EngineError: a launcher's variables are incomplete or not numbers, or don't tell where rank 0 is.
    """
    for names in _LAUNCHERS:
        if names.rank in environ or any(name in environ for name in names.world_size):
            if names.launcher == "slurm" and not _started_by_srun(environ):
                continue
            return _place(names, environ)
    return Place(launcher="none")


def hosts_of(nodelist: str) -> Iterator[str]:
    """The hosts of a list as Slurm writes it, ``node[01-03,07],login1``, in its order.

    Raises:
        EngineError: it is no such list.

    Source: ``scontrol(1)``, ``show hostnames``.
    """
    if not re.fullmatch(rf"{_HOST}(,{_HOST})*", nodelist):
        raise EngineError(
            f"not a list of hosts: {nodelist!r}", hint="set MASTER_ADDR to the host of rank 0 yourself"
        )
    for word in re.findall(_HOST, nodelist):
        texts = re.split(r"\[([^\]]*)\]", word)  # what stood in brackets has odd places
        choices = [_numbers(text) if place % 2 else [text] for place, text in enumerate(texts)]
        yield from map("".join, itertools.product(*choices))


# Below: how.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What one launcher calls things; of several names for one, the first that is set counts.

    ``local_size`` and ``world_size`` equal means that the job has one host; ``job`` tells it from others.
    """

    launcher: LauncherName
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_size: str = ""
    job: tuple[str, ...] = ()
    give_address: str


_LAUNCHERS = (
    _Names(
        launcher="torchrun",
        rank="RANK",
        world_size=("WORLD_SIZE",),
        local_rank="LOCAL_RANK",
        give_address="start it by torchrun, or set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
    ),
    _Names(
        launcher="openmpi",
        rank="OMPI_COMM_WORLD_RANK",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        give_address="mpirun -x MASTER_ADDR=HOST_OF_RANK_0 …",
    ),
    _Names(
        launcher="mpi",
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        give_address="mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 …",
    ),
    _Names(
        launcher="slurm",
        rank="SLURM_PROCID",
        # A step may have fewer tasks than its job has room for.
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank="SLURM_LOCALID",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        give_address="export MASTER_ADDR=HOST_OF_RANK_0 before srun",
    ),
)
_HOST = r"(?:[^,\[\]\s]|\[[^\[\]]*\])+"


def _started_by_srun(environ: Mapping[str, str]) -> bool:
    """Only steps have a number: a batch script and a shell of salloc run outside of any."""
    if environ.get("SLURM_STEP_ID"):
        return True
    tasks = environ.get("SLURM_NTASKS", "1")
    if tasks != "1":
        warnings.warn(
            f"this Slurm job asks for {tasks} tasks, but srun did not start this process, which trains "
            "alone; start all by `srun python …`",
            stacklevel=4,
        )
    return False


def _place(names: _Names, environ: Mapping[str, str]) -> Place:
    rank = _number(environ, names, names.rank)
    world_size = _number(environ, names, *names.world_size)
    # Whoever sets torchrun's variables by hand, such as an operator with a process a host, may leave this out.
    by_hand = names.launcher == "torchrun" and names.local_rank not in environ
    local_rank = 0 if by_hand else _number(environ, names, names.local_rank)
    if not rank < world_size:
        raise EngineError(
            f"rank {rank} in a job of {world_size}: {names.rank} must be below {names.world_size[0]}",
            where=f"the environment, as {names.launcher} set it",
        )
    return Place(
        launcher=names.launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        master_addr=environ.get("MASTER_ADDR", "") or _master_addr(names, environ, world_size),
        master_port=_number(environ, names, "MASTER_PORT")
        if environ.get("MASTER_PORT") or names.launcher == "torchrun"
        else _master_port([environ[name] for name in names.job if environ.get(name)]),
    )


def _number(environ: Mapping[str, str], names: _Names, *alternatives: str) -> int:
    found = next((name for name in alternatives if environ.get(name)), None)
    if found is None:
        raise EngineError(
            f"{alternatives[0]} is not set, though other variables of {names.launcher} are",
            where="the environment",
            hint=names.give_address
            if names.launcher == "torchrun"
            else "start every rank by the same command, and let no wrapper drop variables",
        )
    if not environ[found].isascii() or not environ[found].isdigit():
        raise EngineError(f"{found} is {environ[found]!r}, not a number", where="the environment")
    return int(environ[found])


def _master_addr(names: _Names, environ: Mapping[str, str], world_size: int) -> str:
    if names.launcher == "torchrun":
        return _no_address(names)
    if world_size == 1 or _on_one_host(names, environ, world_size):
        return "127.0.0.1"
    # A step runs on some of its job's hosts; mpirun, which knows of no steps, begins with the job's first.
    of_step = ["SLURM_STEP_NODELIST"] if names.launcher == "slurm" else []
    lists = [*of_step, "SLURM_JOB_NODELIST", "SLURM_NODELIST"]
    nodelist = next((environ[name] for name in lists if environ.get(name)), None)
    return _no_address(names) if nodelist is None else next(hosts_of(nodelist))


def _on_one_host(names: _Names, environ: Mapping[str, str], world_size: int) -> bool:
    if names.launcher == "slurm":
        return (environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")) == "1"
    return environ.get(names.local_size) == str(world_size)


def _no_address(names: _Names) -> str:
    raise EngineError(
        f"MASTER_ADDR is not set, and {names.launcher} does not say which host rank 0 is on",
        where="the environment",
        hint=names.give_address,
    )


def _master_port(job: list[str]) -> int:
    """Jobs that share a host get different ports, mostly: one in 10,000 pairs meets."""
    return _FIRST_PORT + zlib.crc32(".".join(job).encode()) % _NUM_PORTS if job else _DEFAULT_PORT


def _numbers(ranges: str) -> list[str]:
    """``01-03,07`` as its numbers, as wide as they were written."""
    found = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise EngineError(
                f"not a range of hosts: [{ranges}]", hint="set MASTER_ADDR to the host of rank 0 yourself"
            )
        width = len(match[1])
        found += [f"{n:0{width}}" for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return found


def _device_of(place: Place, wanted: str | torch.device | None) -> torch.device:
    """The CPU, or this rank's card, which becomes the current one."""
    device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return device
    if str(device) == "cuda":  # any
        device = torch.device("cuda", _card(place.local_rank, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _card(local_rank: int, num_cards: int) -> int:
    if num_cards == 1:  # Slurm's --gpus-per-task shows each rank its own card alone, as number 0
        return 0
    if local_rank >= num_cards:
        raise EngineError(
            f"rank {local_rank} of this host has no card: there are {num_cards}",
            hint="start as many ranks a host as it has cards, or pass device='cpu'",
        )
    return local_rank


def _start(place: Place, backend: str, timeout: float) -> None:
    told = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
    }
    os.environ.update({name: str(value) for name, value in told.items() if not os.environ.get(name)})
    try:
        dist.init_process_group(
            backend,
            init_method="env://",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout),
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise EngineError(
            f"the {place.world_size} ranks did not meet at {place.master_addr} port {place.master_port}: "
            f"{str(error).splitlines()[0]}",
            where=f"rank {place.rank}, started by {place.launcher}",
            hint="all ranks must run, and reach that address; MASTER_ADDR and MASTER_PORT choose another",
        ) from error
