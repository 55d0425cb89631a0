"""The ``tonnage`` command: finds the subcommand's module, runs it, and turns errors into exit statuses.

Exit status 0 is done, 1 an error, 2 wrong use, 130 Ctrl-C, 141 a reader that closed the pipe. Modules
of commands load light, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from tonnage import __version__
from tonnage.errors import TonnageError, UsageError

_COMMANDS = ("demo", "report", "compare", "lab", "plan", "probe", "trace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    # A terminal or pipe whose encoding lacks a sign shows a question mark, instead of a traceback.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except TonnageError as error:
        _show(error, as_json=getattr(args, "json", False))
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more on its way out, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tonnage",
        description="Weighs every byte that large-model training moves.",
        epilog="tonnage COMMAND --help says more, with an example.",
    )
    parser.add_argument("--version", action="version", version=f"tonnage {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        module = _load(command)
        if module is not None:
            module.add_parser(subparsers)
    return parser


def _load(command: str) -> ModuleType | None:
    """The command's module, or nothing where this installation lacks it."""
    name = f"tonnage.cli.{command}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that is there but lacks an import of its own is a fault to be seen.
        if error.name != name:
            raise
        return None


def _show(error: TonnageError, *, as_json: bool) -> None:
    if as_json:
        fields = {"what": error.what, "where": error.where, "hint": error.hint}
        print(json.dumps({"error": {"code": type(error).__name__, **fields}}))
    else:
        print(f"error: {error}", file=sys.stderr)
