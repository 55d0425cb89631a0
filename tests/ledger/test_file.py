"""The file: what goes in comes out, damage is told, and a reader sees the old ledger or the new one."""

from __future__ import annotations

import io
import math
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.errors import LedgerError
from tonnage.ledger import SCHEMA_VERSION, Ledger, from_bytes, read_ledger, to_bytes, write_ledger

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
facts_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
rows = st.fixed_dictionaries(
    {"kind": texts, "op": texts},
    optional={
        "rank": st.integers(-(2**31), 2**31 - 1),
        "nbytes": st.integers(-(2**63), 2**63 - 1),
        "start": st.floats(),
        "exposed": st.floats(),
        "label": texts,
    },
)


def same(a: object, b: object) -> bool:
    """Equality in which NaN is itself, at any depth."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def example(num_rows: int = 50) -> Ledger:
    return Ledger.from_rows(
        [
            {
                "kind": "gradient",
                "op": "all-reduce",
                "nbytes": i * 1000,
                "start": i / 7,
                "label": f"bucket {i}",
            }
            for i in range(num_rows)
        ],
        {"run": "an example", "loss": [2.5, float("nan")], "world_size": 4},
    )


def unsealed(metadata: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    example(3).frame.write_parquet(buffer, metadata=metadata)
    return buffer.getvalue()


@given(st.lists(rows, max_size=5), st.dictionaries(texts, facts_values, max_size=4))
def test_what_is_written_is_read(content: list[dict[str, object]], facts: dict[str, object]) -> None:
    ledger = Ledger.from_rows(content, facts)
    again = from_bytes(to_bytes(ledger))
    assert again.frame.equals(ledger.frame)
    assert same(again.facts, ledger.facts)


def test_another_parquet_reader_opens_the_table() -> None:
    assert pl.read_parquet(io.BytesIO(to_bytes(example()))).equals(example().frame)


def test_a_file_cut_anywhere_is_told() -> None:
    data = to_bytes(example())
    for size in range(len(data)):
        with pytest.raises(LedgerError, match=r"empty|not a ledger|truncated"):
            from_bytes(data[:size], where="x.ledger")


def test_a_byte_changed_anywhere_is_told() -> None:
    """Parquet alone would hand out some of these as other numbers of bytes."""
    data = to_bytes(example())
    for place in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= flip
            with pytest.raises(LedgerError):
                from_bytes(bytes(damaged))


@given(st.data())
@settings(max_examples=200)
def test_bytes_moved_about_are_told(data: st.DataObject) -> None:
    whole = to_bytes(example(8))
    cuts = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    for other in (whole[: cuts[0]] + whole[cuts[1] :], whole[cuts[0] :] + whole[: cuts[0]]):
        if other != whole:
            with pytest.raises(LedgerError):
                from_bytes(other)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_ledger_error(data: bytes) -> None:
    for each in (data, b"PAR1" + data + b"PAR1"):
        with pytest.raises(LedgerError):
            from_bytes(each)


def test_a_foreign_parquet_file_is_no_ledger() -> None:
    buffer = io.BytesIO()
    pl.DataFrame({"a": [1, 2]}).write_parquet(buffer)
    with pytest.raises(LedgerError, match="a Parquet file, but no ledger"):
        from_bytes(buffer.getvalue())


def test_a_newer_version_asks_for_an_upgrade() -> None:
    newer = unsealed({"tonnage.schema_version": str(SCHEMA_VERSION + 1)})
    with pytest.raises(LedgerError, match=f"schema version {SCHEMA_VERSION + 1}") as caught:
        from_bytes(newer, where="x.ledger")
    assert "upgrade" in caught.value.hint
    assert caught.value.where == "x.ledger"


@pytest.mark.parametrize("version", ["0", "-1", "one", ""])
def test_a_version_that_never_was_is_told(version: str) -> None:
    with pytest.raises(LedgerError, match="version"):
        from_bytes(unsealed({"tonnage.schema_version": version}))


def test_a_ledger_rewritten_by_another_program_has_lost_its_seal() -> None:
    with pytest.raises(LedgerError, match="not what was sealed"):
        from_bytes(unsealed({"tonnage.schema_version": "1", "tonnage.facts": "{}"}))


@pytest.mark.parametrize("fact", [object(), {1, 2}, b"bytes", {(1, 2): 3}])
def test_a_fact_that_json_cannot_hold_is_refused(fact: object) -> None:
    with pytest.raises(LedgerError, match="fact"):
        to_bytes(Ledger.empty({"bad": fact}))


def test_facts_that_hold_themselves_are_refused() -> None:
    deep: list[object] = []
    for _ in range(200_000):
        deep = [deep]
    circle: list[object] = []
    circle.append(circle)
    for fact in (deep, circle):
        with pytest.raises(LedgerError, match="fact"):
            to_bytes(Ledger.empty({"bad": fact}))


def test_a_missing_file_or_folder_is_told_with_its_name(tmp_path: Path) -> None:
    for path in (tmp_path / "none.ledger", tmp_path):
        with pytest.raises(LedgerError) as caught:
            read_ledger(path)
        assert caught.value.where == str(path)
    for path in (tmp_path / "no" / "folder.ledger", tmp_path):
        with pytest.raises(LedgerError, match="can't write"):
            write_ledger(example(), path)
    assert list(tmp_path.iterdir()) == []


def test_a_saved_ledger_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = write_ledger(example(), tmp_path / "a.ledger")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_full_disk_leaves_the_old_ledger(tmp_path: Path) -> None:
    path = write_ledger(example(1), tmp_path / "a.ledger")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(LedgerError, match="can't write"):
            write_ledger(example(500), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(read_ledger(path)) == 1
    assert list(tmp_path.iterdir()) == [path]


WRITER = """
import sys
from tonnage.ledger import Ledger, write_ledger

ledgers = [
    Ledger.from_rows([{"kind": "gradient", "op": "send", "nbytes": i, "label": str(n)} for i in range(n)])
    for n in (10, 3000)
]
print("ready", flush=True)
while True:
    for ledger in ledgers:
        write_ledger(ledger, sys.argv[1])
"""


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.011, 0.02, 0.05])
def test_a_writer_killed_at_any_instant_leaves_a_whole_ledger(tmp_path: Path, delay: float) -> None:
    path = write_ledger(example(10), tmp_path / "a.ledger")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        deadline = time.monotonic() + delay
        while True:  # whoever reads meanwhile sees one of the ledgers, too
            assert len(read_ledger(path)) in (10, 3000)
            if time.monotonic() >= deadline:
                break
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    assert len(read_ledger(path)) in (10, 3000)
