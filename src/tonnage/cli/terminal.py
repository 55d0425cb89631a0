"""What commands share at the edge: tables and progress in a terminal, and files written whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """Where results are printed."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            # Rich would end with status 1 here; the command's own ending says that a reader went away.
            raise BrokenPipeError

    return Piped()


def print_table(
    to: Console,
    title: str,
    heads: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    *,
    numbers: tuple[int, ...] = (),
) -> None:
    """Print a table whose words stay whole: its widest column of words gives way, the others don't.

    Args:
        to: the terminal or pipe.
        title: above the table; none where empty.
        heads: of the columns.
        rows: nothing is printed without any.
        numbers: columns that are set flush right.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    if title:
        to.print(title, style="italic", highlight=False, markup=False)
    widths = [max(cell_len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    # Two spaces between columns where there is room, else one.
    gap = 1 if sum(widths) + 2 * (len(widths) - 1) <= to.width else 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, gap, 0, 0))
    words = [i for i in range(len(heads)) if i not in numbers]
    gives_way = max(words, key=lambda i: widths[i], default=0)
    for i, head in enumerate(heads):
        justify = "right" if i in numbers else "left"
        table.add_column(head, justify=justify, no_wrap=i != gives_way)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*map(Text, row))
    to.print(table, highlight=False)
    to.print()


@contextmanager
def progress(what: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr where that is a terminal: what it gives is told how many of how many are done.

    Args:
        what: is being counted.
        shown: whether a bar is wanted at all.
    """
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task: Any = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def write_text(path: Path, text: str, *, what: str) -> None:
    """Write ``text`` whole or not at all.

    Args:
        path: of the file; one that is there is replaced.
        text: its content.
        what: how an error calls it.

    Raises:
        UsageError: the file can't be written there.
    """
    from tonnage.errors import UsageError

    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UsageError(
            f"can't write {what}: {error.strerror}", where=str(path), hint="name a file in a folder of yours"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
