from __future__ import annotations

import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tonnage.errors import UnitError
from tonnage.units import (
    format_bandwidth,
    format_rate,
    format_size,
    format_time,
    parse_rate,
    parse_size,
)

FORMATS = (
    format_size,
    lambda size: format_size(size, binary=True),
    format_rate,
    format_bandwidth,
    format_time,
)

# Three digits are printed, so half a unit of the third is lost: 5 in 1000 of 1.00.
THREE_DIGITS = 0.0051

_SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


def read_time(text: str) -> float:
    """Seconds of what format_time printed; there is no parser of times in the package."""
    if hours := re.fullmatch(r"(-?)(\d+) h (\d\d) min", text):
        return (-1 if hours[1] else 1) * (int(hours[2]) * 3600 + int(hours[3]) * 60)
    number, unit = text.split(" ")
    return float(number) * _SECONDS[unit]


@given(st.integers(0, 10**17))
@example(999_499)
@example(999_500)
@example(1023)
def test_a_size_reads_back_as_printed(nbytes: int) -> None:
    for binary in (False, True):
        again = parse_size(format_size(nbytes, binary=binary))
        assert again == pytest.approx(nbytes, rel=THREE_DIGITS)


@given(st.floats(1, 1e14))
def test_a_rate_reads_back_as_printed(rate: float) -> None:
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=THREE_DIGITS, abs=0.0625)
    assert parse_rate(format_bandwidth(rate)) == pytest.approx(rate, rel=THREE_DIGITS, abs=0.5)


@given(st.floats(1e-9, 1e7) | st.floats(-1e7, -1e-9))
@example(59.9996)
@example(3599.9)
@example(7199.0)
@example(0.9995e-3)
def test_a_time_reads_back_as_printed(seconds: float) -> None:
    assert read_time(format_time(seconds)) == pytest.approx(
        seconds, rel=THREE_DIGITS, abs=30 if abs(seconds) >= 3600 else 0
    )


@given(st.integers(0, 2**50))
def test_a_plain_number_is_bytes(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes


@given(
    st.text()
    | st.from_regex(r"[-+]?[0-9._e]{1,12} ?[kKMGTPi]{0,3}(b|B|bit|ps|/s){0,3}", fullmatch=True)
    | st.sampled_from(["nan", "inf", "1e999", "1" * 5000, "9e99999999999 GB", "1 KiB\n", "١٢", "1_0"])
)
@example("1\N{KELVIN SIGN}B")
@example("1G\N{LATIN SMALL LETTER DOTLESS I}B")
@example("\N{FULLWIDTH DIGIT ONE}")
def test_hostile_text_is_a_number_or_a_unit_error(text: str) -> None:
    for parse in (parse_size, parse_rate):
        try:
            value = parse(text)
        except UnitError as error:
            assert error.hint  # noqa: PT017 - most texts raise, a few don't
        else:
            assert math.isfinite(value)
            assert text.strip().isascii()
            assert value >= 0


@given(st.floats())
def test_every_float_prints_on_one_short_line(value: float) -> None:
    for form in FORMATS:
        text = form(value)
        assert text
        assert "\n" not in text
        assert (text == "unknown") == math.isnan(value)


@given(st.floats(-1e18, 1e18))
def test_a_sign_is_printed_only_below_zero(value: float) -> None:
    for form in FORMATS:
        assert form(value).startswith("-") == (value < 0)


@given(st.floats(1e-11, 1e18))
def test_a_time_above_zero_never_prints_as_zero(seconds: float) -> None:
    assert read_time(format_time(seconds)) > 0


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("500mbit", 62.5e6),
        ("1Gbit/s", 125e6),
        ("10 Gbps", 1.25e9),
        ("10 GBps", 10e9),
        ("25GB/s", 25e9),
        ("8b", 1),
        ("8 Bit/s", 1),
        ("1.5e3 kbit", 187_500),
    ],
)
def test_a_small_b_is_bits_and_a_large_one_bytes(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("25MB", 25_000_000), ("1.5 GiB", 1_610_612_736), ("64k", 64_000), ("64Ki", 65_536), (" 4096 ", 4096)],
)
def test_an_i_makes_a_size_binary(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "MB", "-1", "1ib", "1 XB", "500mbits", "0x10", "1,5GB", "1e999"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "500mbits", "0gbit", "1", "1 GiB/s", "fast", "1e400gbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_rate(text)


def test_numbers_print_as_people_write_them() -> None:
    assert format_size(13_300_000) == "13.3 MB"
    assert format_size(13_300_000, binary=True) == "12.7 MiB"
    assert format_rate(62.5e6) == "500 Mbit/s"
    assert format_bandwidth(31.7e9) == "31.7 GB/s"
    assert [format_time(each) for each in (1.2, 0.34, 12e-6, 5e-9, 7500, 0, -0.0)] == [
        "1.20 s", "340 ms", "12.0 µs", "5.00 ns", "2 h 05 min", "0 s", "0 s",
    ]  # fmt: skip
