"""``tonnage trace``: where a job's communication time went, from the traces of its ranks, and what would save it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.cli.terminal import console, print_table, progress, write_text

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.console import Console

    from tonnage.report import LanesPage, PageTable
    from tonnage.trace import Advice, Job, Language, Outcome, Split, Straggler, Trace

_SCHEMA = "tonnage.trace/1"

_EPILOG = """examples:
  tonnage trace runs/
  tonnage trace 'runs/rank*.json.gz' --steps 3:8 --html report.html --perfetto run.json.gz
  tonnage trace before/ --compare after/
  tonnage trace runs/ --what-if bucket=25MB --what-if nic=2x,compress=bf16 --what-if straggler=none
  tonnage trace runs/ --json out.json

changes of --what-if (several in one with commas between them):
  nic=2x  compress=bf16|fp16|fp8|int8|int4  bucket=25MB  fuse=yes  straggler=none|RANK
  slow=none  early=yes  overlap=full  sync=none
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """All that is shown of one set of traces."""

    trace: Trace
    job: Job
    split: Split
    base: Outcome
    stragglers: tuple[Straggler, ...]
    advice: tuple[Advice, ...]
    outcomes: tuple[Outcome, ...]
    verdict: str


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the main parser."""
    parser = subparsers.add_parser(
        "trace",
        help="say where a job's communication time went, from profiler traces",
        description="Read profiler traces of a job's ranks: what was waiting and what moved bytes, who came "
        "last, and what would save time, each answered by replaying all ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="a trace (.json, .json.gz, .sqlite), a folder, a pattern"
    )
    parser.add_argument(
        "--steps", type=_steps, metavar="A:B", help="only steps from A up to, but without, B: 3:8"
    )
    parser.add_argument("--compare", metavar="PATH", help="traces of another run, to set beside these")
    parser.add_argument(
        "--what-if", action="append", default=[], metavar="CHANGE", help="the same run, changed; see below"
    )
    parser.add_argument(
        "--definitions", choices=("tonnage", "hta"), default="tonnage", help="hta: add HTA's own breakdown"
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print (or write) one JSON document"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with a lane for each rank and stream")
    parser.add_argument(
        "--perfetto", metavar="FILE", help="write a file for ui.perfetto.dev (.json, .json.gz)"
    )
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="language of tables and sentences")
    parser.set_defaults(run=run)


def _steps(text: str) -> range:
    first, colon, last = text.partition(":")
    if not colon or not all(part.isdecimal() or not part for part in (first, last)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps; write 3:8, 3: or :8")
    return range(int(first or 0), int(last) if last else sys.maxsize)


def run(args: argparse.Namespace) -> int:
    """Read the traces, replay them, and show what came out."""
    from tonnage.trace import check_change, write_perfetto

    # A change that can't be meant is told before minutes of reading.
    for change in args.what_if:
        check_change(change)
    answer = _answer(args, args.paths, args.what_if)
    other = _answer(args, [args.compare], []) if args.compare else None
    for note in answer.trace.notes:
        print(f"note: {note}", file=sys.stderr)
    if args.html:
        write_text(Path(args.html), _page(answer, args.lang), what="the page")
    if args.perfetto:
        write_perfetto(answer.job, args.perfetto)
    document = json.dumps(_document(answer, other, args), allow_nan=False) if args.json else ""
    if args.json == "-":
        print(document)
    else:
        if args.json:
            write_text(Path(args.json), document + "\n", what="the JSON document")
        _show(console(), answer, other, args)
    for what, path in (("page", args.html), ("perfetto", args.perfetto)):
        if path:
            print(f"{what}: {path}", file=sys.stderr)
    return 0


def _answer(args: argparse.Namespace, paths: Sequence[str], changes: Sequence[str]) -> _Answer:
    from tonnage.trace import advise, replay, replay_job, split, stragglers, verdict

    shown = args.json != "-"
    trace = _read(paths, args.steps, shown=shown)
    job = replay_job(trace)
    base, where = replay(job), split(job)
    with progress("replays", shown=shown) as told:
        advice = advise(job, lang=args.lang, progress=told)
    return _Answer(
        trace=trace,
        job=job,
        split=where,
        base=base,
        stragglers=stragglers(job),
        advice=advice,
        outcomes=tuple(replay(job, change) for change in changes),
        verdict=verdict(where, base, advice, args.lang),
    )


def _read(paths: Sequence[str], steps: range | None, *, shown: bool) -> Trace:
    from tonnage.errors import UsageError
    from tonnage.trace import read_trace, trace_files

    # Folders and patterns are resolved once, so that the bar knows how much there is.
    files = trace_files(paths)
    total, done = sum(file.stat().st_size for file in files), 0
    with progress("reading", shown=shown) as told:

        def tell(path: Path, nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if told is not None:
                told(done, max(total, done))

        trace = read_trace(*files, steps=steps, progress=tell)
    if steps is not None and not any(rank.steps for rank in trace.ranks):
        raise UsageError(
            f"no step in {steps.start}:{steps.stop if steps.stop < sys.maxsize else ''}",
            where=str(files[0]),
            hint="leave out --steps to see which there are",
        )
    return trace


def _show(to: Console, answer: _Answer, other: _Answer | None, args: argparse.Namespace) -> None:
    to.print(answer.verdict, style="bold", highlight=False, markup=False)
    to.print()
    for table, numbers in _tables(answer, args.lang):
        print_table(to, table.caption, table.heads, table.rows, numbers=numbers)
    if other is not None:
        table = _comparison(answer, other, args.lang)
        print_table(to, table.caption, table.heads, table.rows, numbers=(1, 2, 3))
    if args.definitions == "hta":
        table = _hta_table(answer)
        print_table(to, table.caption, table.heads, table.rows, numbers=(1, 2, 3, 4))


def _tables(answer: _Answer, lang: Language) -> list[tuple[PageTable, tuple[int, ...]]]:
    """Tables and which of their columns are numbers, in the order of a person's questions."""
    found = [(_advice_table(answer, lang), (0,)), (_where_table(answer, lang), (1, 2))]
    if answer.outcomes:
        found.insert(0, (_outcome_table(answer, lang), (1, 2, 3)))
    found.append((_kind_table(answer, lang), (1, 2, 3, 4, 5, 6)))
    found.append((_last_table(answer, lang), (0, 1, 2)))
    return found


