"""What it costs a hot loop to write one movement down.

Claim: :meth:`tonnage.ledger.Recorder.add` takes under 2 µs an entry. Beside it, the two ways that one
would write without it: a tuple, or a dict, appended to a list. The three run in turn, many times, so
that a machine that slows down slows all of them.

    python benchmarks/ledger_append.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from tonnage.ledger import Recorder

CLAIM = 2e-6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000, help="entries a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each way (default: %(default)s)")
    args = parser.parse_args()
    ways: dict[str, Callable[[int], float]] = {
        "Recorder.add": packed,
        "list of tuples": tuples,
        "list of dicts": dicts,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            seconds[name].append(way(args.entries) / args.entries)
    print(f"ns an entry, {args.rounds} rounds of {args.entries:,} entries, interleaved")
    for name, each in seconds.items():
        low, median, high = (1e9 * value for value in (min(each), statistics.median(each), max(each)))
        print(f"{name:<16} median {median:6.0f}   least {low:6.0f}   most {high:6.0f}")
    holds = statistics.median(seconds["Recorder.add"]) < CLAIM
    print(f"claim: under {CLAIM * 1e6:.0f} µs an entry: {'holds' if holds else 'DOES NOT HOLD'}")
    return 0 if holds else 1


def packed(num: int) -> float:
    recorder = Recorder(0)
    channel = recorder.channel("gradient", "all-reduce", label="bucket 3")
    add = recorder.add
    start = time.perf_counter()
    for i in range(num):
        add(channel, i, 25_000_000, 37_500_000, 1.25, 1.5, 0.125)
    return time.perf_counter() - start


def tuples(num: int) -> float:
    rows: list[tuple[int | float, ...]] = []
    add = rows.append
    start = time.perf_counter()
    for i in range(num):
        add((0, i, 25_000_000, 37_500_000, 1.25, 1.5, 0.125, 1))
    return time.perf_counter() - start


def dicts(num: int) -> float:
    rows: list[dict[str, int | float | str]] = []
    add = rows.append
    start = time.perf_counter()
    for i in range(num):
        add(
            {
                "kind": "gradient",
                "op": "all-reduce",
                "label": "bucket 3",
                "step": i,
                "nbytes": 25_000_000,
                "wire_nbytes": 37_500_000,
                "start": 1.25,
                "stop": 1.5,
                "exposed": 0.125,
            }
        )
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
