r"""The report as one HTML file that needs no network, no server and no other file.

Tables are plain HTML, so that they can be read without scripts, printed and found by a screen reader.
Pictures are drawn by Apache ECharts, which is part of the page, from columns embedded as JSON.

A ledger may come from anywhere. Whatever it holds is escaped on its way into HTML, and ``<`` is written
``\u003c`` in JSON. The page's content security policy names the two scripts by their hashes and allows
no connection at all, so that text which slipped through could neither run nor call home.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from tonnage.errors import TonnageError
from tonnage.ledger import Ledger
from tonnage.report import words
from tonnage.report.facts import run_names
from tonnage.report.page import page_data
from tonnage.report.run import Run, weigh
from tonnage.report.sections import (
    Section,
    bound_working,
    movement_section,
    rank_section,
    shared,
    step_section,
    wire_check,
)
from tonnage.report.verdict import judge, loss_words

_TITLE = "Tonnage report"
_SCRIPTS = ("base", "timeline", "pieces", "loss", "tables", "page")


def render_html(ledgers: Sequence[Ledger], *, title: str = _TITLE) -> str:
    """The page about these ledgers."""
    runs = [weigh(ledger, name) for ledger, name in zip(ledgers, run_names(ledgers), strict=True)]
    library, script = _asset("echarts/echarts.min.js"), _script()
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        policy=_policy(library, script),
        style=_asset("page.css"),
        header=_header(runs),
        reasons=_reasons(runs),
        steps=_steps(runs),
        loss=_text(loss_words(runs)) if runs else "",
        moved=_table(
            "moved",
            "Movements, mean of a step and rank; time is the sum of the transfers, also of those at once",
            movement_section(runs),
        ),
        ranks=_table("ranks", "Movements of each rank, mean of a step", rank_section(runs)),
        facts=_facts(runs),
        data=_embedded(page_data(runs)),
        library=library,
        script=script,
    )


def write_html(ledgers: Sequence[Ledger], path: str | Path, *, title: str = _TITLE) -> Path:
    """Write the page whole or not at all; returns the path.

    Raises:
        TonnageError: the folder is missing or can't be written.
    """
    target = Path(path)
    page = render_html(ledgers, title=title)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise _unwritable(target, error) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        # mkstemp makes the file private; a page follows the user's umask.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _unwritable(target: Path, error: OSError) -> TonnageError:
    return TonnageError(
        f"can't write the page: {error.strerror}",
        where=str(target),
        hint="name a file in a folder that exists",
    )


@cache
def _asset(name: str) -> str:
    return files("tonnage.report").joinpath("assets", name).read_text(encoding="utf-8")


def _script() -> str:
    """Our scripts in one scope of their own."""
    parts = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


def _policy(*scripts: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]
    sources = " ".join(f"'sha256-{each}'" for each in hashes)
    # ECharts positions its tooltips by style attributes, hence the unsafe-inline of styles.
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _embedded(data: object) -> str:
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _header(runs: Sequence[Run]) -> str:
    if not runs:
        return _text("No ledger, so nothing to report.")
    cards = "".join(_card(run, number) for number, run in enumerate(runs))
    return f'<p class="verdict">{escape(judge(runs).headline)}</p><div class="cards">{cards}</div>'


def _reasons(runs: Sequence[Run]) -> str:
    reasons = judge(runs).reasons if runs else ()
    return f'<ul class="reasons">{"".join(f"<li>{escape(each)}</li>" for each in reasons)}</ul>'


def _card(run: Run, number: int) -> str:
    exposed = f"{words.seconds(run.spent.exposed)} standing still"
    sends = words.plural(run.moved.calls, "transfer")
    return (
        f'<div class="card run{number % 6}"><b>{escape(run.name)}</b>'
        f'<span class="big">{words.seconds(run.step)}</span><span>a step · {exposed} · {sends}</span></div>'
    )


def _steps(runs: Sequence[Run]) -> str:
    workings = "".join(
        f"<dt>{escape(names)}</dt><dd>{escape(working)}</dd>"
        for working, names in shared(runs, bound_working)
    )
    bound = (
        "<p>The bound is the larger of the compute time without communication, and the bytes that the "
        "busiest rank sends in a step over its link's rate. No schedule can beat it with these bytes.</p>"
        f'<dl class="facts">{workings}</dl>'
    )
    return _table("steps", "Step time", step_section(runs)) + (bound if workings else "")


def _table(name: str, caption: str, section: Section) -> str:
    if not section.rows:
        return _text(f"{caption}: nothing in the ledger.")
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in section.headers)
    body = "".join(
        "<tr>" + "".join(_cell(cell.text, cell.value, first=n == 0) for n, cell in enumerate(row)) + "</tr>"
        for row in section.rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table id="{name}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<button type="button" class="csv" data-table="{name}">Save as CSV</button>'
    )


def _cell(text: str, value: float | None, *, first: bool) -> str:
    number = "" if value is None else f' class="number" data-value="{value!r}"'
    return f'<th scope="row">{escape(text)}</th>' if first else f"<td{number}>{escape(text)}</td>"


def _facts(runs: Sequence[Run]) -> str:
    """What all runs have in common once, then what differs."""
    rows = [_fact_rows(run) for run in runs]
    common = [each for each in rows[0] if all(each in other for other in rows)] if len(rows) > 1 else []
    parts = [("all runs", common), *((run.name, own) for run, own in zip(runs, rows, strict=True))]
    return "".join(
        _fact_list(name, [each for each in own if own is common or each not in common]) for name, own in parts
    )


def _fact_list(heading: str, rows: Sequence[tuple[str, str]]) -> str:
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    return f'<h3>{escape(heading)}</h3><dl class="facts">{entries}</dl>' if rows else ""


def _fact_rows(run: Run) -> list[tuple[str, str]]:
    facts = run.facts
    rows = [
        ("what", facts.title),
        ("ranks", f"{facts.world_size or len(run.ranks)}"),
        ("steps", f"{run.num_steps} counted" + (f", first {facts.warmup} left out" if facts.warmup else "")),
        ("link", facts.link_note),
        ("link rate", words.rate(facts.link_rate) if facts.link_rate else ""),
        ("parameters", words.count(facts.num_params) if facts.num_params else ""),
        ("tokens a step", words.count(facts.tokens_per_step) if facts.tokens_per_step else ""),
        ("wire", wire_check(run)),
        *(("note", note) for note in facts.notes),
    ]
    return [(name, text) for name, text in rows if text]


def _text(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""
