"""Who has died or hangs, and who noticed first.

A killed process closes its sockets and its peers see it at once; a stopped or unplugged one is silent.
So each rank beats: once a second it writes a counter into the job's store. Nobody reads the beats
while all is well. Only a rank that has waited long for another reads that one's beat, and if it has
not changed for ``hang_timeout`` seconds, the other hangs. The first to find a culprit publishes its
name, so that ranks further away name the cause and not the neighbour that stopped because of it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

LINGER = 1.0
"""Seconds between publishing a failure and acting on it, in which others see the cause themselves."""

_INTERVAL = 1.0
_FAILED = "failed"

# torchrun's agent can hold the store; then no rank is to blame for it.
_STORE_RANK = -1 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these are there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A rank at fault and what it did."""

    rank: int
    reason: str


class Health:
    """Beats for this rank, and finds out about others when asked to.

    Args:
        store: a connection to the job's store that nobody else uses.
        rank: this rank.
        world_size: ranks of the job.
        hang_timeout: seconds without a beat after which a rank that is waited for counts as hanging.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, hang_timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hang_timeout = hang_timeout
        self._store = store
        self._suspects: frozenset[int] = frozenset()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._published: Verdict | None = None
        self._to_publish: Verdict | None = None
        self._in_call_since: float | None = None
        self._store_lost = ""
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tonnage-health", daemon=True)
        self._thread.start()

    def suspect(self, ranks: Iterable[int]) -> None:
        """Watch the beats of these ranks from now on; of none when empty."""
        self._suspects = frozenset(ranks) - {self.rank}
        if not self._suspects:
            self._seen.clear()

    def verdict(self) -> Verdict | None:
        """The rank at fault as far as known by now; never blocks."""
        if self._published is not None:
            return self._published
        now = time.monotonic()
        if self._store_lost:
            return Verdict(
                rank=_STORE_RANK, reason=f"no longer answers at the job's store ({self._store_lost})"
            )
        since = self._in_call_since
        if since is not None and now - since > self.hang_timeout:
            return Verdict(
                rank=_STORE_RANK, reason=f"has not answered at the job's store for {now - since:.0f} s"
            )
        for rank, (_, changed) in list(self._seen.items()):
            if rank in self._suspects and now - changed > self.hang_timeout:
                return Verdict(rank=rank, reason=f"has shown no sign of life for {now - changed:.0f} s")
        return None

    def publish(self, verdict: Verdict) -> Verdict:
        """Tell all ranks, and return the verdict that was first to be published.

        Blocks for :data:`LINGER` seconds: whoever stops sooner looks like a culprit to the others.
        """
        self._to_publish = verdict
        self._wake.set()
        deadline = time.monotonic() + LINGER
        while self._published is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(max(0.0, deadline - time.monotonic()))
        return self._published or verdict

    def close(self) -> None:
        """Stop beating."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=2 * _INTERVAL)

    def _run(self) -> None:
        beat = 0
        while not self._closing:
            beat += 1
            self._in_call_since = time.monotonic()
            try:
                self._round(beat)
            except (RuntimeError, OSError) as error:
                # The store's host is gone, or the job is ending. Only a rank that waits will ask which.
                self._store_lost = (str(error).splitlines() or ["unreachable"])[0][:200]
                return
            self._in_call_since = None
            self._wake.wait(_INTERVAL)
            self._wake.clear()

    def _round(self, beat: int) -> None:
        self._store.set(_key(self.rank), str(beat))
        if self._store.check([_FAILED]):
            told = json.loads(self._store.get(_FAILED))
            self._published = Verdict(rank=told["rank"], reason=told["reason"])
        elif self._to_publish is not None:
            verdict = self._to_publish
            self._store.set(_FAILED, json.dumps({"rank": verdict.rank, "reason": verdict.reason}))
            self._published = verdict
        for rank in self._suspects:
            value = self._store.get(_key(rank)) if self._store.check([_key(rank)]) else b""
            if rank not in self._seen or self._seen[rank][0] != value:
                self._seen[rank] = (value, time.monotonic())


def _key(rank: int) -> str:
    return f"beat/{rank}"
