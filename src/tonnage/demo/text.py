"""Real text for the demo: the running interpreter's own library, or any folder of text."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tonnage.errors import UsageError

MOST_NBYTES = 16 * 1024 * 1024
"""Enough for many thousand steps of the demo; more would only take longer to read."""

_LEAST_NBYTES = 64 * 1024
_PEEK = 1024


def read_text(folder: Path | None) -> bytes:
    """The text files below ``folder`` one after another, in order of their paths; at most 16 MiB.

    Args:
        folder: where to look; the standard library's Python sources when ``None``.

    Raises:
        UsageError: there is no such folder, or too little text in it to train on.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise UsageError(f"no folder {str(root)!r} to read text from", hint="give a folder: --text FOLDER")
    text = bytearray()
    for path in _text_files(root, python_only=folder is None):
        try:
            text += path.read_bytes()[: MOST_NBYTES - len(text)]
        except OSError:
            continue  # unreadable files are no reason not to train on the others
        if len(text) >= MOST_NBYTES:
            break
    if len(text) < _LEAST_NBYTES:
        raise UsageError(
            f"only {len(text)} bytes of text below {str(root)!r}, at least {_LEAST_NBYTES} are needed",
            hint="give a folder with more text, or leave --text out to use Python's own library",
        )
    return bytes(text)


def _text_files(root: Path, *, python_only: bool) -> Iterator[Path]:
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py" if python_only else "*")):
        parts = path.relative_to(root).parts
        if skipped.intersection(parts) or any(part.startswith(".") for part in parts):
            continue
        if path.is_file() and (python_only or _looks_like_text(path)):
            yield path


def _looks_like_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_PEEK)
    except OSError:
        return False
    return bool(head) and b"\0" not in head
