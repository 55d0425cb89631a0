"""A Nsight Systems SQLite export to one rank a device."""

from __future__ import annotations

import gzip
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from tonnage.errors import TonnageError
from tonnage.trace.events import Events, RankTrace, Step

_KERNELS = """
SELECT k.start, k."end" - k.start, coalesce(s.value, 'kernel'), 'kernel', k.deviceId, k.streamId,
       coalesce(k.correlationId, -1), -1, 0
FROM CUPTI_ACTIVITY_KIND_KERNEL k LEFT JOIN StringIds s ON s.id = k.demangledName"""
_COPIES = """
SELECT start, "end" - start, 'Memcpy', 'gpu_memcpy', deviceId, streamId, coalesce(correlationId, -1), bytes, 0
FROM CUPTI_ACTIVITY_KIND_MEMCPY"""
_FILLS = """
SELECT start, "end" - start, 'Memset', 'gpu_memset', deviceId, streamId, coalesce(correlationId, -1), bytes, 0
FROM CUPTI_ACTIVITY_KIND_MEMSET"""
_CALLS = """
SELECT c.start, c."end" - c.start, coalesce(s.value, 'call'), 'cuda_runtime', -1, -1,
       coalesce(c.correlationId, -1), -1, coalesce(c.globalTid, 0)
FROM CUPTI_ACTIVITY_KIND_RUNTIME c LEFT JOIN StringIds s ON s.id = c.nameId"""
_RANGES = """
SELECT n.start, n."end" - n.start, coalesce(n.text, s.value, ''), 'user_annotation', -1, -1, -1, -1,
       coalesce(n.globalTid, 0)
FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId WHERE n."end" IS NOT NULL"""
_PARTS = {
    "CUPTI_ACTIVITY_KIND_KERNEL": _KERNELS,
    "CUPTI_ACTIVITY_KIND_MEMCPY": _COPIES,
    "CUPTI_ACTIVITY_KIND_MEMSET": _FILLS,
    "CUPTI_ACTIVITY_KIND_RUNTIME": _CALLS,
    "NVTX_EVENTS": _RANGES,
}

_Row = tuple[int, int, str, str, int, int, int, int, int]


def read_nsys(path: Path) -> list[RankTrace]:
    """One rank a device, by device number; -1 as rank, for the file doesn't know ranks.

    Raises:
        TonnageError: the file is no export of Nsight Systems, or no device worked in it.
    """
    with _unpacked(path) as file, closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as base:
        try:
            there = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            rows = [row for table, query in _PARTS.items() if table in there for row in base.execute(query)]
        except sqlite3.DatabaseError as error:
            raise TonnageError(f"no Nsight Systems export: {error}", where=str(path)) from error
    rows = [row for row in rows if row[0] is not None and row[1] >= 0]
    devices = sorted({row[4] for row in rows if row[4] >= 0})
    if not devices:
        raise TonnageError("no device events in this export", where=str(path))
    return [_rank(rows, device, path) for device in devices]


def _rank(rows: list[_Row], device: int, path: Path) -> RankTrace:
    """The device's events, and the host calls that launched them; with one device, all calls."""
    own = {row[6] for row in rows if row[4] == device}
    calls = {row[8] for row in rows if row[4] < 0 and row[6] in own and row[6] >= 0}
    kept = sorted(
        (row for row in rows if row[4] == device or (row[4] < 0 and row[8] in calls)), key=lambda row: row[0]
    )
    names = list(dict.fromkeys(row[2] for row in kept))
    categories = list(dict.fromkeys(row[3] for row in kept))
    threads = list(dict.fromkeys(_thread(row) for row in kept))
    place = [{each: i for i, each in enumerate(table)} for table in (names, categories)]
    thread_place = {each: i for i, each in enumerate(threads)}
    events = Events(
        start=np.asarray([row[0] for row in kept], np.int64),
        duration=np.asarray([row[1] for row in kept], np.int64),
        name=np.asarray([place[0][row[2]] for row in kept], np.int32),
        category=np.asarray([place[1][row[3]] for row in kept], np.int32),
        thread=np.asarray([thread_place[_thread(row)] for row in kept], np.int32),
        device=np.asarray([row[4] for row in kept], np.int32),
        stream=np.asarray([row[5] for row in kept], np.int64),
        correlation=np.asarray([row[6] for row in kept], np.int64),
        external=np.full(len(kept), -1, np.int64),
        nbytes=np.asarray([row[7] for row in kept], np.int64),
        names=tuple(names),
        categories=tuple(categories),
        threads=tuple(threads),
    )
    steps: tuple[Step, ...] = ()
    return RankTrace(rank=-1, world_size=0, events=events, steps=steps, source=str(path), rank_basis="order")


def _thread(row: _Row) -> tuple[str, str]:
    return (str(row[4]), str(row[5])) if row[4] >= 0 else (str(row[8] >> 24), str(row[8] & 0xFFFFFF))


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """The file, or an unpacked copy that lasts as long as it is needed: SQLite needs a real file."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if not packed:
        yield path.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "trace.sqlite"
        with gzip.open(path, "rb") as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        yield target
