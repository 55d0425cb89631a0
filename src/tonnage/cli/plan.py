"""``tonnage plan``: what a training run moves, takes and needs, before anyone buys the cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.console import Console

    from tonnage.plan import (
        Accuracy,
        Batch,
        Cluster,
        Found,
        Language,
        Layout,
        Model,
        Offer,
        Prediction,
        Recipe,
    )

_EPILOG = """examples:
  tonnage plan llama3-70b --cluster h100x512 --tp 8 --pp 4 --micro-batch 1 --global-batch 512 --seq 8192
  tonnage plan ./config.json --cluster cluster.toml --search
  tonnage plan llama3-8b --cluster 4x8xA100 --zero 3 --what-if nic=100 --what-if compress=int8
  tonnage plan llama3-70b --cards h100,b200 --tokens 2e12 --days 60
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
    _run_options(parser)
    _layout_options(parser)
    _software_options(parser)
    ask = parser.add_argument_group("questions")
    ask.add_argument("--search", action="store_true", help="the fastest layouts that fit, and why")
    ask.add_argument("--top", type=_whole, default=10, metavar="N", help="layouts to list (10)")
    ask.add_argument(
        "--what-if", action="append", default=[], metavar="KEY=VALUE", help="the same run, changed"
    )
    ask.add_argument("--explain", action="store_true", help="show the working behind each figure")
    ask.add_argument(
        "--measured", type=_amount, metavar="SECONDS", help="a measured step: what it says of the links"
    )
    ask.add_argument("--tokens", type=_amount, metavar="N", help="tokens to train on: adds card hours")
    ask.add_argument(
        "--days", type=_amount, metavar="D", help="with --tokens: the cheapest cluster in D days"
    )
    ask.add_argument("--cards", metavar="A,B", help="with --days: cards to choose from")
    ask.add_argument(
        "--most", type=_whole, default=4096, metavar="N", help="with --days: cards at most (4096)"
    )
    ask.add_argument("--price", action="append", default=[], metavar="CARD=X", help="money for a card's hour")
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


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _amount(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what runs where")
    group.add_argument("--cluster", metavar="CLUSTER", help="h100x512, 4x8xA100, or a cluster.toml")
    group.add_argument("--nic", "--net", metavar="RATE", help="between hosts, a card: 400 (Gbit/s) or 50GB/s")
    group.add_argument(
        "--global-batch", type=_whole, metavar="N", help="sequences a step (512, or what divides)"
    )
    group.add_argument("--seq", type=_whole, metavar="N", help="tokens a sequence (the model's, up to 8192)")


def _layout_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout; dp takes the cards that are left")
    for name in ("dp", "tp", "pp", "cp", "ep"):
        group.add_argument(f"--{name}", type=_whole, metavar="N", help=f"degree of {name}")
    group.add_argument(
        "--virtual", type=_whole, default=1, metavar="N", help="chunks of layers a stage holds"
    )
    group.add_argument("--stages", metavar="A,B,…", help="layers of each chunk, where they are uneven")
    group.add_argument("--micro-batch", type=_whole, default=1, metavar="N", help="sequences of one pass")
    group.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="what is sharded (1); 3 is FSDP")
    group.add_argument("--shard", type=int, default=0, metavar="N", help="ranks of a shard, for HSDP")
    group.add_argument("--no-sp", action="store_true", help="tensor without sequence parallel")
    group.add_argument("--recompute", choices=("none", "selective", "full"), default="none", help="(none)")


def _software_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("software")
    group.add_argument(
        "--software", default="megatron-core", metavar="NAME", help="generation (megatron-core)"
    )
    group.add_argument("--precision", metavar="P", help="bf16, fp16, fp8, fp8-cs, mxfp8, nvfp4")
    group.add_argument("--attention", metavar="A", help="eager, flash1, flash2, flash3")
    group.add_argument("--optimizer", metavar="O", help="adam, adam-8bit, adam-paged, sgd, muon")
    group.add_argument("--grad-bytes", type=_whole, metavar="N", help="bytes of a gradient element (4)")
    group.add_argument("--compress", metavar="C", help="gradients sent as bf16, fp16, int8, int4")
    group.add_argument("--keep", type=_amount, metavar="X", help="share of the gradients that is sent")
    group.add_argument("--trainable", type=_amount, metavar="X", help="share of the parameters that trains")
    group.add_argument("--lora", type=_whole, metavar="R", help="adapters of rank R; all else is frozen")
    group.add_argument("--local-steps", type=_whole, metavar="H", help="reduce every H steps only")


