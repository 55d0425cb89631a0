from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.demo.text import MOST_NBYTES, read_text
from tonnage.errors import UsageError


def test_without_a_folder_it_is_the_interpreters_own_library() -> None:
    text = read_text(None)
    assert 1_000_000 < len(text) <= MOST_NBYTES
    assert text == read_text(None)


def test_files_come_in_order_of_their_paths_without_binary_and_hidden_ones(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"b" * 70_000)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_bytes(b"a" * 10)
    (tmp_path / "c.bin").write_bytes(b"\0" * 90_000)
    (tmp_path / ".hidden").write_bytes(b"h" * 90_000)
    assert read_text(tmp_path) == b"a" * 10 + b"b" * 70_000


def test_too_little_text_is_an_error_that_says_how_much_there_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    with pytest.raises(UsageError, match="only 3 bytes"):
        read_text(tmp_path)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        read_text(tmp_path / "absent")
