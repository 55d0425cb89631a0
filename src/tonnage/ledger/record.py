"""Append movements from a hot loop at the cost of one packed write.

What changes seldom (kind, op, group, link, label) is named once, as a *channel*; what changes with
every movement is packed into a block allocated beforehand. A full block is kept and a new one begun,
so nothing is ever copied while the loop runs. Strings and tables come into being in
:meth:`Recorder.ledger`, after it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from tonnage.ledger.schema import COLUMNS
from tonnage.ledger.table import Ledger

_ENTRY = struct.Struct("<iiqqqddd")
_ENTRY_DTYPE = np.dtype(
    [
        ("channel", "<i4"),
        ("step", "<i4"),
        ("calls", "<i8"),
        ("nbytes", "<i8"),
        ("wire_nbytes", "<i8"),
        ("start", "<f8"),
        ("stop", "<f8"),
        ("exposed", "<f8"),
    ]
)
assert _ENTRY.size == _ENTRY_DTYPE.itemsize


class Recorder:
    """Collects one rank's movements; safe to append to from several threads.

    Args:
        rank: whose movements these are.
        block: entries allocated at a time, of 56 bytes each.
    """

    def __init__(self, rank: int, *, block: int = 16384) -> None:
        self.rank = rank
        self._block = block
        self._channels: dict[tuple[str, str, str, int, str, str], int] = {}
        self._full: list[bytearray] = []
        self._buffer = bytearray(block * _ENTRY.size)
        self._offset = 0
        self._end = len(self._buffer)
        self._lock = threading.Lock()

    def channel(
        self,
        kind: str,
        op: str,
        *,
        group: str = "dp",
        group_size: int = 1,
        link: str = "none",
        label: str = "",
    ) -> int:
        """The number under which movements of this description are added; the same one if asked again."""
        key = (kind, op, group, group_size, link, label)
        with self._lock:
            return self._channels.setdefault(key, len(self._channels))

    def add(
        self,
        channel: int,
        step: int,
        nbytes: int,
        wire_nbytes: int,
        start: float,
        stop: float,
        exposed: float = 0.0,
        calls: int = 1,
        _pack: Any = _ENTRY.pack_into,
        _size: int = _ENTRY.size,
    ) -> None:
        """Append one movement: bytes, seconds on the run's clock, and seconds computation stood still."""
        with self._lock:
            if self._offset == self._end:
                self._full.append(self._buffer)
                self._buffer = bytearray(self._end)
                self._offset = 0
            _pack(self._buffer, self._offset, channel, step, calls, nbytes, wire_nbytes, start, stop, exposed)
            self._offset += _size

    def __len__(self) -> int:
        return len(self._full) * self._block + self._offset // _ENTRY.size

    def ledger(self, facts: Mapping[str, Any] | None = None) -> Ledger:
        """All that was added so far, as a table."""
        with self._lock:
            parts: list[bytes | bytearray] = [*self._full, bytes(self._buffer[: self._offset])]
            channels = list(self._channels)
        entries = np.concatenate([np.frombuffer(part, _ENTRY_DTYPE) for part in parts])
        names = ("kind", "op", "group", "group_size", "link", "label")
        described = {
            name: pl.Series(name, [each[i] for each in channels], dtype=COLUMNS[name]).gather(
                entries["channel"].astype(np.int64)
            )
            for i, name in enumerate(names)
        }
        counted = {name: entries[name] for name in _ENTRY_DTYPE.names or () if name != "channel"}
        frame = pl.DataFrame(
            {"rank": np.full(len(entries), self.rank, np.int32), **counted, **described},
        )
        return Ledger(frame, facts)
