"""A block of events as text to rows: typed and fast where it is JSON, one by one where it is not.

A block that doesn't parse is halved between two events until the broken part is small. There each event
is read by itself, mended where the fault is one that profilers are known for (a backslash, a control
character, a quote inside a name, NaN), and otherwise dropped and counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import msgspec

from tonnage.trace.read_text import BETWEEN

_SMALL = 1 << 16
"""Bytes of text below which a broken block is read event by event."""


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that any figure here needs."""

    external: int = msgspec.field(name="External id", default=-1)
    old_external: int = msgspec.field(name="external id", default=-1)
    device: int = -1
    stream: int = -1
    correlation: int = -1
    nbytes: int = msgspec.field(name="bytes", default=-1)
    size: int = -1
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    collective: str = msgspec.field(name="Collective name", default="")
    num_in: int = msgspec.field(name="In msg nelems", default=-1)
    num_out: int = msgspec.field(name="Out msg nelems", default=-1)
    dtype: str = ""
    group_size: int = msgspec.field(name="Group size", default=-1)
    group: str = msgspec.field(name="Process Group Name", default="")
    group_words: str = msgspec.field(name="Process Group Description", default="")
    group_ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=msgspec.Raw())
    in_split: msgspec.Raw = msgspec.field(name="In split size", default=msgspec.Raw())
    out_split: msgspec.Raw = msgspec.field(name="Out split size", default=msgspec.Raw())
    seq: int = msgspec.field(name="Seq", default=-1)
    name: msgspec.Raw = msgspec.Raw()
    grouped: str = msgspec.field(name="CollGroup", default="")
    bytes_of: int = msgspec.field(name="Bytes", default=-1)


class Row(msgspec.Struct, gc=False):
    """One event as written."""

    ph: str = ""
    ts: float = float("nan")
    dur: float = float("nan")
    name: str = ""
    cat: str = ""
    pid: int | str = -1
    tid: int | str = -1
    args: Args | None = None
    attr: Args | None = None


class _Exact(msgspec.Struct, gc=False):
    ph: str = ""
    ts: msgspec.Raw = msgspec.Raw()


_ROWS = msgspec.json.Decoder(list[Row], strict=False)
_EXACT = msgspec.json.Decoder(list[_Exact], strict=False)
_EVENT = msgspec.json.Decoder(Row, strict=False)
_PLAIN = json.JSONDecoder(strict=False, parse_constant=lambda _: None)
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_NAME = re.compile(r'("name"\s*:\s*")(.*?)("\s*,\s*"(?:ph|cat|pid|tid|ts|dur|args|id|s)"\s*:)', re.S)
_ARRAY_END = re.compile(rb"\}\s*\]|^\s*\]")
_SPACE = re.compile(r"[\s,]*")


