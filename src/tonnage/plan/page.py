"""Predictions as one HTML page that needs no network, no script and no other file.

Bars and the timeline are plain boxes and inline SVG; the content security policy allows nothing but
the page's own style. Whatever a name holds is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tonnage.plan.explain import headline, layout_text, ledger_table, memory_rows, part_rows, working
from tonnage.plan.overlap import Event
from tonnage.plan.predict import Prediction
from tonnage.plan.words import Language, say
from tonnage.units import format_size, format_time

MOST_STAGES = 16
"""Stages that the timeline shows; of more, some are left out."""

_LEDGER = ("kind", "op", "group", "link", "calls", "wire", "time", "exposed")


def plan_page(predictions: Sequence[Prediction], names: Sequence[str], lang: Language = "en") -> str:
    """The page: the first prediction in full, the others beside it.

    Args:
        predictions: one or more; the first is the plan, the others what changes make of it.
        names: of each.
        lang: of headings and sentences.
    """
    first = predictions[0]
    parts = [
        f"<h1>{escape(headline(first, lang))}</h1>",
        f'<p class="soft">{escape(say("layout", lang))}: {escape(layout_text(first.layout))}</p>',
        _cards(predictions, names, lang),
        _section(say("where the seconds go", lang), _seconds(predictions, names, lang)),
        _section(say("timeline title", lang), _timeline(first, lang)),
        _section(say("what moves", lang), _links(first, lang) + _moved(first, lang)),
        _section(
            f"{say('memory', lang)} ({say(first.memory_stage, lang)})", _memory(predictions, names, lang)
        ),
        _section(say("working", lang), _list(working(first, lang))),
    ]
    title = f"{first.model.name}, {first.cluster.num_devices} {first.cluster.device.name}"
    return _PAGE.format(lang=lang, title=escape(title), style=_STYLE, body="\n".join(parts))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _cards(predictions: Sequence[Prediction], names: Sequence[str], lang: Language) -> str:
    base = predictions[0].seconds
    cards = []
    for p, name in zip(predictions, names, strict=True):
        change = "" if p is predictions[0] else f" ({p.seconds / base - 1:+.1%})"
        fits = say("fits" if p.fits else "does not fit", lang)
        cards.append(
            f"<div class=card><b>{escape(name or say('now', lang))}</b>"
            f"<span class=big>{format_time(p.seconds)}{change}</span>"
            f"<span>{p.tokens_per_second_per_device:,.0f} {escape(say('tokens', lang))} · MFU {p.mfu:.1%}</span>"
            f"<span>{p.memory_total / 2**30:.1f} GiB: {escape(fits)}</span></div>"
        )
    return f"<div class=cards>{''.join(cards)}</div>"


def _seconds(predictions: Sequence[Prediction], names: Sequence[str], lang: Language) -> str:
    most = max(p.seconds for p in predictions)
    bars = [
        _bar(name or say("now", lang), p.parts, most, f"{format_time(p.seconds)}")
        for p, name in zip(predictions, names, strict=True)
    ]
    keys = [key for key, value in predictions[0].parts.items() if any(p.parts[key] > 0 for p in predictions)]
    heads = [say(key, lang) for key in ("part", "seconds", "share")]
    return _legend(keys, lang) + "".join(bars) + _table(heads, part_rows(predictions[0], lang), (1, 2))


def _memory(predictions: Sequence[Prediction], names: Sequence[str], lang: Language) -> str:
    card = max(p.cluster.device.memory for p in predictions)
    most = max(card, *(p.memory_total for p in predictions))
    bars = [
        _bar(name or say("now", lang), p.memory, most, f"{p.memory_total / 2**30:.1f} GiB", mark=card / most)
        for p, name in zip(predictions, names, strict=True)
    ]
    note = f'<p class="soft">{escape(say("card holds", lang))} {card / 2**30:.1f} GiB</p>'
    table = _table([say("part", lang), say("size", lang)], memory_rows(predictions[0], lang), (1,))
    return _legend(list(predictions[0].memory), lang) + "".join(bars) + note + table


def _bar(name: str, parts: dict[str, float], most: float, text: str, *, mark: float | None = None) -> str:
    boxes = "".join(
        f'<i class="{key}" style="width:{100 * max(value, 0) / most:.3f}%" title="{escape(key)}"></i>'
        for key, value in parts.items()
    )
    line = "" if mark is None else f'<u style="left:{100 * mark:.3f}%"></u>'
    return (
        f'<div class=row><span>{escape(name)}</span><div class=bar role=img aria-label="{escape(text)}">'
        f"{boxes}{line}</div><span class=number>{text}</span></div>"
    )


def _legend(keys: Sequence[str], lang: Language) -> str:
    return f"<p class=key>{''.join(f'<i class={key}></i>{escape(say(key, lang))} ' for key in keys)}</p>"


def _links(prediction: Prediction, lang: Language) -> str:
    """Bytes that the busiest rank sends over each link level."""
    totals: dict[str, dict[int, float]] = {}
    for row in prediction.ledger.movements:
        by_rank = totals.setdefault(row["link"], {})
        by_rank[row["rank"]] = by_rank.get(row["rank"], 0.0) + row["wire_nbytes"]
    rows = [(link, format_size(max(each.values()))) for link, each in totals.items() if max(each.values())]
    return _table([say("link", lang), say("most by a card", lang)], rows, (1,)) if rows else ""


def _moved(prediction: Prediction, lang: Language) -> str:
    return _table([say(key, lang) for key in _LEDGER], ledger_table(prediction, lang), (4, 5, 6, 7))


def _timeline(prediction: Prediction, lang: Language) -> str:
    """The simulated step: a row a stage, a box an event."""
    events, stages = prediction.simulated.events, prediction.layout.pp
    end = max((event.stop for event in events), default=0.0)
    if end <= 0:
        return ""
    count = min(stages, MOST_STAGES)
    picked = sorted({round(i * (stages - 1) / max(count - 1, 1)) for i in range(count)})
    boxes = [
        _box(event, picked.index(event.stage), end)
        for lane in ("exchange", "compute")
        for event in events
        if event.lane == lane and event.stage in picked
    ]
    labels = "".join(f'<text x="0" y="{i * 22 + 15}">{stage}</text>' for i, stage in enumerate(picked))
    keys = "".join(
        f"<i class={key}></i>{escape(say(f'event {key}', lang))} "
        for key in ("F", "B", "g", "optimizer", "send")
    )
    shown = say("shown of", lang).format(shown=prediction.simulated.simulated)
    return (
        f'<p class=key>{keys}</p><svg viewBox="0 0 1000 {len(picked) * 22 + 4}" role=img '
        f'aria-label="{escape(say("timeline title", lang))}">{labels}{"".join(boxes)}</svg>'
        f'<p class="soft">{escape(shown)}</p>'
    )


def _box(event: Event, row: int, end: float) -> str:
    kind = (
        "g"
        if event.lane == "exchange"
        else event.label
        if event.label in ("optimizer", "send")
        else event.label[:1]
    )
    left, width = 30 + 970 * event.start / end, max(970 * (event.stop - event.start) / end, 0.3)
    top, height = (row * 22 + 14, 5) if event.lane == "exchange" else (row * 22 + 2, 12)
    return f'<rect class="{escape(kind)}" x="{left:.2f}" y="{top}" width="{width:.2f}" height="{height}"/>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: tuple[int, ...]) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=number' if i in numbers else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{cells(heads, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


# Hues: Okabe and Ito's palette, which people with any colour vision tell apart.
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181d; --ink: #e6edf3; --soft: #9aa7b4; --line: #38424d; --card: #1d232a; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 1rem 1.25rem 4rem; }
h1 { font-size: 1.3rem; line-height: 1.4; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.soft, th { color: var(--soft); font-size: .9rem; font-weight: 400; }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; }
.card { flex: 1 1 12rem; background: var(--card); border-radius: .3rem; padding: .6rem .9rem; }
.card b, .card span { display: block; overflow-wrap: anywhere; }
.card span { color: var(--soft); font-size: .9rem; }
.card .big { font-size: 1.5rem; font-weight: 650; color: var(--ink); }
.row { display: grid; grid-template-columns: 9rem 1fr 5.5rem; gap: .6rem; align-items: center; margin: .3rem 0; }
.row > span { overflow-wrap: anywhere; font-size: .9rem; }
.bar { position: relative; display: flex; height: 1.3rem; background: var(--card); }
.bar i { display: block; height: 100%; }
.bar u { position: absolute; top: -.2rem; bottom: -.2rem; border-left: 2px solid var(--ink); }
.key { font-size: .875rem; color: var(--soft); }
.key i { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 .7em; vertical-align: -.08em; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; text-align: left; }
th.number, td.number { text-align: right; }
svg { width: 100%; min-width: 40rem; display: block; } section { overflow-x: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
ul { padding-left: 1.2rem; } li { overflow-wrap: anywhere; font-size: .9rem; margin: .2rem 0; }
i.compute, i.weights, i.F { background: #56b4e9; } rect.F { fill: #56b4e9; }
i.B, i.gradients { background: #0072b2; } rect.B { fill: #0072b2; }
i.tp, i.activations { background: #d55e00; }
i.dp, i.g, i.buffers { background: #009e73; } rect.g { fill: #009e73; }
i.pp, i.send, i.fragmentation { background: #cc79a7; } rect.send { fill: #cc79a7; }
i.cp { background: #e69f00; } i.ep { background: #f0e442; } i.bubble { background: #999; }
i.optimizer { background: #8a6d00; } rect.optimizer { fill: #8a6d00; } i.other, i.context { background: #6e7781; }
@media (max-width: 560px) { .row { grid-template-columns: 5rem 1fr 4.5rem; } main { padding: .8rem .9rem 3rem; } }
@media print { .wide, section { overflow: visible; } }
"""

_PAGE = """<!doctype html>
<html lang="{lang}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""
