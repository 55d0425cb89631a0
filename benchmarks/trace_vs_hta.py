"""Reading one trace, beside HolisticTraceAnalysis and beside the least that anyone can do.

The file is a real trace repeated until it has the wanted size (``--source``, ``--megabytes``). Each
reader runs in a fresh process, decompression included, in turns; seconds are of the reading alone, and
memory is the process's peak. The limit is unpacking the file and looking at each byte once. Needs
``pip install HolisticTraceAnalysis 'pandas<3'``::

    python benchmarks/trace_vs_hta.py --source trace.json.gz --megabytes 100 --rounds 3
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "tests/data/traces/dlrm_v100_8ranks/rank3.json.gz"

READERS = {
    "tonnage": """
from tonnage.trace import read_trace
begin = time.perf_counter()
count = sum(len(each.events) for each in read_trace(path).ranks)
""",
    "hta": """
import logging; logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
begin = time.perf_counter()
found = TraceAnalysis(trace_files={0: path}, trace_dir="")
count = sum(len(frame) for frame in found.t.traces.values())
""",
    "limit": """
from isal import igzip
begin = time.perf_counter()
count = 0
with igzip.open(path) as file:
    while piece := file.read(1 << 22):
        count += piece.count(b'"ph"')
""",
}
FRAME = """
import json, re, sys, time
from pathlib import Path
path = sys.argv[1]
{body}
seconds = time.perf_counter() - begin
# Not ru_maxrss: that of the process which started this one would count, too.
peak = int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
print("RESULT", json.dumps([seconds, peak, count]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=SOURCE, help="a real trace of one rank")
    parser.add_argument("--megabytes", type=int, default=100, help="size of the unpacked file")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if importlib.util.find_spec("hta") is None:
        print("HolisticTraceAnalysis is not installed: pip install HolisticTraceAnalysis 'pandas<3'")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.json.gz"
        size = repeat(options.source, path, options.megabytes * 1_000_000)
        print(f"{size / 1e6:.0f} MB of text, {path.stat().st_size / 1e6:.1f} MB packed", flush=True)
        results: dict[str, list[list[float]]] = {name: [] for name in READERS}
        for _ in range(options.rounds):
            for name, found in results.items():
                found.append(measure(name, path))
                print(f"  {name:8} {found[-1][0]:7.2f} s  {found[-1][1]:6.0f} MiB", flush=True)
    show(results)


def repeat(source: Path, target: Path, nbytes: int) -> int:
    """Write ``source`` with its events repeated, each time later, up to ``nbytes``; the size it got."""
    raw = source.read_bytes()
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    begin = text.index(b"[", text.index(b'"traceEvents"')) + 1
    end = text.rindex(b"}", 0, text.rindex(b"]")) + 1
    events = text[begin:end]
    times = [int(each) for each in re.findall(rb'"ts": (\d+)', events)]
    later = max(times) - min(each for each in times if each) + 1_000_000
    written = 0
    with gzip.open(target, "wb", compresslevel=6) as file:
        file.write(text[:begin])
        for turn in range(max(round(nbytes / len(events)), 1)):
            part = re.sub(rb'("ts": )(\d+)', lambda m, t=turn: m[1] + b"%d" % (int(m[2]) + t * later), events)
            file.write((b"," if turn else b"") + part)
            written += len(part)
        file.write(text[end:])
    return written


def measure(name: str, path: Path) -> list[float]:
    """Seconds, peak MiB and events of one reader in a process of its own."""
    code = FRAME.format(body=READERS[name])
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    found = re.search(r"RESULT (.*)", done.stdout)
    if not found:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    result: list[float] = json.loads(found[1])
    return result


def show(results: dict[str, list[list[float]]]) -> None:
    seconds = {name: [each[0] for each in found] for name, found in results.items()}
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    peak = {name: max(each[1] for each in found) for name, found in results.items()}
    ratios = [h / t for h, t in zip(seconds["hta"], seconds["tonnage"], strict=True)]
    print(
        f"tonnage is {middle['hta'] / middle['tonnage']:.1f} times as fast as HTA ({min(ratios):.1f} to {max(ratios):.1f})"
    )
    print(
        f"tonnage takes {middle['tonnage'] / middle['limit']:.1f} times as long as unpacking and scanning alone"
    )
    print(
        f"peak memory: {peak['tonnage']:.0f} MiB, {peak['tonnage'] / peak['hta']:.2f} of HTA's {peak['hta']:.0f} MiB"
    )


if __name__ == "__main__":
    main()
