r"""The planner's models of links and cards, fitted to what a probe measured.

:mod:`tonnage.plan.job` times each collective over sizes, like nccl-tests. To the times a latency-bandwidth line is fitted, one a link level:

    ``seconds = latency + wire bytes / bandwidth``,

by least squares of the *logarithms*, so that small messages count as much as large ones and twice as
much as half. The fit's own error is told with it: a line that misses by a third is no model of that link.

Computation is one large matrix product, memory one large copy.

Source: nccl-tests, doc/PERFORMANCE.md (wire bytes of each collective); Hockney, 1994 (the line).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tonnage.errors import LinkError
from tonnage.ledger import wire_nbytes
from tonnage.plan.cluster import Cluster, cluster_from_table

SIZES = tuple(2**exponent for exponent in range(10, 27, 2))
"""Payloads in bytes: 1 KiB to 64 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timing.

    Attributes:
        op: the collective.
        group_size: ranks that took part.
        nbytes: payload.
        seconds: median of its rounds.
        spread: half of the rounds lie within this share of the median; much of it is a busy machine.
    """

    op: str
    group_size: int
    nbytes: int
    seconds: float
    spread: float = 0.0

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
        spread: median spread of their rounds.
    """

    latency: float
    bandwidth: float
    error: float
    worst: float
    samples: int
    spread: float = 0.0


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
    found, scale = _search(seconds, wire)
    order = np.argsort(wire, kind="stable")
    # Medians of the two ends: one late message among several collectives is no reason to give up.
    few = max(1, len(order) // 4)
    small, large = np.median(seconds[order[:few]]), np.median(seconds[order[-few:]])
    if found > 100 * wire.max() or large <= small:
        raise LinkError(
            "larger messages took no longer than small ones",
            hint="probe on a quieter machine, with --repeat 20, or with larger sizes",
        )
    errors = np.abs((found + wire) * scale / seconds - 1)
    return Fit(
        latency=found * scale,
        bandwidth=1 / scale,
        error=float(np.median(errors)),
        worst=float(errors.max()),
        samples=len(samples),
        spread=float(np.median([sample.spread for sample in samples])),
    )


def _search(seconds: NDArray[np.float64], wire: NDArray[np.float64]) -> tuple[float, float]:
    """Latency in bytes' worth of time, and seconds a byte, of the line with the least squares of logarithms."""
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
    return found, scale


def measured_table(measured: Measured) -> dict[str, Any]:
    """The cluster file's content, as a table that :func:`cluster_from_table` takes.

    A level that was not measured keeps the planner's usual figures; its ``fit`` is left out.
    """
    table: dict[str, Any] = {
        "name": f"{measured.device} x{measured.world_size}, probed",
        "num_devices": measured.world_size,
        "domain": measured.local_size,
        "scaleup_level": "loopback" if measured.device == "cpu" else "nvlink",
        "device": {
            "name": measured.device,
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
            fits[level] = {
                "error": line.error,
                "worst": line.worst,
                "samples": line.samples,
                "spread": line.spread,
            }
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
