"""``tonnage plan``: what a training run moves, takes and needs, before anyone buys the cluster."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.cli import plan_accuracy, plan_budget, plan_engine
from tonnage.cli.plan_options import (
    add_layout_options,
    add_run_options,
    add_software_options,
    amount,
    batch_of,
    cluster_of,
    layout_of,
    recipe_of,
    whole,
)
from tonnage.cli.plan_show import show_cases, show_found, show_prediction
from tonnage.cli.terminal import console, progress, write_text

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tonnage.plan import Batch, Cluster, Model, Prediction, Recipe

_EPILOG = """examples:
  tonnage plan llama3-70b --cluster h100x512 --tp 8 --pp 4 --micro-batch 1 --global-batch 512 --seq 8192
  tonnage plan ./config.json --cluster cluster.toml --search
  tonnage plan llama3-8b --cluster 4x8xA100 --zero 3 --what-if nic=100 --what-if compress=int8
  tonnage plan llama3-8b --cluster 2x8xH100 --search --slowest-nic 5%
  tonnage plan llama3-70b --cards h100,b200 --tokens 2e12 --days 60 --price h100=2.5 --price b200=4
  tonnage plan llama3-8b --cluster h100x64 --tp 8 --micro-batch 2 --engine
  tonnage plan accuracy runs.csv
  tonnage plan convert-mfu 45% --model llama3-8b --seq 8192 --from megatron --to megatron-bridge
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the main parser."""
    parser = subparsers.add_parser(
        "plan",
        help="predict bytes, time and memory of a training run; search layouts",
        description="Predict what a training run moves over which link, how long a step takes and what a card "
        "must hold. MODEL is a preset, a config.json or its folder; or one of the words accuracy and convert-mfu.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="MODEL", help="llama3-70b, ./config.json, accuracy, convert-mfu")
    parser.add_argument(
        "rest", nargs="*", metavar="VALUE", help="the runs of accuracy, the share of convert-mfu"
    )
    add_run_options(parser)
    add_layout_options(parser)
    add_software_options(parser)
    _add_questions(parser)
    plan_engine.add_arguments(parser)
    mfu = parser.add_argument_group("convert-mfu")
    mfu.add_argument("--model", metavar="MODEL", help="whose utilisation it is")
    mfu.add_argument("--from", dest="source", metavar="CONVENTION", help="how it was counted")
    mfu.add_argument("--to", dest="to", metavar="CONVENTION", help="how to count it; all by default")
    out = parser.add_argument_group("output")
    out.add_argument("--convention", default="megatron-bridge", metavar="NAME", help="how FLOP are counted")
    out.add_argument("--lang", choices=("en", "zh"), default="en", help="language of tables and sentences")
    out.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    out.add_argument("--html", metavar="FILE", help="write one self-contained page as well")
    out.add_argument("--ledger", metavar="FILE", help="save the predicted ledger")
    out.add_argument("--markdown", metavar="FILE", help="accuracy: write the table as Markdown")
    parser.set_defaults(run=run)


def _add_questions(parser: argparse.ArgumentParser) -> None:
    ask = parser.add_argument_group("questions")
    ask.add_argument("--search", action="store_true", help="the fastest layouts that fit, and why")
    ask.add_argument("--top", type=whole, default=10, metavar="N", help="layouts or clusters to list (10)")
    ask.add_argument(
        "--what-if", action="append", default=[], metavar="KEY=VALUE", help="the same run, changed"
    )
    ask.add_argument("--explain", action="store_true", help="show the working behind each figure")
    ask.add_argument(
        "--slowest-nic", type=amount, metavar="LOSS", help="the slowest NIC that costs this much time: 5%%"
    )
    ask.add_argument(
        "--measured", type=amount, metavar="SECONDS", help="a measured step: what it says of the links"
    )
    ask.add_argument("--tokens", type=amount, metavar="N", help="tokens to train on: adds card hours")
    ask.add_argument("--days", type=amount, metavar="D", help="with --tokens: the cheapest cluster in D days")
    ask.add_argument("--cards", metavar="A,B", help="with --days: cards to choose from (h100,h200,b200)")
    ask.add_argument(
        "--most", type=whole, default=4096, metavar="N", help="with --days: cards at most (4096)"
    )
    ask.add_argument("--price", action="append", default=[], metavar="CARD=X", help="money for a card's hour")


def run(args: argparse.Namespace) -> int:
    """Answer the question that the arguments ask."""
    if args.target == "accuracy":
        return plan_accuracy.run(args)
    if args.target == "convert-mfu":
        return plan_accuracy.convert(args)
    from tonnage.errors import UsageError
    from tonnage.plan import load_model

    if args.rest:
        raise UsageError(f"what should {args.rest[0]!r} mean?", hint="give one model; options start with --")
    model = load_model(args.target)
    if args.days:
        return plan_budget.run(args, model)
    if not args.cluster:
        raise UsageError("on which cluster?", hint="add --cluster h100x512, 4x8xA100 or cluster.toml")
    cluster = cluster_of(args)
    batch, recipe = batch_of(args, model, cluster), recipe_of(args, model)
    if args.engine:
        return plan_engine.run(args, model, cluster, layout_of(args, cluster, recipe), batch)
    return (_search if args.search else _plan)(args, model, cluster, batch, recipe)


def _plan(args: argparse.Namespace, model: Model, cluster: Cluster, batch: Batch, recipe: Recipe) -> int:
    from tonnage.plan import Scenario, change, predict, say

    layout = layout_of(args, cluster, recipe)
    base = Scenario(name=say("now", args.lang), model=model, cluster=cluster, layout=layout, batch=batch)
    cases = [base, *(change(base, text) for text in args.what_if)]
    predicted = [
        predict(each.model, each.cluster, each.layout, each.batch, convention=args.convention)
        for each in cases
    ]
    names = [case.name for case in cases]
    # What can't be written is told before anything is printed: --json prints one document, or one error.
    _save(args, predicted, names)
    if args.json:
        print(json.dumps(_document(args, names, predicted), allow_nan=False))
    else:
        to = console()
        show_prediction(to, predicted[0], args)
        if args.what_if:
            show_cases(to, names, predicted, args.lang)
    return 0


def _document(args: argparse.Namespace, names: list[str], predicted: list[Prediction]) -> dict[str, object]:
    from tonnage.plan import prediction_json, slowest_nic

    document = prediction_json(predicted[0])
    document["what_if"] = [
        {"change": name, **prediction_json(each)} for name, each in zip(names[1:], predicted[1:], strict=True)
    ]
    if args.tokens:
        document["device_hours"] = predicted[0].device_hours(args.tokens)
    if args.slowest_nic:
        document["slowest_nic_rate"] = slowest_nic(predicted[0], loss=args.slowest_nic)
    return document


def _search(args: argparse.Namespace, model: Model, cluster: Cluster, batch: Batch, recipe: Recipe) -> int:
    from tonnage.plan import search, search_json, slowest_nic

    with progress("layouts", shown=not args.json) as told:
        found = search(model, cluster, batch, recipe=recipe, top=args.top, progress=told)
    _save(args, found.best[:1], [""])
    if args.json:
        document = search_json(found)
        if args.slowest_nic:
            document["slowest_nic_rate"] = slowest_nic(found.best[0], loss=args.slowest_nic)
        print(json.dumps(document, allow_nan=False))
    else:
        show_found(console(), found, args)
    return 0


def _save(args: argparse.Namespace, predicted: list[Prediction], names: list[str]) -> None:
    """Write the page and the ledger, where they are asked for."""
    if args.html:
        from tonnage.plan import plan_page

        write_text(Path(args.html), plan_page(predicted, names, args.lang), what="the page")
        print(f"page: {args.html}", file=sys.stderr)
    if args.ledger:
        from tonnage.ledger import write_ledger

        print(f"ledger: {write_ledger(predicted[0].ledger, args.ledger)}", file=sys.stderr)
