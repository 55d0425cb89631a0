"""How ``tonnage plan`` shows predictions, changes and searches in a terminal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tonnage.cli.terminal import print_table

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.plan import Found, Language, Offer, Prediction

_EXPOSED = ("tp", "cp", "ep", "dp", "pp")


def show_prediction(to: Console, prediction: Prediction, args: argparse.Namespace) -> None:
    """The headline, the tables, the timeline, and what else was asked."""
    from tonnage.plan import headline, layout_text, measured_lines, memory_rows, part_rows, say, working

    lang: Language = args.lang
    to.print(headline(prediction, lang), style="bold", highlight=False)
    to.print(f"{say('layout', lang)}: {layout_text(prediction.layout)}", highlight=False)
    if not prediction.fits:
        to.print(_nearest(prediction, lang), style="yellow", highlight=False)
    if args.tokens:
        to.print(_hours(prediction, args.tokens, lang), highlight=False)
    heads = [say(key, lang) for key in ("part", "seconds", "share")]
    print_table(to, say("where the seconds go", lang), heads, part_rows(prediction, lang), numbers=(1, 2))
    _show_ledger(to, prediction, lang)
    print_table(
        to,
        f"{say('memory', lang)} ({say(prediction.memory_stage, lang)})",
        [say("part", lang), say("size", lang)],
        memory_rows(prediction, lang),
        numbers=(1,),
    )
    _show_timeline(to, prediction, lang)
    lines = measured_lines(prediction, args.measured, lang) if args.measured else []
    if args.slowest_nic:
        lines.append(slowest_nic_line(prediction, args.slowest_nic, lang))
    if args.explain:
        lines += ["", f"{say('working', lang)}", *(f"  {line}" for line in working(prediction, lang))]
    for line in lines:
        to.print(line, highlight=False, markup=False, soft_wrap=True)


def _nearest(prediction: Prediction, lang: Language) -> str:
    from tonnage.plan import changes_text, nearest_fit, say

    p = prediction
    near = nearest_fit(p.model, p.cluster, p.layout, p.batch)
    if near is None:
        return say("nothing near", lang)
    return say("nearest", lang).format(changes=changes_text(p.layout, near))


def _hours(prediction: Prediction, tokens: float, lang: Language) -> str:
    from tonnage.plan import say
    from tonnage.units import format_time

    hours = prediction.device_hours(tokens)
    lasts = format_time(hours * 3600 / prediction.cluster.num_devices)
    cost = prediction.cluster.price * hours
    money = f", {say('cost', lang)} {cost:,.0f}" if cost else ""
    return f"{tokens:.3g} tokens: {hours:,.0f} {say('card hours', lang)}, {lasts}{money}"


def _show_ledger(to: Console, prediction: Prediction, lang: Language) -> None:
    from tonnage.plan import ledger_table, say

    names = ("kind", "op", "group", "link", "calls", "wire", "time", "exposed")
    heads = [say(key, lang) for key in names]
    rows = ledger_table(prediction, lang)
    print_table(to, say("what moves", lang), heads, rows, numbers=(4, 5, 6, 7))


def _show_timeline(to: Console, prediction: Prediction, lang: Language) -> None:
    from tonnage.plan import say, text_timeline

    to.print(say("timeline", lang), highlight=False)
    width = max(40, min(100, to.width - 14))
    for line in text_timeline(prediction.simulated, prediction.layout.pp, width=width):
        to.print(line, highlight=False, markup=False)


def slowest_nic_line(prediction: Prediction, loss: float, lang: Language) -> str:
    """What NIC would do, in a sentence."""
    from tonnage.plan import say, slowest_nic
    from tonnage.units import format_rate

    rate = slowest_nic(prediction, loss=loss)
    answer = say("any nic", lang) if rate == 0 else f"{format_rate(rate)} {say('a card', lang)}"
    return f"{say('slowest nic', lang).format(loss=f'{loss:.3g}' if loss >= 1 else f'{loss:.1%}')}: {answer}"


def show_cases(to: Console, names: list[str], predicted: list[Prediction], lang: Language) -> None:
    """The same run changed, one line a change."""
    from tonnage.plan import say
    from tonnage.units import format_time

    first = predicted[0].seconds
    rows = [
        (
            name,
            format_time(each.seconds),
            f"{each.seconds / first - 1:+.1%}",
            format_time(sum(each.parts[key] for key in _EXPOSED)),
            f"{each.tokens_per_second_per_device:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.memory_total / 2**30:.1f} GiB",
            say("fits" if each.fits else "does not fit", lang),
        )
        for name, each in zip(names, predicted, strict=True)
    ]
    heads = [say(key, lang) for key in ("change", "step", "against", "exposed", "tokens")]
    print_table(to, "", [*heads, "MFU", say("held", lang), ""], rows, numbers=(1, 2, 3, 4, 5, 6))


def show_found(to: Console, found: Found, args: argparse.Namespace) -> None:
    """The best layouts, and why the first wins."""
    from tonnage.plan import headline, layout_text, say
    from tonnage.units import format_time

    lang: Language = args.lang
    best = found.best[0]
    to.print(headline(best, lang), style="bold", highlight=False)
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
    names = [say(key, lang) for key in ("layout", "step", "against", "tokens")]
    heads = ["", *names, "MFU", say("held", lang)]
    print_table(to, say("best layouts", lang), heads, rows, numbers=(2, 3, 4, 5, 6))
    _show_why(to, found, lang)
    if args.slowest_nic:
        to.print(slowest_nic_line(best, args.slowest_nic, lang), highlight=False)
    if args.tokens:
        to.print(_hours(best, args.tokens, lang), highlight=False)
    counts = say("searched", lang).format(
        considered=f"{found.considered:,}", large=f"{found.too_large:,}", dropped=f"{found.dropped:,}"
    )
    to.print(counts, style="dim", highlight=False)


def _show_why(to: Console, found: Found, lang: Language) -> None:
    from tonnage.plan import say
    from tonnage.units import format_time

    rows = [
        (
            say(reason.part, lang),
            format_time(reason.best),
            format_time(reason.other),
            f"{'+' if reason.other > reason.best else '-'}{format_time(abs(reason.other - reason.best))}",
        )
        for reason in found.why[:4]
    ]
    heads = [say("part", lang), "1", "2", say("against", lang)]
    print_table(to, say("why", lang), heads, rows, numbers=(1, 2, 3))


def show_offers(to: Console, offers: list[Offer], lang: Language) -> None:
    """Clusters that meet a deadline, cheapest first."""
    from tonnage.plan import layout_text, say

    priced = bool(offers[0].cost)
    rows = [
        (
            each.prediction.cluster.name,
            f"{each.days:.1f}",
            f"{each.device_hours:,.0f}",
            *((f"{each.cost:,.0f}",) if priced else ()),
            f"{each.prediction.mfu:.1%}",
            layout_text(each.prediction.layout),
        )
        for each in offers
    ]
    money = [say("cost", lang)] if priced else []
    heads = [say("cluster", lang), say("days", lang), say("card hours", lang), *money, "MFU"]
    numbers = tuple(range(1, len(heads)))
    print_table(to, say("cheapest first", lang), [*heads, say("layout", lang)], rows, numbers=numbers)
    if not priced:
        to.print(say("no prices", lang), style="dim")