def _table(caption: str, heads: Sequence[str], rows: Sequence[tuple[str, ...]], lang: Language) -> PageTable:
    from tonnage.report import PageTable
    from tonnage.trace import trace_words

    return PageTable(
        caption=trace_words(caption, lang),
        heads=tuple(trace_words(head, lang) for head in heads),
        rows=tuple(rows),
    )


def _outcome_table(answer: _Answer, lang: Language) -> PageTable:
    from tonnage.trace import trace_words
    from tonnage.units import format_time

    rows = [(trace_words("measured", lang), format_time(answer.base.step), "", "", "")]
    rows += [
        (each.change, format_time(each.step), format_time(each.saved), _share(each.saved, answer), each.note)
        for each in answer.outcomes
    ]
    return _table("what-if", ("change", "step", "saves", "share", "note"), rows, lang)


def _advice_table(answer: _Answer, lang: Language) -> PageTable:
    from tonnage.trace import trace_words
    from tonnage.units import format_time

    rows = [
        (
            format_time(each.outcome.saved),
            trace_words(each.confidence, lang),
            each.outcome.change,
            each.text,
        )
        for each in answer.advice
    ]
    return _table("advice", ("saves", "sure", "change", "do"), rows, lang)


def _where_table(answer: _Answer, lang: Language) -> PageTable:
    from tonnage.trace import trace_words
    from tonnage.units import format_time

    found = answer.split
    parts = [("step", answer.base.step), ("compute", found.compute)]
    if found.kinds:
        parts += [("communication", found.communication), ("exposed", found.exposed)]
    rows = [(trace_words(key, lang), format_time(s), _share(s, answer)) for key, s in parts]
    return _table("where", ("part", "time", "share"), rows, lang)


def _kind_table(answer: _Answer, lang: Language) -> PageTable:
    from tonnage.units import format_bandwidth, format_size, format_time

    rows = [
        (
            row.op,
            str(row.group_size) if row.group_size else "?",
            f"{row.calls:.3g}",
            format_size(row.nbytes) if row.known > 0.999 else f"{row.known:.0%} known",
            format_time(row.seconds),
            format_time(row.waiting),
            format_bandwidth(row.busbw),
        )
        for row in answer.split.kinds
    ]
    heads = ("op", "ranks", "calls", "bytes", "time", "wait", "busbw")
    return _table("collectives", heads, rows, lang)


