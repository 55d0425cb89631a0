r"""Measures links and computation of the machine or job that it runs in, and fits the planner's models.

Each collective is timed over sizes, like nccl-tests, through torch.distributed. To the times a
latency-bandwidth line is fitted, one a link level:

    ``seconds = latency + wire bytes / bandwidth``,

by least squares of the *logarithms*, so that small messages count as much as large ones and twice as
much as half. The fit's own error is told with it: a line that misses by a third is no model of that link.

Computation is one large matrix product, memory one large copy.

Source: nccl-tests, doc/PERFORMANCE.md (wire bytes of each collective); Hockney, 1994 (the line).
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tonnage.errors import LinkError, require
from tonnage.ledger import wire_nbytes
from tonnage.plan.cluster import Cluster, cluster_from_table

SIZES = tuple(2**exponent for exponent in range(10, 27, 2))
"""Payloads in bytes: 1 KiB to 64 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timing: the collective, ranks that took part, payload, and the median of its seconds."""

    op: str
    group_size: int
    nbytes: int
    seconds: float

    @property
    def wire(self) -> float:
        """Bytes that a rank sends for it."""
        return wire_nbytes(self.op, self.nbytes, self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A link's line.

    Attributes:
        latency: seconds of a call that moves next to nothing.
        bandwidth: bytes per second that a large one reaches.
        error: median size of the relative error over the samples.
        worst: the largest.
        samples: how many.
    """

    latency: float
    bandwidth: float
    error: float
    worst: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that a probe found.

    Attributes:
        device: the card's or processor's name.
        matmul: FLOP/s of a large bf16 matrix product.
        copy: bytes per second of memory, read and written.
        memory: bytes.
        processors: that share the tiles of a product.
        world_size: ranks of the job.
        local_size: ranks on a host.
        inside: timings among the ranks of a host.
        outside: timings among one rank of each host; empty on a single one.
    """

    device: str
    matmul: float
    copy: float
    memory: float
    processors: int
    world_size: int
    local_size: int
    inside: tuple[Sample, ...]
    outside: tuple[Sample, ...]


def fit_line(samples: Sequence[Sample]) -> Fit:
    """Latency and bandwidth of a link from its timings.

    Raises:
        LinkError: fewer than two sizes, or a time that is none.
    """
    if len({sample.nbytes for sample in samples}) < 2:
        raise LinkError("a link needs timings of two sizes or more", hint="probe with more sizes")
    seconds = np.array([sample.seconds for sample in samples])
    wire = np.array([sample.wire for sample in samples])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise LinkError("a collective took no time at all", hint="probe again on a quiet machine")
    # For a given share of latency (in bytes' worth of time) the best scale is a mean of logarithms; so
    # one number is searched, ever finer.
    worth = np.concatenate([[0.0], np.geomspace(1.0, 1e11, 400)])
    for _ in range(4):
        gaps = np.log(seconds)[None] - np.log(worth[:, None] + wire[None] + 1e-9)
        best = int(gaps.var(axis=1).argmin())
        found, scale = float(worth[best]), float(np.exp(gaps[best].mean()))
        if found == 0.0:
            break
        width = worth[min(best + 1, len(worth) - 1)] / found
        worth = np.geomspace(found / width, found * width, 200)
    smallest, largest = wire.argmin(), wire.argmax()
    if found > 100 * wire[largest] or seconds[largest] <= seconds[smallest]:
        raise LinkError("larger messages took no longer than small ones", hint="probe with larger sizes")
    errors = np.abs((found + wire) * scale / seconds - 1)
    return Fit(
        latency=found * scale,
        bandwidth=1 / scale,
        error=float(np.median(errors)),
        worst=float(errors.max()),
        samples=len(samples),
    )


def measured_table(measured: Measured) -> dict[str, Any]:
    """The cluster file's content, as a table that :func:`cluster_from_table` takes.

    A level that was not measured keeps the planner's usual figures; its ``fit`` is left out.
    """
    table: dict[str, Any] = {
        "name": f"{measured.device} x{measured.world_size}, probed",
        "num_devices": measured.world_size,
        "domain": measured.local_size,
        "device": {
            "flops": {"bf16": measured.matmul},
            "matmul": measured.matmul,
            "sustained": {"bf16": measured.matmul},
            "memory": measured.memory,
            "hbm": measured.copy,
            "sms": measured.processors,
        },
    }
    fits = {}
    for level, samples in (("scaleup", measured.inside), ("nic", measured.outside)):
        if samples:
            line = fit_line(samples)
            table[level] = {"rate": line.bandwidth, "efficiency": 1.0, "latency": line.latency, "hop": 0.0}
            fits[level] = {"error": line.error, "worst": line.worst, "samples": line.samples}
    table["fit"] = fits
    return table


def measured_cluster(measured: Measured) -> Cluster:
    """The cluster that was measured."""
    return cluster_from_table(measured_table(measured), where="probe")


def to_toml(table: dict[str, Any]) -> str:
    """The table as TOML, which Python's standard library reads but does not write."""
    lines = ["# written by tonnage probe; rates in bytes/s, one direction, a rank; latencies in seconds"]
    nested = [(key, value) for key, value in table.items() if isinstance(value, dict)]
    lines += [f"{key} = {_toml(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in nested:
        lines += ["", f"[{key}]", *(f"{name} = {_toml(each)}" for name, each in value.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {_toml(each)}" for key, each in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, float):
        assert math.isfinite(value)
        return repr(value)
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


def measure_here(
    *,
    sizes: Sequence[int] = SIZES,
    repeat: int = 5,
    progress: Callable[[str], None] | None = None,
) -> Measured | None:
    """Measure from inside a job that torchrun (or anything that sets its variables) started.

    Returns:
        What was measured, on rank 0; nothing on the others.

    Raises:
        MissingExtra: torch isn't installed.
        LinkError: the ranks don't find each other.
    """
    torch = require("torch", extra="train", purpose="measuring links")
    dist = require("torch.distributed", extra="train", purpose="measuring links")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    tell = progress if progress and rank == 0 else _silent
    inside: list[Sample] = []
    outside: list[Sample] = []
    if world > 1:
        try:
            dist.init_process_group("nccl" if cuda else "gloo")
        except (RuntimeError, ValueError) as error:
            raise LinkError(
                f"rank {rank} of {world} can't join the job: {error}",
                where=socket.gethostname(),
                hint="start it by torchrun --nproc-per-node N -m tonnage probe",
            ) from error
        try:
            hosts = [list(range(first, first + local)) for first in range(0, world, local)]
            # Every rank must make every group, in the same order.
            groups = [dist.new_group(ranks) for ranks in hosts]
            if local > 1:
                mine = groups[rank // local]
                inside = _time_group(torch, dist, mine, local, device, sizes, repeat, tell)
            if world > local:
                leads = [ranks[0] for ranks in hosts]
                across = dist.new_group(leads)
                if rank in leads:
                    outside = _time_group(torch, dist, across, len(leads), device, sizes, repeat, tell)
            dist.barrier()
        finally:
            dist.destroy_process_group()
    if rank:
        return None
    tell("matrix product and memory")
    return Measured(
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        matmul=_matmul_rate(torch, device),
        copy=_copy_rate(torch, device),
        memory=float(
            torch.cuda.get_device_properties(device).total_memory if cuda else _host_memory() / local
        ),
        processors=int(
            torch.cuda.get_device_properties(device).multi_processor_count
            if cuda
            else torch.get_num_threads()
        ),
        world_size=world,
        local_size=local,
        inside=tuple(inside),
        outside=tuple(outside),
    )


def _silent(_: str) -> None:
    return None


def _time_group(
    torch: Any,
    dist: Any,
    group: Any,
    size: int,
    device: Any,
    sizes: Sequence[int],
    repeat: int,
    tell: Callable[[str], None],
) -> list[Sample]:
    # Newer versions of torch have other names for the same calls, and warn of the old ones.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    samples = []
    for nbytes in sizes:
        count = max(size, nbytes // 4 // size * size)
        whole = torch.ones(count, dtype=torch.float32, device=device)
        part = torch.ones(count // size, dtype=torch.float32, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "all-reduce": lambda w=whole: dist.all_reduce(w, group=group),  # type: ignore[misc]
            "all-gather": lambda w=whole, p=part: gather(w, p, group=group),  # type: ignore[misc]
        }
        if dist.get_backend(group) == "nccl":
            # Gloo's reduce-scatter is an all-reduce inside; its time says nothing of the link.
            calls["reduce-scatter"] = lambda w=whole, p=part: scatter(p, w, group=group)  # type: ignore[misc]
            calls["all-to-all"] = lambda w=whole: dist.all_to_all_single(torch.empty_like(w), w, group=group)  # type: ignore[misc]
        for op, call in calls.items():
            tell(f"{op} over {size} ranks, {nbytes:,} bytes")
            samples.append(
                Sample(op=op, group_size=size, nbytes=count * 4, seconds=_median(torch, device, call, repeat))
            )
    return samples


def _median(torch: Any, device: Any, call: Callable[[], Any], repeat: int) -> float:
    taken = []
    for i in range(repeat + 2):
        _wait(torch, device)
        start = time.perf_counter()
        call()
        _wait(torch, device)
        # The first two make connections and warm caches.
        if i >= 2:
            taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def _wait(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul_rate(torch: Any, device: Any) -> float:
    size = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / _median(torch, device, lambda: torch.mm(a, b), 5)


def _copy_rate(torch: Any, device: Any) -> float:
    source = torch.ones(2**26 if device.type == "cuda" else 2**24, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = _median(torch, device, lambda: target.copy_(source), 5)
    return float(2 * source.numel() * 4 / seconds)


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
