"""Three ways to average the same gradients over the same links, as a simulation would time them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings

from tonnage.ledger import Ledger

# Two cores that others use too give no steady time an example.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

RATE = 62_500_000.0
LATENCY = 0.8e-3
FORWARD, BACKWARD, OPTIMIZER = 0.080, 0.160, 0.012
RANKS = 4
PARAMETERS = [1_048_576 if n % 4 == 0 else 262_144 if n % 4 == 1 else 1_024 for n in range(52)]


@dataclass
class Clock:
    """One rank's rows while a step is played."""

    rank: int
    now: float = 0.0
    free: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def compute(self, step: int, op: str, seconds: float) -> None:
        self._add(step, "compute", op, self.now, self.now + seconds)
        self.now += seconds

    def send(self, step: int, kind: str, op: str, label: str, nbytes: int, *, ready: float) -> float:
        factor = (RANKS - 1) / RANKS * (2 if op == "all-reduce" else 1)
        start = max(ready, self.free)
        self.free = start + LATENCY + nbytes * factor / RATE
        self._add(
            step, kind, op, start, self.free, label=label, nbytes=nbytes, wire_nbytes=int(nbytes * factor)
        )
        return self.free

    def wait(self, until: float) -> None:
        if until > self.now:
            self.rows[-1]["exposed"] += until - self.now
            self.now = until

    def _add(self, step: int, kind: str, op: str, start: float, stop: float, **more: Any) -> None:
        row = {
            "rank": self.rank,
            "step": step,
            "kind": kind,
            "op": op,
            "start": start,
            "stop": stop,
            "exposed": 0.0,
        }
        self.rows.append({**row, **more, "link": "nic" if kind != "compute" else "none", "group_size": RANKS})


def _play(
    name: str, step: Callable[[Clock, int, float], None], num_steps: int, slow: dict[int, float]
) -> Ledger:
    ledgers = []
    for rank in range(RANKS):
        clock, noise = Clock(rank), random.Random(7)
        for number in range(num_steps):
            start = clock.now
            step(clock, number, slow.get(rank, 1.0) * noise.uniform(0.98, 1.03))
            clock._add(number, "step", "step", start, clock.now)
        ledgers.append(Ledger.from_rows(clock.rows))
    return Ledger.gather(ledgers, facts(name, num_steps))


def facts(name: str, num_steps: int) -> dict[str, Any]:
    return {
        "run": name,
        "title": f"{name}: 3.3 M parameters on 4 ranks",
        "world_size": RANKS,
        "link_rate": RATE,
        "link_note": "network namespaces, 500 Mbit/s each way, shaped by a token bucket",
        "compute_time": FORWARD + BACKWARD + OPTIMIZER,
        "loss": [2.0 + 2.2 / (1 + 0.15 * step) for step in range(num_steps)],
        "num_params": sum(PARAMETERS) // 4,
        "tokens_per_step": 4096,
        "warmup": 2,
        "notes": ["Gloo over TCP"],
    }


def _naive(clock: Clock, step: int, slow: float) -> None:
    clock.compute(step, "forward", FORWARD * slow)
    clock.compute(step, "backward", BACKWARD * slow)
    for number, nbytes in enumerate(PARAMETERS):
        clock.wait(
            clock.send(step, "gradient", "all-reduce", f"layers.{number}.weight", nbytes, ready=clock.now)
        )
    clock.compute(step, "optimizer", OPTIMIZER * slow)


def _ddp(clock: Clock, step: int, slow: float) -> None:
    clock.compute(step, "forward", FORWARD * slow)
    start = clock.now
    clock.compute(step, "backward", BACKWARD * slow)
    total = sum(PARAMETERS)
    clock.send(step, "gradient", "all-reduce", "bucket 0", total // 3, ready=start + 0.4 * BACKWARD * slow)
    clock.wait(clock.free)
    clock.wait(clock.send(step, "gradient", "all-reduce", "bucket 1", total - total // 3, ready=clock.now))
    clock.compute(step, "optimizer", OPTIMIZER * slow)


def _tonnage(clock: Clock, step: int, slow: float) -> None:
    buckets, size = 15, sum(PARAMETERS) // 15
    clock.compute(step, "forward", FORWARD * slow)
    start = clock.now
    clock.compute(step, "backward", BACKWARD * slow)
    for number in range(buckets):
        ready = start + BACKWARD * slow * (number + 1) / buckets
        clock.send(step, "gradient", "reduce-scatter", f"b{number:02d}", size, ready=ready)
    clock.wait(clock.free)
    clock.compute(step, "optimizer", OPTIMIZER * slow)
    # The parameters of the next step travel while its forward pass runs; the link works both ways.
    for number in reversed(range(buckets)):
        clock.send(step, "parameter", "all-gather", f"b{number:02d}", size, ready=clock.now)
    clock.wait(clock.free - FORWARD * slow)


PLAYERS = {"naive": _naive, "ddp": _ddp, "tonnage": _tonnage}


def run_of(name: str, *, num_steps: int = 12, slow: dict[int, float] | None = None) -> Ledger:
    """A ledger of one of the three ways; ``slow`` has the factor of a rank's compute."""
    return _play(name, PLAYERS[name], num_steps, slow or {})


@pytest.fixture(scope="session")
def three() -> Sequence[Ledger]:
    return [run_of(name) for name in PLAYERS]


@pytest.fixture(scope="session")
def make() -> Callable[..., Ledger]:
    return run_of
