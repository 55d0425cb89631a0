"""``tonnage compare``: what changed from one ledger to another, and a check for continuous integration."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the main parser."""
    parser = subparsers.add_parser(
        "compare",
        help="say what changed between two ledgers",
        description="Say what changed from one ledger to another, per step and rank, after warm-up.",
        epilog="example: tonnage compare before.ledger after.ledger --fail-if 'step>+3%%'",
    )
    parser.add_argument("before", metavar="BEFORE", help="the first ledger file")
    parser.add_argument("after", metavar="AFTER", help="the second ledger file")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit with status 1 when it holds, as in 'step>+3%%'; of step, exposed, wire, nbytes, calls; "
        "may be given more than once",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare the ledgers; 1 when a condition holds."""
    from rich.console import Console

    from tonnage.ledger import compare, read_ledger
    from tonnage.report import after_warmup, comparison_json, holding, parse_condition, print_comparison

    conditions = [parse_condition(text) for text in args.fail_if]
    before, after = (after_warmup(read_ledger(path)) for path in (args.before, args.after))
    comparison = compare(before, after)
    failed = [line for condition in conditions if (line := holding(condition, comparison))]
    if args.json:
        print(json.dumps({**comparison_json(comparison), "failed": failed}, allow_nan=False))
    else:
        print_comparison(comparison, Console())
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0