def rows(text: bytes, *, is_last: bool, lost: Counter[str]) -> list[Row]:
    """The events of a block; what is amiss is counted in ``lost``."""
    if is_last:
        return _last_rows(text, lost)
    try:
        return _ROWS.decode(b"[" + text + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _halved(text, lost)


def exact_times(text: bytes) -> list[str] | None:
    """Each event's ``ts`` as its text; None if the block isn't whole JSON."""
    try:
        return [bytes(each.ts).decode().strip('"') for each in _EXACT.decode(b"[" + text + b"]")]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def events_part(text: bytes) -> bytes:
    """The events of a file's last block, without what follows the array; as it is if it has no end."""
    for found in _ARRAY_END.finditer(text):
        part = text[: found.start() + 1] if text[found.start() : found.start() + 1] == b"}" else b""
        try:
            _ROWS.decode(b"[" + part + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        return part
    return text


def _last_rows(text: bytes, lost: Counter[str]) -> list[Row]:
    part = events_part(text)
    if len(part) < len(text):
        return _ROWS.decode(b"[" + part + b"]")
    try:
        return _ROWS.decode(b"[" + text.rstrip().rstrip(b",") + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _halved(text, lost)


def _halved(text: bytes, lost: Counter[str]) -> list[Row]:
    if len(text) <= _SMALL:
        return _one_by_one(text.decode("utf-8", "replace"), lost)
    cut = BETWEEN.search(text, len(text) // 2) or BETWEEN.search(text)
    if cut is None or cut.end() >= len(text):
        return _one_by_one(text.decode("utf-8", "replace"), lost)
    first, second = text[: cut.start() + 1], text[cut.end() :]
    return rows(first, is_last=False, lost=lost) + rows(second, is_last=False, lost=lost)


_NEXT = re.compile(BETWEEN.pattern.decode())


def _one_by_one(text: str, lost: Counter[str]) -> list[Row]:
    found: list[Row] = []
    at = 0
    while True:
        space = _SPACE.match(text, at)
        at = space.end() if space else at
        if at >= len(text) or text[at] == "]":
            _announce_rest(text[at:], lost)
            return found
        if text[at] != "{":
            lost["stretches of text are no event"] += 1
            at = _next_event(text, at)
            continue
        try:
            value, at = _PLAIN.raw_decode(text, at)
        except ValueError:
            stop = _next_event(text, at)
            value = _mended(text[at:stop].rstrip().rstrip(","))
            _count_fault(value, text[at:stop], lost, at_end=stop >= len(text))
            at = stop
        if isinstance(value, dict):
            _keep(value, found, lost)


def _count_fault(value: object, text: str, lost: Counter[str], *, at_end: bool) -> None:
    if value is not None:
        lost["events were mended (a backslash or quote that isn't escaped)"] += 1
    elif at_end:
        lost["event is cut off at the end of the file"] += 1
    else:
        lost["events are no JSON and were left out"] += 1


def _announce_rest(rest: str, lost: Counter[str]) -> None:
    if '"traceEvents"' in rest:
        lost["further documents in the same file were left out"] += rest.count('"traceEvents"')


def _next_event(text: str, at: int) -> int:
    found = _NEXT.search(text, at)
    return found.end() if found else len(text)


def _mended(text: str) -> object:
    """The event with its known faults repaired; None if that doesn't help."""
    escaped = _BAD_ESCAPE.sub(r"\\\\", text)
    quoted = _NAME.sub(lambda m: m[1] + re.sub(r'(?<!\\)"', r"\"", m[2]) + m[3], escaped, count=1)
    for each in (escaped, quoted, *_without_end(escaped), *_without_end(quoted)):
        try:
            value, _ = _PLAIN.raw_decode(each)
        except ValueError:
            continue
        return value if isinstance(value, dict) and "ph" in value else None
    return None


def _without_end(text: str) -> list[str]:
    """The event where the array's end and the file's follow it."""
    return [text[: found.start() + 1] for found in re.finditer(r"\}\s*\]", text)]


def _keep(value: dict[str, Any], found: list[Row], lost: Counter[str]) -> None:
    for key in ("args", "attr"):
        if isinstance(value.get(key), dict):
            value[key] = {k: v for k, v in value[key].items() if v is not None}
    try:
        found.append(_EVENT.decode(json.dumps({k: v for k, v in value.items() if v is not None})))
    except (msgspec.DecodeError, UnicodeEncodeError):
        found.extend(_numbers_only(value, lost))


def _numbers_only(value: dict[str, Any], lost: Counter[str]) -> list[Row]:
    """The event without the arguments that aren't of their usual type."""
    args = value.get("args")
    kept = {}
    for key, each in args.items() if isinstance(args, dict) else ():
        try:
            msgspec.convert({key: each}, Args, strict=False)
            kept[key] = each
        except msgspec.ValidationError:
            digits = re.search(r"-?\d+", str(each)) if key in ("stream", "device") else None
            if digits:
                kept[key] = int(digits[0])
    try:
        plain = {
            k: value[k] for k in ("ph", "ts", "dur", "name", "cat", "pid", "tid") if value.get(k) is not None
        }
        return [_EVENT.decode(json.dumps({**plain, "args": kept}))]
    except (msgspec.DecodeError, UnicodeEncodeError):
        lost["events have fields of an unknown type and were left out"] += 1
        return []