def _last_table(answer: _Answer, lang: Language) -> PageTable:
    from tonnage.units import format_time

    rows = [
        (str(each.rank), f"{each.times}/{answer.split.num_met}", format_time(each.caused))
        for each in answer.split.last[:8]
    ]
    return _table("last", ("rank", "times", "caused"), rows, lang)


def _comparison(answer: _Answer, other: _Answer, lang: Language) -> PageTable:
    from tonnage.trace import trace_words
    from tonnage.units import format_time

    def values(each: _Answer) -> list[float]:
        found = each.split
        return [each.base.step, found.compute, found.communication, found.exposed, found.waiting]

    keys = ("step", "compute", "communication", "exposed", "waiting")
    rows = [
        (trace_words(key, lang), format_time(a), format_time(b), f"{b / a - 1:+.1%}" if a > 0 else "")
        for key, a, b in zip(keys, values(answer), values(other), strict=True)
    ]
    return _table("where", ("part", "before", "after", "change"), rows, lang)


def _hta_table(answer: _Answer) -> PageTable:
    """In HTA's words, and so in one language."""
    from tonnage.report import PageTable
    from tonnage.trace import hta_breakdown

    found = [(rank.rank, hta_breakdown(rank)) for rank in answer.trace.ranks]
    rows = tuple(
        (
            str(rank),
            *(f"{seconds * 1e6:.0f}" for seconds in (each.idle, each.compute, each.non_compute)),
            f"{each.overlap:.2%}",
        )
        for rank, each in found
    )
    heads = ("rank", "idle us", "compute us", "non-compute us", "comm/comp overlap")
    return PageTable(caption="HolisticTraceAnalysis' definitions", heads=heads, rows=rows)


def _share(seconds: float, answer: _Answer) -> str:
    return f"{seconds / answer.base.step:.1%}" if answer.base.step > 0 else ""


def _page(answer: _Answer, lang: Language) -> str:
    from tonnage.report import LanesPage, render_lanes
    from tonnage.trace import LANE_KINDS, lanes, trace_words

    shown = lanes(answer.job)
    steps: dict[int, tuple[float, float]] = {}
    for _, number, start, stop in shown.steps:
        known = steps.get(number, (start, stop))
        steps[number] = min(start, known[0]), max(stop, known[1])
    page: LanesPage = LanesPage(
        title=trace_words("lanes title", lang),
        verdict=answer.verdict,
        reasons=answer.trace.notes,
        tables=tuple(table for table, _ in _tables(answer, lang)),
        lanes=shown.names,
        pieces=tuple((p.lane, p.start, p.stop, p.kind, p.label, p.merged) for p in shown.pieces),
        steps=tuple((str(number), *span) for number, span in sorted(steps.items())),
        words={kind: trace_words(f"kind {kind}", lang) for kind in LANE_KINDS},
        lang=lang,
    )
    return render_lanes(page)


def _document(answer: _Answer, other: _Answer | None, args: argparse.Namespace) -> dict[str, Any]:
    document = {"schema": _SCHEMA, **_fields(answer)}
    if other is not None:
        document["compared"] = _fields(other)
    if args.definitions == "hta":
        from tonnage.trace import hta_breakdown

        document["hta"] = [{"rank": each.rank, **asdict(hta_breakdown(each))} for each in answer.trace.ranks]
    safe: dict[str, Any] = _without_nan(document)
    return safe


def _fields(answer: _Answer) -> dict[str, Any]:
    return {
        "verdict": answer.verdict,
        "ranks": list(answer.job.ranks),
        "world_size": answer.trace.world_size,
        "num_steps": answer.job.num_steps,
        "step": answer.base.step,
        "split": asdict(answer.split),
        "stragglers": [asdict(each) for each in answer.stragglers],
        "advice": [asdict(each) for each in answer.advice],
        "what_if": [asdict(each) for each in answer.outcomes],
        "notes": list(answer.trace.notes),
    }


def _without_nan(value: Any) -> Any:
    """The value as JSON has it: what isn't known is null."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
