"""A ledger on disk: Parquet, with the schema's version and the run's facts in the file's metadata.

Any Parquet reader opens the table; ours also tells a foreign file from a damaged one, and a newer
one from an older. A file is written beside its name and moved there whole, so that a reader sees the
old ledger or the new one.

Parquet checks neither its pages nor its footer, so a flipped bit could pass as another number of
bytes. A *seal*, a hash of all the rest, lies between the last page and the footer, where Parquet's
offsets let other readers pass it by::

    PAR1 | pages | TNSEAL1 and a newline, 32 bytes of BLAKE2b | footer | its length | PAR1
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
from pathlib import Path
from typing import Any

import polars as pl

from tonnage.errors import LedgerError
from tonnage.ledger.schema import COLUMNS, SCHEMA_VERSION
from tonnage.ledger.table import Ledger

_VERSION_KEY = "tonnage.schema_version"
_FACTS_KEY = "tonnage.facts"
_MAGIC = b"PAR1"
_SEAL_MARK = b"TNSEAL1\n"
_SEAL_SIZE = len(_SEAL_MARK) + 32
_TAIL_SIZE = 8  # the footer's length, and the magic


def write_ledger(ledger: Ledger, path: str | Path) -> Path:
    """Save ``ledger`` whole or not at all; returns the path.

    Raises:
        LedgerError: the folder is missing or can't be written, or a fact is no JSON value.
    """
    target = Path(path)
    data = to_bytes(ledger)
    temporary = target.with_name(f".tonnage-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise LedgerError(
            f"can't write the ledger: {error.strerror}",
            where=str(target),
            hint="name a folder that can be written and has room",
        ) from error
    finally:
        with contextlib.suppress(OSError):  # it is gone, or its folder never was
            temporary.unlink()
    return target


def read_ledger(path: str | Path) -> Ledger:
    """The ledger in this file.

    Raises:
        LedgerError: the file is missing, truncated, damaged, of another kind, or from a newer version.
    """
    where = str(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise LedgerError(f"can't read the ledger: {error.strerror}", where=where) from error
    return from_bytes(data, where=where)


def to_bytes(ledger: Ledger) -> bytes:
    """The file's content.

    Raises:
        LedgerError: a fact is no JSON value.
    """
    try:
        facts = json.dumps(ledger.facts, allow_nan=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise LedgerError(
            f"a fact of the run can't be saved: {error}", hint="use values that JSON can hold"
        ) from error
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {_VERSION_KEY: str(SCHEMA_VERSION), _FACTS_KEY: facts}
    ledger.frame.write_parquet(buffer, compression="zstd", metadata=metadata)
    return _seal(buffer.getvalue())


def from_bytes(data: bytes, *, where: str = "") -> Ledger:
    """The ledger with this content; ``where`` names its origin in errors.

    Raises:
        LedgerError: as :func:`read_ledger`.
    """
    _check_frame(data, where)
    damaged = LedgerError(
        "the ledger is damaged: its content is not what was sealed",
        where=where,
        hint="take another copy; a ledger that another program wrote anew has lost its seal",
    )
    is_whole = _is_whole(data)
    # No broken footer reaches the Parquet reader, which allocates by the lengths that it finds there.
    # A file without any seal still may: it is foreign, or of a newer version, and its metadata tells.
    if not is_whole and _SEAL_MARK in data:
        raise damaged
    try:
        metadata = pl.read_parquet_metadata(io.BytesIO(data))
        if _VERSION_KEY not in metadata:
            raise LedgerError(
                "a Parquet file, but no ledger", where=where, hint="give a file that Tonnage wrote (*.ledger)"
            )
        _check_version(metadata[_VERSION_KEY], where)
        if not is_whole:
            raise damaged
        facts = json.loads(metadata.get(_FACTS_KEY, "{}"))
        frame = pl.read_parquet(io.BytesIO(data), columns=list(COLUMNS))
    except LedgerError:
        raise
    # Polars reports damage as many kinds, and a panic of its Rust part derives from BaseException alone.
    except (
        pl.exceptions.PolarsError,
        pl.exceptions.PanicException,
        OSError,
        ValueError,
        RecursionError,
    ) as error:
        raise LedgerError(
            f"the ledger is damaged: {error}", where=where, hint="run it again, or take another copy"
        ) from error
    if not isinstance(facts, dict):
        raise LedgerError("the ledger's facts are no table", where=where)
    return Ledger(frame, facts)


def _seal(data: bytes) -> bytes:
    """The Parquet file with the hash of all its bytes before its footer."""
    cut = _footer_start(data)
    return data[:cut] + _SEAL_MARK + _digest(data[:cut], data[cut:]) + data[cut:]


def _is_whole(data: bytes) -> bool:
    end = _footer_start(data)
    start = end - _SEAL_SIZE
    if start < len(_MAGIC):
        return False
    return data[start:end] == _SEAL_MARK + _digest(data[:start], data[end:])


def _footer_start(data: bytes) -> int:
    """Where the footer begins, by the length at the file's end; negative if that can't be."""
    return len(data) - _TAIL_SIZE - int.from_bytes(data[-_TAIL_SIZE:-4], "little")


def _digest(pages: bytes, footer: bytes) -> bytes:
    digest = hashlib.blake2b(pages, digest_size=32)
    digest.update(footer)
    return digest.digest()


def _check_frame(data: bytes, where: str) -> None:
    if not data:
        raise LedgerError("the file is empty", where=where)
    if data[:4] != _MAGIC:
        raise LedgerError("not a ledger", where=where, hint="give a file that Tonnage wrote (*.ledger)")
    if len(data) < 12 or data[-4:] != _MAGIC:
        raise LedgerError(
            "the ledger is truncated: its end is missing",
            where=where,
            hint="copy it again from where it was written",
        )


def _check_version(text: str, where: str) -> None:
    try:
        version = int(text)
    except ValueError:
        raise LedgerError(f"the ledger's version {text!r} is no number", where=where) from None
    if version > SCHEMA_VERSION:
        raise LedgerError(
            f"the ledger has schema version {version}, this Tonnage reads up to {SCHEMA_VERSION}",
            where=where,
            hint="pip install --upgrade tonnage",
        )
    if version < 1:
        raise LedgerError(f"the ledger has schema version {version}, which never was", where=where)
