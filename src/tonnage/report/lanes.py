"""A page about what ran when: tables, and a zoomable picture with a lane for each rank and stream.

The page is one file that needs nothing else, under the same content security policy as the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from string import Template
from typing import Literal

from tonnage.report.facts import clean
from tonnage.report.html import _asset, _embedded, _policy

LaneKind = Literal["compute", "copy", "waiting", "moving", "communication"]
_KINDS: tuple[LaneKind, ...] = ("compute", "copy", "waiting", "moving", "communication")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table of texts: its caption, heads, and rows of as many texts."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesPage:
    """What the page shows.

    Attributes:
        title: of the page.
        verdict: the sentence at its head.
        reasons: lines below it.
        tables: in this order.
        lanes: names from the top.
        pieces: lane, start and stop (microseconds), kind, text, pieces it stands for.
        steps: name, start and stop (microseconds) of each step marked.
        words: what each kind is called, for the key and tooltips; its own name by default.
        lang: of the texts.
    """

    title: str
    verdict: str
    reasons: tuple[str, ...] = ()
    tables: tuple[PageTable, ...] = ()
    lanes: tuple[str, ...]
    pieces: tuple[tuple[int, float, float, LaneKind, str, int], ...]
    steps: tuple[tuple[str, float, float], ...] = ()
    words: dict[str, str] = field(default_factory=dict)
    lang: str = "en"


def render_lanes(page: LanesPage) -> str:
    """The page as HTML."""
    library, script = _asset("echarts/echarts.min.js"), _script()
    words: dict[str, str] = {kind: page.words.get(kind, kind) for kind in _KINDS}
    used = {piece[3] for piece in page.pieces}
    key = " ".join(f'<i class="{kind}"></i>{escape(words[kind])}' for kind in _KINDS if kind in used)
    return Template(_asset("lanes.html")).substitute(
        lang=escape(page.lang),
        title=escape(page.title),
        policy=_policy(library, script),
        style=_asset("page.css") + _asset("lanes.css"),
        verdict=escape(page.verdict),
        reasons="".join(f"<li>{escape(each)}</li>" for each in page.reasons),
        key=key,
        tables="".join(map(_table, page.tables)),
        data=_embedded(_data(page, words)),
        library=library,
        script=script,
    )


def _script() -> str:
    return f'(() => {{\n"use strict";\n{_asset("lanes.js")}}})();\n'


def _data(page: LanesPage, words: dict[str, str]) -> dict[str, object]:
    """Columns, each different text once."""
    texts = {text: number for number, text in enumerate(dict.fromkeys(each[4] for each in page.pieces))}
    return {
        "lanes": [clean(name, longest=60) for name in page.lanes],
        "steps": [[clean(name, longest=20), start, stop] for name, start, stop in page.steps],
        "kinds": list(_KINDS),
        "words": [words[kind] for kind in _KINDS],
        "texts": [clean(text, longest=120) for text in texts],
        "lane": [each[0] for each in page.pieces],
        "start": [round(each[1], 2) for each in page.pieces],
        "stop": [round(each[2], 2) for each in page.pieces],
        "kind": [_KINDS.index(each[3]) for each in page.pieces],
        "text": [texts[each[4]] for each in page.pieces],
        "merged": [each[5] for each in page.pieces],
    }


def _table(table: PageTable) -> str:
    if not table.rows:
        return ""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in table.heads)
    body = "".join(f"<tr>{_row(row)}</tr>" for row in table.rows)
    caption = escape(table.caption)
    return (
        f'<section><h2>{caption}</h2><div class="wide" tabindex="0" role="region" aria-label="{caption}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _row(row: Sequence[str]) -> str:
    first, *rest = row
    cells = "".join(f"<td>{escape(each)}</td>" for each in rest)
    return f'<th scope="row">{escape(first)}</th>{cells}'
