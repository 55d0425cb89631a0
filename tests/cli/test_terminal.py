"""Tables at the widths that people have, and files written whole or not at all."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from tonnage.cli.terminal import print_table, write_text
from tonnage.errors import UsageError

HEADS = ("what", "collective", "link", "sent")
ROWS = [
    ("gradients of experts, across shards", "reduce-scatter", "nvlink", "8.02 GB"),
    ("参数", "send", "nic", "9 B"),
]


def shown(width: int) -> str:
    to = StringIO()
    print_table(Console(file=to, width=width), "title", HEADS, ROWS, numbers=(3,))
    return to.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_word_is_broken_and_no_line_is_too_long(width: int) -> None:
    text = shown(width)
    for word in ("reduce-scatter", "nvlink", "8.02 GB", "experts,", "参数"):
        assert word in text
    assert all(cell_len(line) <= width for line in text.splitlines())


def test_nothing_is_printed_without_rows() -> None:
    to = StringIO()
    print_table(Console(file=to), "title", HEADS, [])
    assert to.getvalue() == ""


def test_colours_stay_out_of_a_pipe() -> None:
    assert "\x1b" not in shown(80)


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    write_text(path, "new", what="the text")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_can_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        write_text(tmp_path / "none" / "out.txt", "new", what="the text")
    assert "can't write the text" in caught.value.what
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []
