"""The one suite that every codec passes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from tonnage.engine.compress import (
    CODEC_NAMES,
    WIRE_ALIGNMENT,
    Codec,
    MaskedCodec,
    make_codec,
    used_nbytes,
)
from tonnage.engine.transport import average
from tonnage.errors import EngineError

NAMES = [*CODEC_NAMES, "topk:0.3", "topk:1", "masked int8", "masked lossless"]
SIZES = [0, 1, 7, 16, 255, 256, 257, 1023, 1024, 1025, 4096, 4097, 5000, 65536, 65537, 65536 * 2 + 4100]

# How far a decoded value may be from the value itself, as a part of the largest of the chunk. Sign and
# top-k bound nothing elementwise; what they owe is bounded by the law of their error feedback below.
ERRORS = {"lossless": 0.0, "sparse": 0.0, "fp16": 2**-11, "bf16": 2**-8, "int8": 0.51 / 127, "topk:1": 0.0}

LEAST = {"fp16": 2**-25}  # half of its smallest step


def codec_for(name: str, numel: int) -> Codec:
    kind, _, inner = name.rpartition(" ")
    return MaskedCodec(make_codec(inner), mask_of(numel)) if kind else make_codec(inner)


def mask_of(numel: int) -> torch.Tensor:
    return torch.arange(numel) % 3 != 1


def gradients(numel: int, seed: int = 0) -> torch.Tensor:
    """Values over many magnitudes, with stretches of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10 ** (torch.rand(numel, generator=generator) * 6 - 6)
    values[numel // 4 : numel // 2] = 0
    return values


def expected(name: str, chunk: torch.Tensor) -> torch.Tensor:
    """What a perfect codec would deliver."""
    return torch.where(mask_of(len(chunk)), chunk, 0.0) if name.startswith("masked") else chunk


def wire_for(codec: Codec, numel: int, fill: int = 0xAB) -> torch.Tensor:
    return torch.full((codec.max_wire_nbytes(numel),), fill, dtype=torch.uint8)


def through(codec: Codec, chunk: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    wire, out = wire_for(codec, len(chunk)), torch.full_like(chunk, math.nan)
    used = codec.encode(chunk, wire, residual)
    codec.decode(wire[:used], out)
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", SIZES)
def test_a_round_trip_is_as_near_as_promised_at_any_size(name: str, numel: int) -> None:
    chunk = gradients(numel, seed=numel)
    out = through(codec_for(name, numel), chunk)
    wanted = expected(name, chunk)
    bound = ERRORS.get(name.removeprefix("masked "), math.inf)
    largest = wanted.abs().max().item() if numel else 0.0
    assert torch.isfinite(out).all()
    assert numel == 0 or (out - wanted).abs().max().item() <= bound * largest + LEAST.get(name, 0.0)
    if bound == 0:
        assert torch.equal(bits(out), bits(wanted))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", SIZES)
def test_a_wire_is_as_long_as_was_said_before(name: str, numel: int) -> None:
    codec = codec_for(name, numel)
    most = codec.max_wire_nbytes(numel)
    guarded = torch.full((most + WIRE_ALIGNMENT,), 0x5A, dtype=torch.uint8)
    used = codec.encode(gradients(numel), guarded[:most])
    assert used % WIRE_ALIGNMENT == 0
    assert used == most if codec.fixed else used == used_nbytes(guarded) <= most
    assert (guarded[most:] == 0x5A).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_gradients_give_the_same_bits(name: str) -> None:
    numel = 70_000
    wires, residuals = [], []
    for fill in (0, 0xFF):
        codec, residual = codec_for(name, numel), gradients(numel, seed=7)
        wire = wire_for(codec, numel, fill)
        codec.encode(gradients(numel, seed=9), wire_for(codec, numel))  # old scratch must not matter
        used = codec.encode(gradients(numel), wire, residual)
        out = torch.empty(numel)
        codec.decode(wire[:used], out)
        wires.append(out)
        residuals.append(residual)
    assert torch.equal(*wires)
    assert torch.equal(*residuals)


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_is_the_fp32_sum_of_what_each_rank_sent_in_rank_order(name: str) -> None:
    numel, ranks = 66_000, 5
    codec = codec_for(name, numel)
    chunks = [gradients(numel, seed=rank) for rank in range(ranks)]
    wires = [wire_for(codec, numel) for _ in chunks]
    for chunk, wire in zip(chunks, wires, strict=True):
        codec.encode(chunk, wire)
    total = through(codec, chunks[0])
    for chunk in chunks[1:]:
        total += through(codec, chunk)
    out = torch.empty(numel)
    codec.reduce(wires, out, scale=1 / ranks)
    assert torch.equal(out, total * (1 / ranks))


@pytest.mark.parametrize("name", ["lossless", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lossless_mean_has_the_very_bits_of_the_engine_without_a_codec(
    name: str, dtype: torch.dtype
) -> None:
    codec = make_codec(name, dtype)
    chunks = [gradients(70_000, seed=rank).to(dtype) for rank in range(3)]
    for chunk in chunks:
        chunk[:100] = -0.0
    wires = [wire_for(codec, 70_000) for _ in chunks]
    for chunk, wire in zip(chunks, wires, strict=True):
        codec.encode(chunk, wire)
    wanted, out = torch.empty(70_000, dtype=dtype), torch.empty(70_000, dtype=dtype)
    average(chunks, out=wanted)
    codec.reduce(wires, out, scale=1 / 3)
    assert torch.equal(bits(out), bits(wanted))


@pytest.mark.parametrize("name", NAMES)
def test_the_own_part_of_a_sum_may_be_the_result_itself_and_stays_exact(name: str) -> None:
    numel = 66_000
    codec = codec_for(name, numel)
    own, other = gradients(numel, seed=1), gradients(numel, seed=2)
    wire = wire_for(codec, numel)
    codec.encode(other, wire)
    out = own.clone()
    codec.reduce([out, wire], out)
    assert torch.equal(out, expected(name, own) + through(codec, other))


@pytest.mark.parametrize("name", NAMES)
@given(steps=st.integers(1, 6), numel=st.integers(1, 9000), seed=st.integers(0, 2**31))
@settings(max_examples=15)
def test_what_was_sent_and_what_is_owed_make_up_all_gradients(
    name: str, steps: int, numel: int, seed: int
) -> None:
    codec = codec_for(name, numel)
    residual, sent, given_ = torch.zeros(numel), torch.zeros(numel).double(), torch.zeros(numel).double()
    for step in range(steps):
        chunk = gradients(numel, seed=seed + step)
        sent += through(codec, chunk, residual)
        given_ += expected(name, chunk)
    assert torch.allclose(
        sent + residual, given_, rtol=0, atol=steps * 1e-6 * given_.abs().max().item() + 1e-12
    )


@pytest.mark.parametrize("name", NAMES)
def test_error_feedback_owes_no_more_after_many_steps_than_after_a_few(name: str) -> None:
    numel = 4096
    codec, residual = codec_for(name, numel), torch.zeros(numel)
    generator = torch.Generator().manual_seed(0)
    mean = 0.1 * torch.randn(numel, generator=generator)
    owed = []
    for _ in range(400):
        through(codec, mean + torch.randn(numel, generator=generator), residual)
        owed.append(residual.norm().item())
    assert max(owed[300:]) <= 1.05 * max(owed[:300])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2001, 69_999])
def test_what_is_not_finite_arrives_so_and_spoils_no_residual(name: str, value: float, place: int) -> None:
    numel = 70_000
    codec, chunk = codec_for(name, numel), gradients(numel)
    residual = torch.full((numel,), 1e-3)
    chunk[place] = value
    out = through(codec, chunk, residual)
    assert not math.isfinite(out[place].item()) or expected(name, chunk)[place] == 0
    assert torch.isfinite(residual).all()
    assert residual[place] == torch.tensor(1e-3)
    total = torch.empty(numel)
    wire = wire_for(codec, numel)
    codec.encode(chunk, wire, residual)
    codec.reduce([gradients(numel), wire], total)
    assert math.isfinite(total[place].item()) == math.isfinite(out[place].item())
    # The next step, without it, is as good as if there had never been any.
    assert torch.isfinite(through(codec, gradients(numel), residual)).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_that_is_not_finite_anywhere_arrives_so(name: str) -> None:
    codec, residual = codec_for(name, 5000), torch.zeros(5000)
    out = through(codec, torch.full((5000,), math.inf), residual)
    assert (~torch.isfinite(out)).sum() >= 0.009 * 5000
    assert torch.equal(residual, torch.zeros(5000))


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_and_its_residual_may_begin_anywhere_in_their_buffers(name: str) -> None:
    codec = codec_for(name, 5000)
    chunk, residual = gradients(5000), gradients(5000, seed=1)
    buffer, owed, into = torch.zeros(5003), torch.zeros(5001), torch.zeros(5005)
    buffer[3:], owed[1:] = chunk, residual
    wire = wire_for(codec, 5000)
    used = codec.encode(buffer[3:], wire, owed[1:])
    codec.decode(wire[:used], into[5:])
    assert torch.equal(into[5:], through(codec, chunk, residual))
    assert torch.equal(owed[1:], residual)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_arrive_as_zeros(name: str) -> None:
    codec, residual = codec_for(name, 5000), torch.zeros(5000)
    assert torch.equal(through(codec, torch.zeros(5000), residual), torch.zeros(5000))
    assert torch.equal(residual, torch.zeros(5000))


@pytest.mark.parametrize("name", NAMES)
def test_denormals_stay_tiny_and_finite(name: str) -> None:
    codec, residual = codec_for(name, 5000), torch.zeros(5000)
    chunk = torch.full((5000,), 1e-42)
    out = through(codec, chunk, residual)
    assert torch.isfinite(out).all()
    assert torch.isfinite(residual).all()
    assert out.abs().max() <= 1.1e-38


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_finite_values_never_arrive_as_other_finite_ones_of_another_size(name: str) -> None:
    codec = codec_for(name, 300)
    chunk = torch.full((300,), 3e38)
    out = through(codec, chunk)
    sent = out[(out != 0) & torch.isfinite(out)]
    assert torch.allclose(sent, torch.full_like(sent, 3e38), rtol=0.01)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda chunk, wire, residual: (chunk.repeat(2)[::2], wire, residual),
        lambda chunk, wire, residual: (chunk.view(2, -1), wire, residual),
        lambda chunk, wire, residual: (chunk.int(), wire, residual),
        lambda chunk, wire, residual: (chunk, wire[:-WIRE_ALIGNMENT], residual),
        lambda chunk, wire, residual: (chunk, wire.repeat(2)[::2], residual),
        lambda chunk, wire, residual: (chunk, wire.char(), residual),
        lambda chunk, wire, residual: (chunk, wire.repeat(2)[4:], residual),
        lambda chunk, wire, residual: (chunk, wire, residual[:-1]),
        lambda chunk, wire, residual: (chunk, wire, residual.double()),
        lambda chunk, wire, residual: (chunk, wire, residual.repeat(2)[::2]),
    ],
)
def test_tensors_that_cannot_be_meant_are_refused_before_anything_is_written(
    name: str, spoil: Callable[..., tuple[torch.Tensor, ...]]
) -> None:
    codec = codec_for(name, 512)
    chunk, wire, residual = gradients(512), wire_for(codec, 512), torch.ones(512)
    before = wire.clone()
    with pytest.raises(EngineError):
        codec.encode(*spoil(chunk, wire, residual))
    assert torch.equal(wire, before)
    assert torch.equal(residual, torch.ones(512))


