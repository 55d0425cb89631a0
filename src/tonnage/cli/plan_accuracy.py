"""``tonnage plan accuracy`` and ``convert-mfu``: the planner against published runs, and their conventions."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.cli.plan_options import amount, sequence_of
from tonnage.cli.terminal import console, print_table, progress, write_text

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.plan import Accuracy, Convention, Model


def run(args: argparse.Namespace) -> int:
    """Predict each run of a file, and print the errors."""
    from tonnage.errors import UsageError
    from tonnage.plan import accuracy_json, accuracy_markdown, measure, read_rows

    if len(args.rest) != 1:
        raise UsageError("accuracy takes one file of runs", hint="tonnage plan accuracy runs.csv")
    rows = read_rows(args.rest[0])
    with progress("runs", shown=not args.json) as told:
        accuracy = measure(rows, progress=told)
    if args.markdown:
        write_text(Path(args.markdown), accuracy_markdown(accuracy), what="the table")
    if args.json:
        print(json.dumps(accuracy_json(accuracy), allow_nan=False))
    else:
        _show(console(), accuracy)
    return 0


def _show(to: Console, accuracy: Accuracy) -> None:
    from tonnage.plan import ACCURACY_COLUMNS, accuracy_rows

    rows = accuracy_rows(accuracy)
    if to.width >= 160:
        numbers = tuple(range(2, len(ACCURACY_COLUMNS)))
        print_table(to, "", ACCURACY_COLUMNS, rows, numbers=numbers)
    else:
        # A narrow terminal shows errors and memory one below the other; --json and --markdown have all.
        _part(to, rows, (0, 1, 2, 3, 4, 5, 6, 7))
        _part(to, [row for row in rows if any(row[8:])], (0, *range(8, len(ACCURACY_COLUMNS))))
    for row, source, reason in accuracy.refused:
        to.print(f"refused: row {row} of {source}: {reason}", highlight=False)


def _part(to: Console, rows: list[tuple[str, ...]], columns: tuple[int, ...]) -> None:
    from tonnage.plan import ACCURACY_COLUMNS

    heads = [ACCURACY_COLUMNS[i].removesuffix(" (pairs)") for i in columns]
    numbers = tuple(place for place, i in enumerate(columns) if i >= 2)
    print_table(to, "", heads, [tuple(row[i] for i in columns) for row in rows], numbers=numbers)


def convert(args: argparse.Namespace) -> int:
    """Turn an MFU of one convention into that of others."""
    from tonnage.errors import UsageError
    from tonnage.plan import CONVENTIONS, convention, load_model

    if len(args.rest) != 1 or not args.model or not args.source:
        raise UsageError(
            "convert-mfu needs a share, a model and how it was counted",
            hint="tonnage plan convert-mfu 45% --model llama3-8b --seq 8192 --from megatron",
        )
    try:
        value = amount(args.rest[0])
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{args.rest[0]!r} is no share", hint="write 45% or 0.45") from error
    if value > 1:
        raise UsageError(
            f"a utilisation of {value:.0%}", hint=f"write {args.rest[0].rstrip('%')}% or a share"
        )
    model, source = load_model(args.model), convention(args.source)
    targets = [convention(args.to)] if args.to else list(CONVENTIONS.values())
    seq = sequence_of(args, model)
    rows = [_converted(value, model, seq, source, each, args.recompute) for each in targets]
    if args.json:
        names = {"schema": "tonnage.plan/1", "model": model.name, "seq": seq, "from": source.name}
        print(json.dumps({**names, "to": rows}, allow_nan=False))
        return 0
    to = console()
    to.print(f"{value:.2%} by {source.name}, {model.name} at {seq} tokens", highlight=False)
    rates = [(r["convention"], f"{r['mfu']:.2%}", f"{r['flops_per_token'] / 1e9:.2f}") for r in rows]
    print_table(to, "", ["convention", "MFU", "GFLOP/token"], rates, numbers=(1, 2))
    print_table(to, "", ["convention", "used by"], [(r["convention"], r["source"]) for r in rows])
    return 0


def _converted(
    value: float, model: Model, seq: int, source: Convention, target: Convention, recompute: Any
) -> dict[str, Any]:
    from tonnage.plan import convert_mfu, flops_per_token

    return {
        "convention": target.name,
        "mfu": convert_mfu(value, model=model, seq=seq, source=source, target=target, recompute=recompute),
        "flops_per_token": flops_per_token(model, seq, target, recompute=recompute),
        "source": target.source,
    }