def run(args: argparse.Namespace) -> int:
    """Answer the question that the arguments ask."""
    if args.target == "accuracy":
        return _accuracy(args)
    if args.target == "convert-mfu":
        return _convert(args)
    from tonnage.errors import UsageError
    from tonnage.plan import load_model

    if args.rest:
        raise UsageError(f"what should {args.rest[0]!r} mean?", hint="give one model; options start with --")
    model = load_model(args.target)
    if args.days:
        return _budget(args, model)
    if not args.cluster:
        raise UsageError("on which cluster?", hint="add --cluster h100x512, 4x8xA100 or cluster.toml")
    cluster = _cluster(args)
    batch = _batch(args, model, cluster)
    recipe = _recipe(args, model)
    return (
        _search(args, model, cluster, batch, recipe)
        if args.search
        else _plan(args, model, cluster, batch, recipe)
    )


def _cluster(args: argparse.Namespace) -> Cluster:
    from tonnage.plan import load_cluster, nic_rate

    cluster = load_cluster(args.cluster)
    return cluster.with_nic(nic_rate(args.nic)) if args.nic else cluster


def _batch(args: argparse.Namespace, model: Model, cluster: Cluster) -> Batch:
    from tonnage.plan import Batch

    seq = args.seq or min(model.max_seq or 4096, 8192)
    dp = args.dp or max(1, cluster.num_devices // ((args.tp or 1) * (args.pp or 1) * (args.cp or 1)))
    each = max(1, dp) * args.micro_batch
    return Batch(sequences=args.global_batch or max(each, 512 // each * each), seq=seq)


def _recipe(args: argparse.Namespace, model: Model) -> Recipe:
    from tonnage.errors import UsageError
    from tonnage.plan import software

    named = {
        "precision": args.precision,
        "attention": args.attention,
        "optimizer": args.optimizer,
        "grad_nbytes": args.grad_bytes,
        "compress": args.compress,
        "keep": args.keep,
        "trainable": args.trainable,
        "local_steps": args.local_steps,
    }
    changes = {key: value for key, value in named.items() if value is not None}
    # Gradients are added up and sent in fp32 unless somebody says otherwise.
    changes.setdefault("grad_nbytes", 4)
    if args.optimizer == "adam-paged":
        # What is paged out to the host includes the master copy.
        changes["master"] = False
    if args.lora:
        if args.trainable:
            raise UsageError("--lora and --trainable say the same", hint="give one of them")
        changes["trainable"] = _lora_share(model, args.lora)
    return software(args.software, **changes)


def _lora_share(model: Model, rank: int) -> float:
    """Share of the parameters in adapters of this rank on every matrix outside the routed experts."""
    adapters = sum(
        count * rank * (m.fan_in + m.fan_out)
        for layer, count in model.layers
        for m in layer.matrices
        if m.part in ("attention", "mlp", "shared")
    )
    return min(1.0, adapters / model.params)


def _layout(args: argparse.Namespace, cluster: Cluster, recipe: Recipe) -> Layout:
    from tonnage.errors import LayoutError, UsageError
    from tonnage.plan import Layout, nearest_divisor

    tp, pp, cp = args.tp or 1, args.pp or 1, args.cp or 1
    used = max(tp, 1) * max(pp, 1) * max(cp, 1)
    if args.dp is None and cluster.num_devices % used:
        raise LayoutError(
            f"tp {tp} x pp {pp} x cp {cp} = {used} does not divide {cluster.num_devices} cards",
            hint=f"use degrees that multiply to {nearest_divisor(cluster.num_devices, used)}",
        )
    try:
        stages = tuple(int(each) for each in args.stages.split(",")) if args.stages else ()
    except ValueError as error:
        raise UsageError(f"--stages {args.stages!r} are no numbers", hint="write --stages 5,6,6,5") from error
    dp = cluster.num_devices // used if args.dp is None else args.dp
    zero = args.zero if args.zero is not None else int(dp * cp > 1)
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=args.ep or 1,
        sp=tp > 1 and not args.no_sp,
        virtual=args.virtual,
        zero=zero,
        shard=args.shard,
        micro_batch=args.micro_batch,
        recompute=args.recompute,
        stages=stages,
        recipe=recipe,
    )


def _plan(args: argparse.Namespace, model: Model, cluster: Cluster, batch: Batch, recipe: Recipe) -> int:
    from tonnage.plan import Scenario, change, predict, prediction_json, say

    base = Scenario(
        name=say("now", args.lang),
        model=model,
        cluster=cluster,
        layout=_layout(args, cluster, recipe),
        batch=batch,
    )
    cases = [base, *(change(base, text) for text in args.what_if)]
    predicted = [
        predict(each.model, each.cluster, each.layout, each.batch, convention=args.convention)
        for each in cases
    ]
    if args.json:
        document = prediction_json(predicted[0])
        document["what_if"] = [
            {"change": case.name, **prediction_json(each)}
            for case, each in zip(cases[1:], predicted[1:], strict=True)
        ]
        print(json.dumps(document, allow_nan=False))
    else:
        console = _console()
        _show_prediction(console, predicted[0], args)
        if args.what_if:
            _show_cases(console, [case.name for case in cases], predicted, args.lang)
    _save(args, predicted, [case.name for case in cases])
    return 0


def _show_prediction(console: Console, prediction: Prediction, args: argparse.Namespace) -> None:
    from tonnage.plan import (
        headline,
        layout_text,
        ledger_table,
        measured_lines,
        memory_rows,
        part_rows,
        say,
        text_timeline,
        working,
    )
    from tonnage.units import format_time

    lang: Language = args.lang
    console.print(headline(prediction, lang), style="bold", highlight=False)
    console.print(f"{say('layout', lang)}: {layout_text(prediction.layout)}", highlight=False)
    if args.tokens:
        hours = prediction.device_hours(args.tokens)
        console.print(
            f"{args.tokens:.3g} tokens: {hours:,.0f} card hours, "
            f"{format_time(hours * 3600 / prediction.cluster.num_devices)}",
            highlight=False,
        )
    part = [say(key, lang) for key in ("part", "seconds", "share")]
    _table(console, say("where the seconds go", lang), part, part_rows(prediction, lang), numbers=(1, 2))
    names = ("kind", "op", "group", "link", "calls", "wire", "time", "exposed")
    _table(
        console,
        say("what moves", lang),
        [say(key, lang) for key in names],
        ledger_table(prediction, lang),
        numbers=(4, 5, 6, 7),
    )
    _table(
        console,
        f"{say('memory', lang)} ({prediction.memory_stage})",
        [say("part", lang), "GiB"],
        memory_rows(prediction, lang),
        numbers=(1,),
    )
    console.print(say("timeline", lang), highlight=False)
    width = max(40, min(100, console.width - 14))
    for line in text_timeline(prediction.simulated, prediction.layout.pp, width=width):
        console.print(line, highlight=False, markup=False)
    if args.measured:
        for line in measured_lines(prediction, args.measured):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if args.explain:
        console.print(f"\n{say('working', lang)}", style="bold")
        for line in working(prediction, lang):
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _show_cases(console: Console, names: list[str], predicted: list[Prediction], lang: Language) -> None:
    from tonnage.plan import say
    from tonnage.units import format_time

    first = predicted[0].seconds
    rows = []
    for name, each in zip(names, predicted, strict=True):
        exposed = sum(each.parts[key] for key in ("tp", "cp", "ep", "dp", "pp"))
        fits = say("fits" if each.fits else "does not fit", lang)
        rows.append(
            (
                name,
                format_time(each.seconds),
                f"{each.seconds / first - 1:+.1%}",
                format_time(exposed),
                f"{each.tokens_per_second_per_device:,.0f}",
                f"{each.mfu:.1%}",
                f"{each.memory_total / 2**30:.1f} GiB",
                fits,
            )
        )
    heads = [say(key, lang) for key in ("change", "step", "against", "exposed", "tokens")]
    _table(console, "", [*heads, "MFU", say("held", lang), ""], rows, numbers=(1, 2, 3, 4, 5, 6))


def _search(args: argparse.Namespace, model: Model, cluster: Cluster, batch: Batch, recipe: Recipe) -> int:
    from tonnage.plan import search, search_json

    with _progress(args, "layouts") as told:
        found = search(model, cluster, batch, recipe=recipe, top=args.top, progress=told)
    if args.json:
        print(json.dumps(search_json(found), allow_nan=False))
    else:
        _show_found(_console(), found, args)
    _save(args, found.best[:1], [""])
    return 0


def _show_found(console: Console, found: Found, args: argparse.Namespace) -> None:
    from tonnage.plan import headline, layout_text, say
    from tonnage.units import format_time

    lang: Language = args.lang
    best = found.best[0]
    console.print(headline(best, lang), style="bold", highlight=False)
    rows = [
        (
            str(i + 1),
            layout_text(each.layout),
            format_time(each.seconds),
            f"{each.seconds / best.seconds - 1:+.1%}",
            f"{each.tokens_per_second_per_device:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.memory_total / 2**30:.1f} GiB",
        )
        for i, each in enumerate(found.best)
    ]
    heads = [
        "",
        *(say(key, lang) for key in ("layout", "step", "against", "tokens")),
        "MFU",
        say("held", lang),
    ]
    _table(console, say("best layouts", lang), heads, rows, numbers=(2, 3, 4, 5, 6))
    if found.why:
        console.print(f"{say('why', lang)}:", highlight=False)
        for reason in found.why[:4]:
            gain = reason.other - reason.best
            console.print(
                f"  {say(reason.part, lang)}: {format_time(reason.best)} | {format_time(reason.other)} "
                f"({'+' if gain > 0 else '-'}{format_time(abs(gain))})",
                highlight=False,
            )
    counts = (
        f"{found.considered:,} layouts; {found.too_large:,} need more memory; {found.dropped:,} cut by bounds"
    )
    console.print(counts, style="dim", highlight=False)


def _budget(args: argparse.Namespace, model: Model) -> int:
    from tonnage.errors import UsageError
    from tonnage.plan import Batch, cheapest_cluster, device_cluster, offers_json, sizes_of

    if not args.tokens:
        raise UsageError("how many tokens in that time?", hint="add --tokens 2e12")
    prices = dict(_price(each) for each in args.price)
    clusters = []
    for name in (args.cards or "h100,h200,b200").split(","):
        card = device_cluster(name.strip(), 1)
        for each in sizes_of(card, most=args.most):
            price = prices.get(name.strip().lower(), 0.0)
            clusters.append(_priced(each, price))
    seq = args.seq or min(model.max_seq or 4096, 8192)
    batch = Batch(sequences=args.global_batch or 1024, seq=seq)
    with _progress(args, "clusters") as told:
        offers = cheapest_cluster(
            model,
            clusters,
            batch,
            tokens=args.tokens,
            days=args.days,
            recipe=_recipe(args, model),
            progress=told,
        )
    if args.json:
        print(json.dumps(offers_json(offers), allow_nan=False))
    else:
        _show_offers(_console(), offers[: args.top], args.lang)
    return 0


def _priced(cluster: Cluster, price: float) -> Cluster:
    import dataclasses

    return dataclasses.replace(cluster, price=price)


def _price(text: str) -> tuple[str, float]:
    from tonnage.errors import UsageError

    name, _, value = text.partition("=")
    try:
        return name.strip().lower(), float(value)
    except ValueError as error:
        raise UsageError(f"--price {text!r} is no price", hint="write --price h100=2.5") from error


def _show_offers(console: Console, offers: list[Offer], lang: Language) -> None:
    from tonnage.plan import layout_text, say

    rows = [
        (
            each.prediction.cluster.name,
            f"{each.days:.1f}",
            f"{each.device_hours:,.0f}",
            f"{each.cost:,.0f}" if each.cost else "",
            f"{each.prediction.mfu:.1%}",
            layout_text(each.prediction.layout),
        )
        for each in offers
    ]
    heads = ["cluster", "days", "card hours", "cost", "MFU", say("layout", lang)]
    _table(console, "cheapest first", heads, rows, numbers=(1, 2, 3, 4))
    if not offers[0].cost:
        console.print("no prices given (--price h100=2.5): ranked by card hours", style="dim")


def _accuracy(args: argparse.Namespace) -> int:
    from tonnage.errors import UsageError
    from tonnage.plan import accuracy_json, measure, read_rows

    if len(args.rest) != 1:
        raise UsageError("accuracy takes one file of runs", hint="tonnage plan accuracy runs.csv")
    rows = read_rows(args.rest[0])
    with _progress(args, "runs") as told:
        accuracy = measure(rows, progress=told)
    if args.json:
        print(json.dumps(accuracy_json(accuracy), allow_nan=False))
    else:
        _show_accuracy(_console(), accuracy)
    if args.markdown:
        _write(Path(args.markdown), _accuracy_markdown(accuracy))
    return 0


def _show_accuracy(console: Console, accuracy: Accuracy) -> None:
    from tonnage.plan import ACCURACY_COLUMNS, accuracy_rows

    # A narrow terminal shows the errors; memory and ranks are in --json and --markdown as well.
    shown = 8 if console.width < 140 else len(ACCURACY_COLUMNS)
    columns = list(ACCURACY_COLUMNS[:shown])
    rows = [row[:shown] for row in accuracy_rows(accuracy)]
    _table(console, "", columns, rows, numbers=tuple(range(2, shown)))
    for row, source, reason in accuracy.refused:
        console.print(f"refused: row {row} of {source}: {reason}", highlight=False)


def _accuracy_markdown(accuracy: Accuracy) -> str:
    from tonnage.plan import accuracy_markdown

    return accuracy_markdown(accuracy)


def _convert(args: argparse.Namespace) -> int:
    from tonnage.errors import UsageError
    from tonnage.plan import CONVENTIONS, convention, convert_mfu, flops_per_token, load_model

    if len(args.rest) != 1 or not args.model or not args.source:
        raise UsageError(
            "convert-mfu needs a share, a model and how it was counted",
            hint="tonnage plan convert-mfu 45% --model llama3-8b --seq 8192 --from megatron",
        )
    text = args.rest[0]
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise UsageError(f"{text!r} is no share", hint="write 45% or 0.45") from error
    model = load_model(args.model)
    seq = args.seq or min(model.max_seq or 4096, 8192)
    source = convention(args.source)
    targets = [convention(args.to)] if args.to else list(CONVENTIONS.values())
    rows = [
        {
            "convention": each.name,
            "mfu": convert_mfu(
                value, model=model, seq=seq, source=source, target=each, recompute=args.recompute
            ),
            "flops_per_token": flops_per_token(model, seq, each, recompute=args.recompute),
            "source": each.source,
        }
        for each in targets
    ]
    if args.json:
        document = {
            "schema": "tonnage.plan/1",
            "model": model.name,
            "seq": seq,
            "from": source.name,
            "to": rows,
        }
        print(json.dumps(document, allow_nan=False))
        return 0
    table = [
        (
            str(r["convention"]),
            f"{r['mfu']:.2%}",
            f"{float(str(r['flops_per_token'])) / 1e9:.2f}",
            str(r["source"]),
        )
        for r in rows
    ]
    title = f"{value:.2%} by {source.name}, {model.name} at {seq} tokens"
    _table(_console(), title, ["convention", "MFU", "GFLOP/token", "used by"], table, numbers=(1, 2))
    return 0


def _save(args: argparse.Namespace, predicted: list[Prediction], names: list[str]) -> None:
    if args.html:
        from tonnage.ledger import Ledger
        from tonnage.report import write_html

        ledgers = [
            Ledger(each.ledger.frame, {**each.ledger.facts, "run": name or each.ledger.facts["run"]})
            for each, name in zip(predicted, names, strict=True)
        ]
        print(f"page: {write_html(ledgers, args.html)}", file=sys.stderr)
    if args.ledger:
        from tonnage.ledger import write_ledger

        print(f"ledger: {write_ledger(predicted[0].ledger, args.ledger)}", file=sys.stderr)


def _write(path: Path, text: str) -> None:
    """Write ``text`` whole or not at all."""
    from tonnage.errors import UsageError

    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"can't write the table: {error.strerror}", where=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _console() -> Console:
    from rich.console import Console

    return Console()


def _table(
    console: Console,
    title: str,
    heads: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    *,
    numbers: tuple[int, ...],
) -> None:
    from rich import box
    from rich.table import Table

    if not rows:
        return
    table = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)


@contextmanager
def _progress(args: argparse.Namespace, what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, where that is a terminal."""
    if args.json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task: Any = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