@pytest.mark.parametrize("name", [n for n in NAMES if "masked" not in n])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_travel_too(name: str, dtype: torch.dtype) -> None:
    codec = make_codec(name, dtype)
    chunk = gradients(5000).to(dtype)
    out = through(codec, chunk)
    assert out.dtype == dtype
    if codec.lossless:
        assert torch.equal(bits(out), bits(chunk))
    elif name in ERRORS:
        bound = max(ERRORS[name], torch.finfo(dtype).eps, 2**-23)
        assert (out - chunk).abs().max().item() <= bound * chunk.abs().max().item() + LEAST.get(name, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_of_no_rank_or_of_another_size_is_refused(name: str) -> None:
    codec = codec_for(name, 512)
    wire = wire_for(codec, 512)
    used = codec.encode(gradients(512), wire)
    for parts in ([], [wire[: used - WIRE_ALIGNMENT]], [wire, torch.zeros(511)]):
        with pytest.raises(EngineError):
            codec.reduce(parts, torch.empty(512))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=40)
def test_damaged_bytes_give_an_error_or_values_but_never_a_crash(name: str, data: st.DataObject) -> None:
    codec = codec_for(name, 700)
    wire, out = wire_for(codec, 700), torch.empty(700)
    codec.encode(gradients(700), wire)
    place = data.draw(st.integers(0, len(wire) - 1))
    wire[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(EngineError):
        codec.decode(wire, out)


def test_a_user_who_mistypes_a_codec_is_told_the_names() -> None:
    for name in ("int4", "topk:", "topk:x", "topk:0", "topk:nan", "int8:3", ""):
        with pytest.raises(EngineError):
            make_codec(name)
