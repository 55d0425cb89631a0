"""Trace files to a :class:`Trace`: the door of reading."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from tonnage.errors import TonnageError, UsageError
from tonnage.trace.events import RankTrace, Trace
from tonnage.trace.read_kineto import read_kineto
from tonnage.trace.read_nsys import read_nsys

_SUFFIXES = (".json", ".json.gz", ".sqlite", ".sqlite.gz", ".trace", ".trace.gz")
_IN_NAME = re.compile(r"rank[-_.]?(\d+)|worker[-_.]?(\d+)", re.I)
_LARGE = 20 << 20
"""Bytes of files from which on a second process pays for its start."""

Progress = Callable[[Path, int], None]
"""Called with a file and the bytes of it that were read since the last call."""


def read_trace(
    *paths: str | Path,
    ranks: Sequence[int] | None = None,
    steps: range | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Trace:
    """The ranks in these files, folders or patterns.

    Args:
        paths: files, folders (their traces) or glob patterns.
        ranks: number of each rank, in the order of the files' names, where the files don't say it or say
            it wrongly.
        steps: keep only what began in these training steps.
        progress: told what was read.
        workers: processes that read files beside each other; as many as there are processors if not given.

    Raises:
        UsageError: a path leads to no trace, or ``ranks`` doesn't fit the files.
        TonnageError: a file holds no event.
    """
    files = trace_files(paths)
    found = [rank for file in _read_all(files, progress, workers) for rank in file]
    if ranks is not None and len(ranks) != len(found):
        raise UsageError(f"{len(ranks)} rank numbers for {len(found)} ranks", hint="give one a trace")
    numbered = _numbered(found, ranks)
    if steps is not None:
        numbered = [_within(each, steps) for each in numbered]
    numbered.sort(key=lambda each: each.rank)
    return Trace(ranks=tuple(numbered), notes=tuple(_notes(numbered)))


def trace_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files that these paths mean, by name; numbers in names count as numbers.

    Raises:
        UsageError: a path leads to none.
    """
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            here = [each for each in path.iterdir() if each.name.endswith(_SUFFIXES)]
        elif path.exists():
            here = [path]
        else:
            here = list(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
        if not here:
            raise UsageError("no trace here", where=str(given), hint=f"files end in {', '.join(_SUFFIXES)}")
        found += here
    return sorted(
        dict.fromkeys(found),
        key=lambda each: [
            (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(each))
        ],
    )


def _read_all(files: list[Path], progress: Progress | None, workers: int | None) -> list[list[RankTrace]]:
    wanted = min(workers or os.cpu_count() or 1, len(files))
    if wanted > 1 and sum(each.stat().st_size for each in files) > _LARGE:
        with ProcessPoolExecutor(wanted, mp_context=get_context("spawn")) as pool:
            found = []
            for path, each in zip(files, pool.map(_read_file, files), strict=True):
                if progress:
                    progress(path, path.stat().st_size)
                found.append(each)
            return found
    return [_read_file(path, progress) for path in files]


def _read_file(path: Path, progress: Progress | None = None) -> list[RankTrace]:
    tell = (lambda nbytes: progress(path, nbytes)) if progress else None
    try:
        if path.name.endswith((".sqlite", ".sqlite.gz")):
            return read_nsys(path)
        return [read_kineto(path, progress=tell)]
    except OSError as error:
        raise TonnageError(f"can't read the trace: {error.strerror}", where=str(path)) from error


def _numbered(found: list[RankTrace], ranks: Sequence[int] | None) -> list[RankTrace]:
    """Each rank with its number: from the caller, its file, its file's name, or the order."""
    if ranks is not None:
        return [replace(each, rank=r, rank_basis="argument") for each, r in zip(found, ranks, strict=True)]
    told = [each.rank for each in found if each.rank >= 0]
    if len(told) == len(found) == len(set(told)):
        return found
    named = [_rank_in_name(each.source) for each in found]
    if all(each >= 0 for each in named) and len(set(named)) == len(named):
        return [
            each if each.rank == r else replace(each, rank=r, rank_basis="name")
            for each, r in zip(found, named, strict=True)
        ]
    return [replace(each, rank=i, rank_basis="order") for i, each in enumerate(found)]


def _rank_in_name(source: str) -> int:
    match = _IN_NAME.search(Path(source).name)
    return int(match[1] or match[2]) if match else -1


def _within(each: RankTrace, steps: range) -> RankTrace:
    kept = tuple(step for step in each.steps if step.number in steps)
    if not kept:
        return replace(each, steps=(), events=each.events.select(each.events.start < 0))
    start, stop = kept[0].start, max(step.stop for step in kept)
    inside = (each.events.start >= start) & (each.events.start < stop)
    return replace(each, steps=kept, events=each.events.select(inside))


def _notes(found: list[RankTrace]) -> list[str]:
    notes = []
    for basis, words in (("name", "file names"), ("order", "the order of the files")):
        count = sum(each.rank_basis == basis for each in found)
        if count:
            notes.append(
                f"{count} of {len(found)} rank numbers come from {words}: the traces don't give them"
            )
    for each in found:
        if each.losses:
            lost = "; ".join(
                f"{loss.num_events} {loss.what}" if loss.num_events >= 0 else loss.what
                for loss in each.losses
            )
            where = next((f", {loss.where}" for loss in each.losses if loss.where), "")
            notes.append(f"rank {each.rank}, {Path(each.source).name}: {lost}{where}")
    return notes
