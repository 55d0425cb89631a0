r"""Times collectives, a matrix product and a copy in the job that it runs in, for :mod:`tonnage.plan.probe`.

Timings go round: every size of every collective once, then all again, so that a burst of other work on
the machine falls on all sizes alike and the median of a size leaves it out. A round's slowest rank
counts. Where the line still misses the times, more rounds are added.

Source: nccl-tests, doc/PERFORMANCE.md (what is timed); its loop repeats small messages, as here.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tonnage.errors import LinkError, require
from tonnage.plan.probe import SIZES, Measured, Sample, fit_line

REPEATED = 64 * 2**10
"""Bytes up to which a call is repeated within one timing: it takes no longer than the clock's own jitter."""

CALLS = 8
"""Calls in such a timing."""

ATTEMPTS = 3
"""How often rounds are added where the line misses."""

MISSES = 0.3
"""Median miss of the line above which rounds are added."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Job:
    torch: Any
    dist: Any
    device: Any
    rank: int
    world: int
    local: int


def measure_here(
    *, sizes: Sequence[int] = SIZES, repeat: int = 5, progress: Tell | None = None
) -> Measured | None:
    """Measure from inside a job that torchrun (or anything that sets its variables) started.

    Args:
        sizes: payloads, bytes.
        repeat: rounds of timings.
        progress: told what is being measured.

    Returns:
        What was measured, on rank 0; nothing on the others.

    Raises:
        MissingExtra: torch isn't installed.
        LinkError: the ranks don't find each other.
    """
    job = _job()
    tell = progress if progress and job.rank == 0 else _silent
    inside, outside = _links(job, sizes, repeat, tell) if job.world > 1 else ((), ())
    if job.rank:
        return None
    tell("matrix product and memory")
    return _measured(job, inside, outside)


def _job() -> _Job:
    torch = require("torch", extra="train", purpose="measuring links")
    dist = require("torch.distributed", extra="train", purpose="measuring links")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    card = int(os.environ.get("LOCAL_RANK", "0"))
    return _Job(
        torch=torch,
        dist=dist,
        device=torch.device("cuda", card) if torch.cuda.is_available() else torch.device("cpu"),
        rank=int(os.environ.get("RANK", "0")),
        world=world,
        local=int(os.environ.get("LOCAL_WORLD_SIZE", str(world))),
    )


def _links(
    job: _Job, sizes: Sequence[int], repeat: int, tell: Tell
) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """Timings among the ranks of a host, and among the first ranks of all hosts."""
    _join(job)
    try:
        hosts = [list(range(first, first + job.local)) for first in range(0, job.world, job.local)]
        # Every rank must make every group, in the same order.
        groups = [job.dist.new_group(ranks) for ranks in hosts]
        leads = [ranks[0] for ranks in hosts]
        across = job.dist.new_group(leads)
        inside: tuple[Sample, ...] = ()
        outside: tuple[Sample, ...] = ()
        if job.local > 1:
            inside = _time_group(job, groups[job.rank // job.local], job.local, sizes, repeat, tell)
        if len(leads) > 1 and job.rank in leads:
            outside = _time_group(job, across, len(leads), sizes, repeat, tell)
        job.dist.barrier()
        return inside, outside
    finally:
        job.dist.destroy_process_group()


def _join(job: _Job) -> None:
    if job.device.type == "cuda":
        job.torch.cuda.set_device(job.device)
    try:
        job.dist.init_process_group("nccl" if job.device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        raise LinkError(
            f"rank {job.rank} of {job.world} can't join the job: {error}",
            where=socket.gethostname(),
            hint="start it by torchrun --nproc-per-node N -m tonnage probe",
        ) from error


def _time_group(
    job: _Job, group: Any, size: int, sizes: Sequence[int], repeat: int, tell: Tell
) -> tuple[Sample, ...]:
    calls = _calls(job, group, size, sizes)
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    samples: tuple[Sample, ...] = ()
    for attempt in range(ATTEMPTS):
        for i in range(repeat):
            tell(f"collectives over {size} ranks, round {attempt * repeat + i + 1}")
            for key, call in calls.items():
                taken[key].append(_seconds(job, call, key[1]))
        samples = _samples(job, group, size, taken)
        if _follows_a_line(samples):
            break
    return samples


def _calls(
    job: _Job, group: Any, size: int, sizes: Sequence[int]
) -> dict[tuple[str, int], Callable[[], Any]]:
    """Each collective at each size, with one call behind it: that makes connections and warms caches."""
    dist, calls = job.dist, {}
    # Newer versions of torch have other names for the same calls, and warn of the old ones.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for nbytes in sizes:
        count = max(size, nbytes // 4 // size * size)
        whole = job.torch.zeros(count, dtype=job.torch.float32, device=job.device)
        part = whole[: count // size].clone()
        calls["all-reduce", count * 4] = _bound(dist.all_reduce, whole, group=group)
        calls["all-gather", count * 4] = _bound(gather, whole, part, group=group)
        if dist.get_backend(group) == "nccl":
            # Gloo's reduce-scatter is an all-reduce inside; its time says nothing of the link.
            calls["reduce-scatter", count * 4] = _bound(scatter, part, whole, group=group)
            calls["all-to-all", count * 4] = _bound(
                dist.all_to_all_single, job.torch.empty_like(whole), whole, group=group
            )
    for call in calls.values():
        call()
    return calls


def _bound(call: Callable[..., Any], *args: Any, **named: Any) -> Callable[[], Any]:
    return lambda: call(*args, **named)


def _seconds(job: _Job, call: Callable[[], Any], nbytes: int) -> float:
    """Seconds of one call."""
    calls = CALLS if nbytes <= REPEATED else 1
    _wait(job)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _wait(job)
    return (time.perf_counter() - start) / calls


def _samples(
    job: _Job, group: Any, size: int, taken: dict[tuple[str, int], list[float]]
) -> tuple[Sample, ...]:
    """The median round of each call; a round takes as long as its slowest rank, so all ranks agree."""
    rounds = job.torch.tensor(list(taken.values()), dtype=job.torch.float64, device=job.device)
    job.dist.all_reduce(rounds, op=job.dist.ReduceOp.MAX, group=group)
    low, middle, high = np.quantile(rounds.cpu().numpy(), (0.25, 0.5, 0.75), axis=1)
    return tuple(
        Sample(
            op=op,
            group_size=size,
            nbytes=nbytes,
            seconds=float(middle[i]),
            spread=float((high[i] - low[i]) / middle[i]),
        )
        for i, (op, nbytes) in enumerate(taken)
    )


def _follows_a_line(samples: tuple[Sample, ...]) -> bool:
    try:
        return fit_line(samples).error <= MISSES
    except LinkError:
        return False


def _wait(job: _Job) -> None:
    if job.device.type == "cuda":
        job.torch.cuda.synchronize(job.device)


def _measured(job: _Job, inside: tuple[Sample, ...], outside: tuple[Sample, ...]) -> Measured:
    card = job.torch.cuda.get_device_properties(job.device) if job.device.type == "cuda" else None
    return Measured(
        device=card.name if card else "cpu",
        matmul=_matmul_rate(job),
        copy=_copy_rate(job),
        memory=float(card.total_memory if card else _host_memory() / job.local),
        processors=int(card.multi_processor_count if card else job.torch.get_num_threads()),
        world_size=job.world,
        local_size=job.local,
        inside=inside,
        outside=outside,
    )


def _matmul_rate(job: _Job) -> float:
    card = job.device.type == "cuda"
    size, dtype = (8192, job.torch.bfloat16) if card else (1024, job.torch.float32)
    a, b = (job.torch.randn(size, size, device=job.device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / _median(job, lambda: job.torch.mm(a, b))


def _copy_rate(job: _Job) -> float:
    count = 2**26 if job.device.type == "cuda" else 2**24
    source = job.torch.ones(count, dtype=job.torch.float32, device=job.device)
    target = job.torch.empty_like(source)
    return 2 * 4 * count / _median(job, lambda: target.copy_(source))


def _median(job: _Job, call: Callable[[], Any]) -> float:
    call()
    return float(np.median([_seconds(job, call, REPEATED + 1) for _ in range(9)]))


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")


def _silent(_: str) -> None:
    return None
