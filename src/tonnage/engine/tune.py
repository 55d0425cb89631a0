"""Buckets and compression from measurement: when to measure, and what to choose.

After :data:`WARMUP` steps, :data:`OBSERVED` steps show when gradients become ready; then, between two
steps, a few transfers show what the links do. From both :mod:`tonnage.plan` predicts the cycle of each
cut, and rank 0's choice is everybody's. Later, when :data:`PATIENCE` times what measuring took has
passed, all of it is measured again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tonnage.engine.bucket import Bucket, ParameterSpec, sending_order
from tonnage.engine.compress import NO_CODEC, CodecSpeed, Exchange, choose, make_codec, measure_codec
from tonnage.engine.fit import LinkFit, fit_link
from tonnage.engine.observe import Watch, known_to_all, time_legs
from tonnage.engine.schedule import ScheduleName
from tonnage.engine.transport import Packing, Transport
from tonnage.errors import EngineError
from tonnage.plan import Gradients, best_cut, cut_timing, early_cut, early_cycle
from tonnage.units import format_rate, format_time

WARMUP = 3
"""Steps that are not observed: the first ones allocate memory and make optimizer states."""

OBSERVED = 3
"""Steps whose median counts."""

PATIENCE = 1000
"""Measuring again may cost a thousandth of the time."""

LEAST_PAUSE = 200
"""Steps between two measurements, at least."""

LEAST_GAIN = 0.03
"""Share of the cycle below which a predicted gain is noise: emulated steps repeat to about 2 %."""

SAMPLE = 1 << 18
"""Elements of gradients that codecs are timed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How fast buckets move.

    Attributes:
        compress: through what, as a user writes it; ``None`` sends what there is.
        reduce: line of reduce-scatters, or of all-reduces.
        gather: line of all-gathers; ``None`` where there are none.
    """

    compress: str | None
    reduce: LinkFit
    gather: LinkFit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was chosen before a step, and why.

    Attributes:
        step: the step.
        boundaries: of buckets over :func:`~tonnage.engine.bucket.sending_order`.
        compress: of them.
        changed: whether it is not what was in use.
        cycle: seconds predicted for a backward and the next forward pass.
        before: the same for what was in use.
        compute: seconds of it that compute.
        way: how fast the chosen buckets move.
        reason: why this compression, if there was a choice.
    """

    step: int
    boundaries: tuple[int, ...]
    compress: str | None
    changed: bool
    cycle: float
    before: float
    compute: float
    way: Way
    reason: str = ""

    def facts(self) -> dict[str, Any]:
        """For the ledger, in base units."""
        return {
            "step": self.step,
            "num_buckets": len(self.boundaries),
            "compress": self.compress,
            "changed": self.changed,
            "predicted_cycle": self.cycle,
            "predicted_cycle_before": self.before,
            "compute": self.compute,
            "reduce": _line_facts(self.way.reduce),
            "gather": None if self.way.gather is None else _line_facts(self.way.gather),
            "reason": self.reason,
        }

    def text(self) -> str:
        """One line for a reader."""
        link = self.way.reduce.link
        did = f"{len(self.boundaries)} buckets" + (f" through {self.compress}" if self.compress else "")
        gain = (
            f"predicted to shorten {format_time(self.before)} of backward and forward pass by "
            f"{1 - self.cycle / self.before:.1%}"
            if self.changed
            else f"as before, for {format_time(self.cycle)} of backward and forward pass"
        )
        return (
            f"Measured before step {self.step}: {did}, {gain}; a bucket costs {format_time(link.latency)} and "
            f"moves at {format_rate(link.bandwidth)}"
            + (f". {self.reason[:1].upper()}{self.reason[1:]}" if self.reason else "")
        )


