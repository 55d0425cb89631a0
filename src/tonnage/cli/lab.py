"""``tonnage lab``: run a job on several hosts on this machine, over links of a rate of your choice."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from tonnage.errors import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tonnage.lab import Hosts, LineCallback, LinkReach, RunResult

_SCHEMA = "tonnage.lab/1"

_EPILOG = """\
examples:
  tonnage lab --ranks 4 --link 500mbit -- python train.py
  tonnage lab --ranks 4 --link 1gbit --link-of 2=100mbit -- python train.py   one slow host
  tonnage lab --ranks 2 --link 1gbit --check                                  measure the links

Each rank sees RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME, as under
torchrun. Exit status is the job's: 0, the first failing rank's, or 124 when --timeout passed.
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the main parser."""
    parser = subparsers.add_parser(
        "lab",
        help="run a job on several hosts on this machine, over links of a chosen rate",
        description="Run one command a rank, each on a host of its own (a network namespace with a shaped "
        "cable to one switch), and tell what each sent and received. Linux; root or user namespaces.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="hosts, one rank each (default 2)")
    parser.add_argument(
        "--link", metavar="RATE", help="rate of every link each way, like 500mbit (default: none)"
    )
    parser.add_argument(
        "--link-of", action="append", default=[], metavar="RANK=RATE", help="another rate for one rank's link"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after this many seconds")
    parser.add_argument("--check", action="store_true", help="measure the links instead of running a job")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long --check measures (default 2)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document; the job prints on stderr"
    )
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="the job, after --")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the job or the check; the job's exit status."""
    from tonnage.lab import Lab, open_lab
    from tonnage.units import parse_rate

    _check_use(args)
    rate = parse_rate(args.link) if args.link else None
    rate_of = dict(_link_of(text) for text in args.link_of)
    # Who names a rate would be misled by figures from plain loopback, so there it is an error.
    make = Lab if args.check or rate or rate_of else open_lab
    with make(args.ranks, rate, rate_of=rate_of) as lab:
        print(lab.note, file=sys.stderr)
        return _check_links(args, lab) if args.check else _run_job(args, lab)


def _check_use(args: argparse.Namespace) -> None:
    if args.check and args.command:
        raise UsageError("--check and a command", hint="give one of them")
    if not args.check and not args.command:
        raise UsageError("no command to run", hint="put it after --, as in: tonnage lab -- python train.py")
    for name, value in (("--timeout", args.timeout), ("--seconds", args.seconds)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name} {value}", hint="give a number of seconds above 0")


def _link_of(text: str) -> tuple[int, float]:
    from tonnage.units import parse_rate

    rank, equals, rate = text.partition("=")
    if not equals or not rank.isdecimal():
        raise UsageError(f"--link-of {text!r} is no RANK=RATE", hint="write it like --link-of 1=100mbit")
    return int(rank), parse_rate(rate)


def _run_job(args: argparse.Namespace, lab: Hosts) -> int:
    result = lab.run(
        args.command,
        timeout=args.timeout,
        on_stdout=_printer(to_stderr=args.json),
        on_stderr=_printer(to_stderr=True),
    )
    nbytes = [lab.wire_nbytes(rank) if lab.isolated else None for rank in range(lab.num_hosts)]
    if args.json:
        print(json.dumps(_job_json(lab, result, nbytes), allow_nan=False))
    else:
        _print_job(result, nbytes)
    return result.exit_code


def _printer(*, to_stderr: bool) -> LineCallback:
    return lambda rank, line: print(
        f"[{rank}] {line}", file=sys.stderr if to_stderr else sys.stdout, flush=True
    )


def _job_json(lab: Hosts, result: RunResult, nbytes: list[tuple[int, int] | None]) -> dict[str, object]:
    ranks = [
        {
            "rank": rank,
            "rate": lab.rates[rank],
            "exit_code": code,
            "sent_nbytes": counted and counted[0],
            "received_nbytes": counted and counted[1],
        }
        for rank, (code, counted) in enumerate(zip(result.codes, nbytes, strict=True))
    ]
    return {
        "schema": _SCHEMA,
        "note": lab.note,
        "shaped": lab.shaped,
        "seconds": result.seconds,
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "first_failed": result.first_failed,
        "ranks": ranks,
    }


def _print_job(result: RunResult, nbytes: list[tuple[int, int] | None]) -> None:
    from tonnage.units import format_size, format_time

    print(f"{'rank':>4}  {'sent':>10}  {'received':>10}  exit")
    for rank, (code, counted) in enumerate(zip(result.codes, nbytes, strict=True)):
        sent, received = map(format_size, counted) if counted else ("unknown", "unknown")
        print(f"{rank:>4}  {sent:>10}  {received:>10}  {code:>4}")
    print(f"wall time {format_time(result.seconds)}")
    if result.timed_out:
        print("the job was ended: its time was over", file=sys.stderr)
    elif result.first_failed is not None:
        print(f"rank {result.first_failed} failed first, and the others were ended", file=sys.stderr)


def _check_links(args: argparse.Namespace, lab: Hosts) -> int:
    from tonnage.lab import measure_links

    reaches = measure_links(lab, seconds=args.seconds)
    if args.json:
        links = [{"rank": each.rank, "asked": each.asked, "reached": each.reached} for each in reaches]
        print(json.dumps({"schema": _SCHEMA, "note": lab.note, "links": links}, allow_nan=False))
    else:
        _print_links(reaches)
    return 0


def _print_links(reaches: tuple[LinkReach, ...]) -> None:
    from tonnage.units import format_rate

    print(f"{'from':>4}  {'to':>4}  {'reached':>14}  {'asked':>14}  share")
    for each in reaches:
        sender = (each.rank - 1) % len(reaches)
        asked = "unshaped" if each.asked is None else format_rate(each.asked)
        share = "" if each.asked is None else f"{each.reached / each.asked * 100:4.0f} %"
        print(f"{sender:>4}  {each.rank:>4}  {format_rate(each.reached):>14}  {asked:>14}  {share}".rstrip())
