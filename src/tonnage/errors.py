"""What a user can cause or mend: one tree of errors, shown without a traceback.

::

    TonnageError
    ├── UsageError      a command line or argument that can't be meant
    ├── UnitError       "500 mbits" where "500mbit" was wanted
    ├── LayoutError     parallel degrees or models that don't fit each other
    ├── LedgerError     a ledger file that is foreign, damaged or newer than this version
    ├── LinkError       a link, namespace or rank process that could not be made
    ├── MissingExtra    a part whose optional packages aren't installed
    ├── EngineError     the training engine was used in a way that it refuses
    └── RankFailure     another rank died, hangs or fell out of step

A bug of our own is an ``assert`` and crashes with its traceback.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class TonnageError(Exception):
    """What went wrong, where, and what to do about it.

    Args:
        what: one clause with the value that was met.
        where: file, line, rank or object that it was met in.
        hint: what the reader can do, as a command where there is one.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"where: {self.where}")
        if self.hint:
            lines.append(f"do:    {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between rank processes; the keywords would be lost by the default.
        return _rebuild, (type(self), self.what, self.where, self.hint)


class UsageError(TonnageError):
    """A command line or argument that can't be meant; exit status 2."""


class UnitError(UsageError):
    """Text that is no size, rate or time."""


class LayoutError(TonnageError):
    """Parallel degrees, models or clusters that don't fit each other."""


class LedgerError(TonnageError):
    """A ledger file that is foreign, truncated, damaged or newer than this version."""


class LinkError(TonnageError):
    """A link, a namespace or a rank's process that could not be made."""


class MissingExtra(TonnageError):
    """A part whose optional packages aren't installed."""


class EngineError(TonnageError):
    """The training engine was used in a way that it refuses."""


class RankFailure(TonnageError):
    """Another rank died, hangs, or fell out of step.

    Args:
        what: what happened, naming the rank.
        ranks: the ranks at fault, as far as known.
        where: the rank and transfer that noticed.
        hint: what to do.
    """

    def __init__(self, what: str, *, ranks: tuple[int, ...] = (), where: str = "", hint: str = "") -> None:
        super().__init__(what, where=where, hint=hint)
        self.ranks = ranks

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_rank_failure, (self.what, self.ranks, self.where, self.hint)


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import ``module``, or say which extra brings it.

    Args:
        module: dotted name.
        extra: the extra of this package that installs it.
        purpose: what it is needed for, to finish "… is needed for".

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that is there but lacks one of its own imports is broken, not missing.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise MissingExtra(
            f"{module.split('.')[0]} is needed for {purpose}, and is not installed",
            hint=f"pip install 'tonnage[{extra}]'",
        ) from error


def _rebuild(kind: type[TonnageError], what: str, where: str, hint: str) -> TonnageError:
    return kind(what, where=where, hint=hint)


def _rebuild_rank_failure(what: str, ranks: tuple[int, ...], where: str, hint: str) -> RankFailure:
    return RankFailure(what, ranks=ranks, where=where, hint=hint)
