"""``tonnage report``: what one or several ledgers say, in the terminal, as a page or as JSON."""

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
        "report",
        help="say what ledgers say: step times, what was hidden, what stood still",
        description="Say what one or several ledgers say: the verdict first, then the numbers behind it.",
        epilog="example: tonnage report ddp.ledger tonnage.ledger --html report.html",
    )
    parser.add_argument("ledgers", nargs="+", metavar="LEDGER", help="a ledger file")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page as well")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the ledgers, print the report, write the page."""
    from rich.console import Console

    from tonnage.ledger import read_ledger
    from tonnage.report import print_report, report_json, write_html

    ledgers = [read_ledger(path) for path in args.ledgers]
    page = write_html(ledgers, args.html) if args.html else None
    if args.json:
        print(json.dumps(report_json(ledgers), allow_nan=False))
    else:
        print_report(ledgers, Console())
    if page is not None:
        print(f"page: {page}", file=sys.stderr)
    return 0
