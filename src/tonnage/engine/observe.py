"""What the tuner has to know: when gradients become ready, what modules compute, what links do.

Computation is observed in a few steps as they are, links by a few transfers between two steps, of the
same kind and by the same way as those of training.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tonnage.engine.transport import Buffers, Packing, Transport

Samples = list[tuple[int, float]]
"""Bytes and seconds of transfers."""

PROBES = ((8, 1 << 14), (4, 1 << 18), (2, 1 << 21))
"""How many transfers of how many bytes go at once.

What one more bucket costs is what a transfer adds to others that are under way, not how long it takes
alone: so several of each size are timed together.
"""

REPEATS = 3
"""Each size is timed so often; the median counts."""

LONGEST_PROBE = 0.25
"""Seconds after which no larger size is tried."""


@dataclass(slots=True, eq=False)
class Watch:
    """Notes stamps of one step after another; see :class:`tonnage.engine.schedule.Observer`.

    Args:
        transport: whose stamps these are.
        num_parameters: trained parameters.
    """

    transport: Transport
    num_parameters: int
    _passes: list[_Stamps] = field(default_factory=list)
    _begun: tuple[float, float] = field(default_factory=lambda: (time.monotonic(), _idle_seconds()))

    def begin_forward(self) -> None:
        """A forward pass begins; with those that only add to gradients, a step has several."""
        if not self._passes or self._passes[-1].begun is not None:
            self._passes.append(_Stamps())

    def reached(self) -> None:
        """What the module before computed ends here."""
        if self._passes:
            self._passes[-1].close(self.transport.stamp())

    def begins(self, reads: frozenset[int]) -> None:
        """A module computes with these parameters; its time is noted for the first of them."""
        if self._passes:
            self._passes[-1].open = min(reads), self.transport.stamp()

    def end_forward(self) -> None:
        """The backward pass counts from here."""
        if self._passes:
            now = self.transport.stamp()
            self._passes[-1].close(now)
            self._passes[-1].begun = now

    def gradient(self, index: int) -> None:
        """Ready now."""
        if self._passes:
            self._passes[-1].ready[index] = self.transport.stamp()

    def idle_cores(self) -> float:
        """Cores of this host that had nothing to do, for each of its ranks; 0 where nobody counts."""
        passed = time.monotonic() - self._begun[0]
        idle = (_idle_seconds() - self._begun[1]) / max(passed, 1e-9)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.transport.world_size))
        own = torch.tensor([0.0 if math.isnan(idle) else idle / max(1, ranks)])
        return float(self.transport.exchange(own).min())

    def medians(self) -> torch.Tensor:
        """Seconds of each parameter, shape ``(2, num_parameters)``: until ready, and of its module's forward.

        A parameter without a gradient is ready when the last one is.
        """
        seconds = self.transport.seconds
        ready = np.full((len(self._passes), self.num_parameters), np.nan)
        forward = np.zeros((len(self._passes), self.num_parameters))
        for row, each in enumerate(self._passes):
            for index, stamp in each.ready.items():
                ready[row, index] = seconds(stamp) - seconds(each.begun)
            ready[row][np.isnan(ready[row])] = np.nanmax(ready[row]) if each.ready else 0.0
            for index, start, stop in each.computed:
                forward[row, index] += seconds(stop) - seconds(start)
        both = np.stack([np.median(ready, axis=0), np.median(forward, axis=0)])
        return torch.from_numpy(np.maximum(both, 0.0))


@dataclass(slots=True, eq=False)
class _Stamps:
    begun: object = None
    open: tuple[int, object] | None = None
    computed: list[tuple[int, object, object]] = field(default_factory=list)
    ready: dict[int, object] = field(default_factory=dict)

    def close(self, now: object) -> None:
        if self.open is not None:
            self.computed.append((*self.open, now))
            self.open = None


def time_legs(
    transport: Transport,
    values: torch.Tensor,
    *,
    sharded: bool,
    packing: Callable[[int], Packing | None] = lambda _: None,
) -> tuple[Samples, Samples]:
    """Times of reduce-scatters and all-gathers, or of all-reduces and nothing; all ranks call it together.

    The transport must have no bucket, and has none afterwards.

    Args:
        transport: what moves them.
        values: gradients to move, flat: what a codec makes of them depends on what they are.
        sharded: whether training reduces shards and hands on parameters, or averages gradients in place.
        packing: how a bucket of so many elements is compressed.
    """
    reduces: Samples = []
    gathers: Samples = []
    for count, nbytes in PROBES:
        bursts = [_probe(transport, values, nbytes, sharded, packing) for _ in range(count)]
        for each in bursts:
            transport.add_bucket(each)
        transport.exchange(torch.zeros(1, device=values.device))
        longest = 0.0
        for _ in range(REPEATS):
            for leg, into in (("reduce", reduces), ("gather", gathers)):
                if leg == "gather" and not sharded:
                    continue
                seconds = _burst(transport, leg, sharded, count)
                # All ranks must see the same samples: what took longest, since all wait for it.
                worst = float(transport.exchange(torch.tensor([seconds], device=values.device)).max())
                into.append((bursts[0].gradient.nbytes, worst / count))
                longest = max(longest, worst)
        transport.clear_buckets()
        transport.exchange(torch.zeros(1, device=values.device))
        if longest > LONGEST_PROBE and count != PROBES[0][0]:
            break
    return reduces, gathers


def _probe(
    transport: Transport,
    values: torch.Tensor,
    nbytes: int,
    sharded: bool,
    packing: Callable[[int], Packing | None],
) -> Buffers:
    unit = 64 * transport.world_size
    numel = max(1, nbytes // values.element_size() // unit) * unit
    gradient = values.repeat(-(-numel // max(1, len(values))))[:numel].clone()
    size = numel // transport.world_size
    return Buffers(
        label="probe",
        gradient=gradient,
        shard_gradient=torch.zeros_like(gradient[: size if sharded else 0]),
        parameter=gradient.clone() if sharded else gradient[:0],
        packing=packing(numel),
    )


def _burst(transport: Transport, leg: str, sharded: bool, count: int) -> float:
    begun = transport.stamp()
    if leg == "gather":
        tickets = [transport.start_all_gather(k, k) for k in range(count)]
    elif sharded:
        tickets = [transport.start_reduce_scatter(k) for k in range(count)]
    else:
        tickets = [transport.start_all_reduce(k) for k in range(count)]
    for ticket in tickets:
        transport.wait_received(ticket)
    ended = transport.stamp()
    for ticket in tickets:
        transport.wait_sent(ticket)
    return transport.seconds(ended) - transport.seconds(begun)


def known_to_all(transport: Transport, rows: torch.Tensor) -> torch.Tensor:
    """The mean of everybody's ``rows``, the same bits on all ranks."""
    flat = transport.exchange(rows.reshape(-1))
    return flat.mean(dim=0).view(rows.shape)


def _idle_seconds() -> float:
    """What this host's cores idled since it started, all together; NaN where nobody counts."""
    try:
        idle, waiting = Path("/proc/stat").read_text().split()[4:6]
        return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return math.nan
