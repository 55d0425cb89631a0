from __future__ import annotations

import dataclasses
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from tonnage.engine.compress import (
    CODEC_NAMES,
    LEAST_GAIN,
    NO_CODEC,
    CodecSpeed,
    Exchange,
    choose,
    make_codec,
    measure_codec,
    predict_step,
)
from tonnage.errors import EngineError

BF16 = CodecSpeed(name="bf16", ratio=2.0, encode=2e9, decode=3e9, error=2e-3)
INT8 = CodecSpeed(name="int8", ratio=3.94, encode=1.4e9, decode=2.5e9, error=8e-3)
LOSSLESS = CodecSpeed(name="lossless", ratio=1.17, encode=0.6e9, decode=0.7e9, error=0.0)
ALL = (LOSSLESS, BF16, INT8)

speeds = st.builds(
    CodecSpeed,
    name=st.sampled_from("abc"),
    ratio=st.floats(0.9, 100),
    encode=st.floats(1e7, 1e12),
    decode=st.floats(1e7, 1e12),
    error=st.floats(0, 1),
)
exchanges = st.builds(
    Exchange,
    nbytes=st.integers(0, 10**11),
    num_ranks=st.integers(1, 1024),
    num_buckets=st.integers(1, 200),
    latency=st.floats(0, 1e-3),
    bandwidth=st.floats(1e6, 1e12),
    compute=st.floats(0, 100),
    busy=st.floats(0, 1),
    both_legs=st.booleans(),
)


def exchange(gbit: float, **changes: object) -> Exchange:
    plain = Exchange(
        nbytes=44_000_000, num_ranks=4, num_buckets=20, latency=1e-4, bandwidth=gbit * 1.25e8, compute=0.4
    )
    return dataclasses.replace(plain, **changes)


@given(exchanges, st.lists(speeds, max_size=5))
def test_the_choice_is_never_predicted_slower_than_no_compression(
    step: Exchange, codecs: list[CodecSpeed]
) -> None:
    choice = choose(step, codecs)
    plain = choice.predictions[0]
    if choice.name != "none":
        chosen = [p for p in choice.predictions[1:] if p.name == choice.name]
        assert min(p.step for p in chosen) <= (1 - LEAST_GAIN) * plain.step
    assert choice.reason
    assert len(choice.predictions) == 1 + len(codecs)


@given(exchanges, st.lists(speeds, max_size=5))
def test_no_less_lossy_codec_that_hides_and_pays_is_passed_over(
    step: Exchange, codecs: list[CodecSpeed]
) -> None:
    choice = choose(step, codecs)
    plain, *others = choice.predictions
    paying = [p for p in others if p.step <= (1 - LEAST_GAIN) * plain.step]
    hiding = [p for p in paying if p.hides]
    if hiding:
        assert choice.name == min(hiding, key=lambda p: (p.error, p.step)).name
    elif paying:
        assert choice.name == min(paying, key=lambda p: (p.step, p.error)).name
    else:
        assert choice.name == "none"


@given(exchanges, speeds, st.floats(1, 100))
def test_a_step_is_never_predicted_longer_on_a_faster_link(
    step: Exchange, codec: CodecSpeed, factor: float
) -> None:
    faster = dataclasses.replace(step, bandwidth=step.bandwidth * factor)
    assert predict_step(faster, codec).step <= predict_step(step, codec).step * (1 + 1e-12)


@given(exchanges, speeds)
def test_a_step_takes_at_least_its_computation_its_wire_and_its_work(
    step: Exchange, codec: CodecSpeed
) -> None:
    prediction = predict_step(step, codec)
    assert prediction.step >= max(step.compute, prediction.wire, prediction.work)


@given(exchanges, st.lists(speeds, max_size=4))
def test_one_rank_alone_compresses_nothing(step: Exchange, codecs: list[CodecSpeed]) -> None:
    assert choose(dataclasses.replace(step, num_ranks=1, both_legs=False), codecs).name == "none"


def test_a_step_of_no_length_compresses_nothing() -> None:
    nothing = dataclasses.replace(exchange(1), num_ranks=1, compute=0.0)
    assert choose(nothing, ALL).name == "none"


def test_no_codec_is_predicted_to_send_what_a_ring_sends() -> None:
    one = exchange(1, latency=0.0)
    assert predict_step(one, NO_CODEC).wire == pytest.approx(2 * 3 / 4 * 44e6 / 1.25e8)


def test_in_a_data_centre_compression_does_not_pay_and_the_reason_says_so() -> None:
    choice = choose(exchange(100), ALL)
    assert choice.name == "none"
    assert "hide" in choice.reason
    assert "gain nothing" in choice.reason


def test_the_slower_the_link_the_more_is_lost() -> None:
    names = [choose(exchange(gbit, both_legs=True), ALL).name for gbit in (10, 0.8, 0.1)]
    assert names == ["none", "bf16", "int8"]


def test_a_codec_slower_than_the_link_is_not_taken() -> None:
    slow = dataclasses.replace(INT8, encode=5e7, decode=5e7)
    choice = choose(exchange(1), [slow])
    assert choice.name == "none"
    assert "instead of" in choice.reason


def test_what_cannot_be_is_refused() -> None:
    for changes in (
        {"num_ranks": 0},
        {"bandwidth": 0.0},
        {"busy": 2.0},
        {"compute": math.nan},
        {"nbytes": -1},
    ):
        with pytest.raises(EngineError):
            exchange(1, **changes)
    with pytest.raises(EngineError):
        dataclasses.replace(INT8, ratio=math.nan)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_every_codec_can_be_measured(name: str) -> None:
    sample = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    speed = measure_codec(make_codec(name), sample, clock=time.perf_counter, repeats=3)
    assert speed.ratio > 0.99
    assert (speed.error == 0) == make_codec(name).lossless
    assert speed.error < 1