class Tuner:
    """Watches a model train, and says when to lay out other buckets.

    Args:
        transport: what moves buckets.
        specs: the trained parameters, in order of registration.
        schedule: which one runs.
        cut: whether buckets are to be chosen; else what is in use stays.
        codecs: compressions to choose from; empty if that is no choice.
        packing: how a bucket of so many elements travels through a compression.
    """

    def __init__(
        self,
        transport: Transport,
        specs: Sequence[ParameterSpec],
        schedule: ScheduleName,
        *,
        cut: bool,
        codecs: Sequence[str],
        packing: Callable[[str | None, int], Packing | None],
    ) -> None:
        self.tunings: list[Tuning] = []
        self._transport = transport
        self._specs = specs
        self._schedule: ScheduleName = schedule
        self._cut = cut
        self._codecs = codecs
        self._packing = packing
        self._order = sending_order(specs)
        self._watch: Watch | None = None
        self._at = WARMUP + OBSERVED

    def watch(self, step: int) -> Watch | None:
        """Who observes the step that begins, if it is to be observed."""
        if step < self._at - OBSERVED:
            return None
        if self._watch is None:
            self._watch = Watch(self._transport, len(self._specs))
        return self._watch

    def due(self, step: int) -> bool:
        """Whether to choose before this step."""
        return step >= self._at and self._watch is not None

    def postpone(self, step: int) -> None:
        """Observe anew from this step on: those before it were unlike what comes."""
        self._watch = None
        self._at = max(self._at, step + OBSERVED + 1)

    def choose(
        self,
        step: int,
        buckets: Sequence[Bucket],
        compress: str | None,
        *,
        values: torch.Tensor,
        step_seconds: float,
    ) -> Tuning | None:
        """Measure the links and choose; between two steps, by all ranks together.

        The transport must have no bucket. ``None`` where a link is so fast, or so busy, that larger
        transfers take no longer than small ones.

        Args:
            step: the step that begins.
            buckets: in use.
            compress: in use.
            values: gradients, flat.
            step_seconds: what a step took of late.
        """
        assert self._watch is not None
        begun = self._now()
        gradients = self._gradients(known_to_all(self._transport, self._watch.medians().to(values.device)))
        idle = self._watch.idle_cores()
        self._watch = None
        current = _boundaries(buckets)
        way = self._measured(compress, values)
        tuning = None
        if way is not None:
            before = self._cycle(gradients, current, way)
            reason, codec = "", compress
            if self._codecs:
                codec, reason = self._codec(gradients, len(current), compress, way, values, idle)
            if codec != compress:
                way = self._measured(codec, values)
        if way is not None:
            tuning = self._best(step, gradients, current, compress, before, way, reason)
        spent = self._now() - begun
        pause = max(LEAST_PAUSE, math.ceil(PATIENCE * spent / max(step_seconds, 1e-9)))
        tuning = self._agree(tuning, step + pause, values.device)
        if tuning is not None:
            self.tunings.append(tuning)
        return tuning

    def _now(self) -> float:
        return self._transport.seconds(self._transport.stamp())

    def _measured(self, codec: str | None, values: torch.Tensor) -> Way | None:
        sharded = self._schedule != "allreduce"
        reduces, gathers = time_legs(
            self._transport, values, sharded=sharded, packing=lambda numel: self._packing(codec, numel)
        )
        try:
            reduce = fit_link(reduces)
            gather = fit_link(gathers) if gathers else None
        except EngineError:
            return None
        return Way(compress=codec, reduce=reduce, gather=gather)

    def _codec(
        self,
        gradients: Gradients,
        num_buckets: int,
        compress: str | None,
        way: Way,
        values: torch.Tensor,
        idle: float,
    ) -> tuple[str | None, str]:
        """Which compression, and why.

        The line of what is in use is taken for the link's: with a codec it tells what the codec leaves.
        """
        plain = way if compress is None else self._measured(None, values)
        if plain is None:
            return compress, ""
        n = self._transport.world_size
        # An all-reduce is both legs in one.
        legs = 1 if self._schedule != "allreduce" else 2
        speeds = [self._speed(name, values) for name in self._codecs]
        told = choose(
            Exchange(
                nbytes=sum(gradients.sizes),
                num_ranks=n,
                num_buckets=num_buckets,
                latency=plain.reduce.link.latency / (legs * (n - 1)),
                bandwidth=legs * plain.reduce.link.bandwidth * (n - 1) / n,
                compute=max(gradients.ready) + sum(gradients.forward),
                busy=1.0 - min(1.0, idle),
                both_legs=True,
            ),
            speeds,
        )
        return None if told.name == NO_CODEC.name else told.name, told.reason

    def _speed(self, name: str, values: torch.Tensor) -> CodecSpeed:
        """The slowest rank's."""
        own = measure_codec(make_codec(name, values.dtype), values[:SAMPLE], clock=time.perf_counter)
        row = torch.tensor(
            [own.ratio, own.encode, own.decode, -own.error], dtype=torch.float64, device=values.device
        )
        ratio, encode, decode, error = self._transport.exchange(row).amin(dim=0).tolist()
        return CodecSpeed(name=own.name, ratio=ratio, encode=encode, decode=decode, error=-error)

    def _best(
        self,
        step: int,
        gradients: Gradients,
        current: tuple[int, ...],
        compress: str | None,
        before: float,
        way: Way,
        reason: str,
    ) -> Tuning:
        found = self._boundaries(gradients, current, way) if self._cut else current
        cycle, as_it_is = (self._cycle(gradients, cut, way) for cut in (found, current))
        if cycle > as_it_is * (1 - LEAST_GAIN):
            found, cycle = current, as_it_is
        return Tuning(
            step=step,
            boundaries=found,
            compress=way.compress,
            changed=found != current or way.compress != compress,
            cycle=cycle,
            before=before,
            compute=max(gradients.ready) + sum(gradients.forward),
            way=way,
            reason=reason,
        )

    def _boundaries(self, gradients: Gradients, current: tuple[int, ...], way: Way) -> tuple[int, ...]:
        reduce, gather = way.reduce.link, None if way.gather is None else way.gather.link
        found = best_cut(gradients, reduce=reduce, gather=gather).boundaries
        if self._schedule != "early" or gather is None:
            return found
        return tuple(early_cut(gradients, [current, found], reduce, gather))

    def _cycle(self, gradients: Gradients, boundaries: tuple[int, ...], way: Way) -> float:
        reduce, gather = way.reduce.link, None if way.gather is None else way.gather.link
        if self._schedule == "early" and gather is not None:
            return early_cycle(gradients, boundaries, reduce, gather)
        return cut_timing(gradients, boundaries, reduce=reduce, gather=gather).cycle

    def _gradients(self, seen: torch.Tensor) -> Gradients:
        """Of each parameter in sending order; ``seen`` has shape ``(2, parameters)``."""
        ready, forward = seen.tolist()
        specs = [self._specs[i] for i in self._order]
        return Gradients(
            sizes=tuple(spec.numel * spec.itemsize for spec in specs),
            ready=tuple(ready[i] for i in self._order),
            forward=tuple(forward[i] for i in self._order),
            kinds=tuple(spec.dtype for spec in specs),
        )

    def _agree(self, mine: Tuning | None, next_at: int, device: torch.device) -> Tuning | None:
        """Rank 0's choice on all ranks: computed alike, but on processors that may round differently."""
        codecs = (None, *self._codecs)
        row = torch.full((len(self._specs) + 4,), -1, dtype=torch.int64)
        chosen, rest = row[:-4], row[-4:]
        rest[0], rest[3] = mine is not None, next_at
        if mine is not None:
            chosen[: len(mine.boundaries)] = torch.tensor(mine.boundaries)
            rest[1] = codecs.index(mine.compress) if self._codecs else 0
            rest[2] = mine.changed
        rows = self._transport.exchange(row.to(device)).cpu()
        *boundaries, _, codec, changed, self._at = rows[0].tolist()
        if mine is None or not rows[:, -4].all():
            return None
        return replace(
            mine,
            boundaries=tuple(each for each in boundaries if each >= 0),
            compress=codecs[codec] if self._codecs else mine.compress,
            changed=bool(changed),
        )


def check_agreed(transport: Transport, digest: bytes, device: torch.device) -> None:
    """All ranks are about to cut alike.

    Raises:
        EngineError: a rank is not; sums of unlike buckets would be wrong without any error.
    """
    rows = transport.exchange(torch.tensor(list(digest), dtype=torch.uint8, device=device))
    odd = (rows != rows[0]).any(dim=1).nonzero().view(-1).tolist()
    if odd:
        raise EngineError(
            f"ranks {odd} would cut other buckets than rank 0",
            hint="give the bucket size, like bucket='2MB', and report this as a bug",
        )


def _boundaries(buckets: Sequence[Bucket]) -> tuple[int, ...]:
    ends, end = [], 0
    for bucket in buckets:
        end += len(bucket.slots)
        ends.append(end)
    return tuple(ends)


def _line_facts(fit: LinkFit) -> dict[str, float]:
    return {"latency": fit.link.latency, "bandwidth": fit.link.bandwidth, "error": fit.error}
