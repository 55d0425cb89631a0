"""Sizes, rates and times as people write them.

Inside Tonnage a size is bytes, a rate is bytes per second and a time is seconds, always without a
suffix in the name. Text is parsed and printed only here. Link rates are decimal bits (``1gbit`` is
125,000,000 bytes per second, as in ``tc``); memory is binary (``GiB``); traffic is decimal (``GB``).
"""

from __future__ import annotations

import math
import re

from tonnage.errors import UnitError

_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}

_NUMBER = r"(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
# Without ASCII, case-folding would also take the Kelvin sign for a k, and a dotless i for an i.
_FLAGS = re.IGNORECASE | re.ASCII
_RATE = re.compile(rf"{_NUMBER}\s*(?P<prefix>[kmgt]?)(?P<unit>bit|b)(?:/s|ps)?", _FLAGS)
_SIZE = re.compile(rf"{_NUMBER}\s*(?P<prefix>[kmgtp]?)(?P<binary>i?)(?P<unit>b)?", _FLAGS)


def parse_rate(text: str) -> float:
    """Bytes per second of a link rate such as ``500mbit``, ``1Gbit/s``, ``10 Gbps`` or ``25GB/s``.

    A lower-case ``b`` or the word ``bit`` means bits, an upper-case ``B`` bytes.

    Raises:
        UnitError: the text is no rate, or zero.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise UnitError(f"{text!r} is no rate", hint="write it like 500mbit, 1gbit or 12.5GB/s")
    in_bytes = match["unit"] == "B"
    rate = float(match["number"]) * _BITS[match["prefix"].lower()] / (1 if in_bytes else 8)
    if not (math.isfinite(rate) and rate > 0):
        raise UnitError(f"no link has a rate of {text!r}", hint="write a finite rate above zero, like 1gbit")
    return rate


def parse_size(text: str) -> int:
    """Bytes of a size such as ``25MB``, ``1.5 GiB``, ``4096`` or ``64k``.

    Raises:
        UnitError: the text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match["binary"] and not match["prefix"]):
        raise UnitError(f"{text!r} is no size", hint="write it like 25MB, 1.5GiB or 4096")
    scale = (_BINARY if match["binary"] else _DECIMAL)[match["prefix"].lower()]
    size = float(match["number"]) * scale
    if not math.isfinite(size):
        raise UnitError(f"{text!r} is too large to be a size", hint="write it like 25MB")
    return round(size)


def format_size(nbytes: float, *, binary: bool = False) -> str:
    """A size for people: ``13.3 MB``, or ``12.7 MiB`` when ``binary``; ``unknown`` for NaN."""
    if math.isnan(nbytes):
        return "unknown"
    step, suffix = (1024.0, "iB") if binary else (1000.0, "B")
    return _scaled(nbytes, step, ("", "k" if not binary else "K", "M", "G", "T", "P"), suffix, "B")


def format_rate(rate: float) -> str:
    """A link rate for people, in bits: ``500 Mbit/s``; ``unknown`` for NaN."""
    if math.isnan(rate):
        return "unknown"
    return _scaled(rate * 8, 1000.0, ("", "k", "M", "G", "T"), "bit/s", "bit/s")


def format_bandwidth(rate: float) -> str:
    """A memory or bus bandwidth for people, in bytes: ``31.7 GB/s``; ``unknown`` for NaN."""
    return "unknown" if math.isnan(rate) else format_size(rate) + "/s"


def format_time(seconds: float) -> str:
    """A time for people: ``1.20 s``, ``340 ms``, ``12.0 µs``, ``5.00 ns``, ``2 h 05 min``; ``unknown`` for NaN."""
    if math.isnan(seconds):
        return "unknown"
    if seconds == 0:
        return "0 s"
    if math.isinf(seconds):
        return f"{seconds} s"
    size = abs(seconds)
    if size >= 3600:
        minutes = round(size / 60)
        return f"{'-' if seconds < 0 else ''}{minutes // 60} h {minutes % 60:02d} min"
    for limit, scale, unit in ((0.9995, 1.0, "s"), (0.9995e-3, 1e3, "ms"), (0.9995e-6, 1e6, "µs")):
        if size >= limit:
            return f"{_digits(seconds * scale)} {unit}"
    return f"{_digits(seconds * 1e9)} ns"


def _scaled(value: float, step: float, prefixes: tuple[str, ...], suffix: str, plain: str) -> str:
    size, index = abs(value), 0
    while size >= step * 0.9995 and index < len(prefixes) - 1:
        size /= step
        index += 1
    sign = "-" if value < 0 else ""
    return f"{sign}{_digits(size) if index else f'{size:.0f}'} {prefixes[index]}{suffix if index else plain}"


def _digits(value: float) -> str:
    """Three significant digits without an exponent."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
