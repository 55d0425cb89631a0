r"""Does compression pay, and which? Predicted from the link, the codecs' speeds and the computation.

Letters: ``n`` ranks, ``S`` bytes of gradients, ``k`` buckets, ``α`` and ``β`` seconds a message and a byte
on the link, ``C`` seconds of computation a step, ``ρ`` a codec's ratio, ``e`` and ``d`` the bytes of
gradients that it encodes and decodes in a second. With ``T = (n-1)/n S``, what each rank sends in the
reduce-scatter, and again in the all-gather::

    wire = 2 k (n-1) α + β T (1/ρ + 1)       gradients compressed, parameters as they are
    wire = 2 k (n-1) α + β T 2/ρ             both compressed
    work = T (1/e + 1/d)                     and as much again, about, if both are compressed
    step = max(C + busy work, wire, work) + (wire + work) / k

``busy`` is the share of the codec's work that computation loses: 1 where both run on the same cores, 0
where a card computes and spare cores compress. The last term is the bucket that ends last: nothing is
left to hide it under.

A codec *hides* if ``wire`` and ``work`` both fit under ``C``, the last bucket aside. Then fewer bytes gain
next to nothing more, and of the codecs that hide the least lossy is best. In a data centre the
gradients hide as they are, and the answer is ``none``: of more than 200 setups that Agarwal et al.
measured, compression made 6 faster.

Source: Agarwal et al., "On the Utility of Gradient Compression in Distributed Training Systems", MLSys
2022, arXiv 2103.00543, for the question and the form of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tonnage.engine.compress.codec import Codec
from tonnage.errors import EngineError
from tonnage.units import format_time

LEAST_GAIN = 0.05
"""What compression must gain of the step, as predicted, before it is used: predictions are not better."""

AUTO_CODECS = ("lossless", "bf16", "int8")
"""What ``compress="auto"`` chooses from. Whoever wants top-k, signs or PowerSGD asks for it by name: how
far training suffers from them can't be seen from any speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpeed:
    """What a codec does to gradients, as measured.

    Attributes:
        name: the codec.
        ratio: bytes of gradients over bytes on the wire.
        encode: bytes of gradients a second, error feedback included.
        decode: bytes of gradients a second, adding up included.
        error: 2-norm of what one step loses over the 2-norm of the gradients; 0 if lossless.
    """

    name: str
    ratio: float
    encode: float
    decode: float
    error: float

    def __post_init__(self) -> None:
        if not (self.ratio > 0 and self.encode > 0 and self.decode > 0 and self.error >= 0):
            raise EngineError(f"a codec can't have these speeds: {self}")


NO_CODEC = CodecSpeed(name="none", ratio=1.0, encode=math.inf, decode=math.inf, error=0.0)
"""Gradients as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One training step's exchange.

    Attributes:
        nbytes: gradients of a rank.
        num_ranks: how many take part.
        num_buckets: into how many the gradients are cut.
        latency: seconds a message.
        bandwidth: bytes a second that a rank can send while it receives as many.
        compute: seconds of computation a step, backward and forward.
        busy: share of a codec's work that computation loses, 0 to 1.
        both_legs: whether what comes back is compressed too.
    """

    nbytes: int
    num_ranks: int
    num_buckets: int
    latency: float
    bandwidth: float
    compute: float
    busy: float = 1.0
    both_legs: bool = False

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.num_ranks < 1 or self.num_buckets < 1 or not 0 <= self.busy <= 1:
            raise EngineError(f"no step exchanges gradients like this: {self}")
        if not (self.bandwidth > 0 and 0 <= self.latency < math.inf and 0 <= self.compute < math.inf):
            raise EngineError(f"no link or computation is like this: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step would take with one codec.

    Attributes:
        name: the codec.
        step: seconds of the whole step.
        wire: seconds that the link is busy.
        work: seconds of encoding and decoding.
        hides: whether both fit under the computation.
        error: as :attr:`CodecSpeed.error`.
    """

    name: str
    step: float
    wire: float
    work: float
    hides: bool
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The codec to use (``none``: gradients as they are), why, and what was compared."""

    name: str
    reason: str
    predictions: tuple[Prediction, ...]


def choose(exchange: Exchange, codecs: Iterable[CodecSpeed]) -> Choice:
    """The least lossy codec that hides; if none does, the one with the shortest step; or ``none``.

    A codec must shorten the step by :data:`LEAST_GAIN` of it, whatever else speaks for it.

    Args:
        exchange: what is exchanged over what.
        codecs: what there is to choose from, as measured.
    """
    plain = predict_step(exchange, NO_CODEC)
    others = [predict_step(exchange, codec) for codec in codecs]
    everything = (plain, *others)
    # The second condition is for a step of no length, of which any share is none.
    paying = [p for p in others if p.step <= (1 - LEAST_GAIN) * plain.step and p.step < plain.step]
    hiding = [p for p in paying if p.hides]
    if not paying:
        return Choice(name="none", reason=_why_none(exchange, plain, others), predictions=everything)
    if hiding:
        best = min(hiding, key=lambda p: (p.error, p.step))
        why = (
            f"{best.name} is the least lossy that hides under {format_time(exchange.compute)} of computation"
        )
    else:
        best = min(paying, key=lambda p: (p.step, p.error))
        why = f"nothing hides under {format_time(exchange.compute)} of computation; {best.name} hides most"
    gain = f"a step is predicted to take {format_time(best.step)} and not {format_time(plain.step)}"
    return Choice(name=best.name, reason=f"{why}: {gain}", predictions=everything)


def predict_step(exchange: Exchange, codec: CodecSpeed) -> Prediction:
    """What a step takes with this codec, by the formulas above."""
    n, k = exchange.num_ranks, exchange.num_buckets
    sent = (n - 1) / n * exchange.nbytes
    shares = 2 / codec.ratio if exchange.both_legs else 1 / codec.ratio + 1
    wire = 2 * k * (n - 1) * exchange.latency + shares * sent / exchange.bandwidth
    work = sent * (1 / codec.encode + 1 / codec.decode)
    if exchange.both_legs:
        # Each encodes its own shard once for all, and decodes everybody's.
        work += exchange.nbytes / n / codec.encode + sent / codec.decode
    last = (wire + work) / k
    return Prediction(
        name=codec.name,
        step=max(exchange.compute + exchange.busy * work, wire, work) + last,
        wire=wire,
        work=work,
        hides=k > 1 and max(wire, work) <= exchange.compute,
        error=codec.error,
    )


def measure_codec(
    codec: Codec, sample: torch.Tensor, *, clock: Callable[[], float], repeats: int = 5
) -> CodecSpeed:
    """Speeds of a codec on this machine, on gradients as they are; the median of a few runs.

    Args:
        codec: measured with error feedback, if it is lossy.
        sample: flat gradients of the model's own, a few MB: ratios of the lossless depend on them.
        clock: seconds; on a GPU it must wait for what has been launched.
        repeats: odd.
    """
    numel = sample.numel()
    wire = torch.empty(codec.max_wire_nbytes(numel), dtype=torch.uint8, device=sample.device)
    residual = None if codec.lossless else torch.zeros(numel, dtype=torch.float32, device=sample.device)
    total = torch.zeros(numel, dtype=torch.float32, device=sample.device)
    used = codec.encode(sample, wire)
    codec.decode(wire[:used], total)
    size = torch.linalg.vector_norm(sample.float())
    lost = torch.linalg.vector_norm(sample.float() - total) / size if size > 0 else 0.0
    encode = _median(lambda: codec.encode(sample, wire, residual), clock, repeats)
    decode = _median(lambda: codec.reduce([total, wire], total, scale=0.5), clock, repeats)
    return CodecSpeed(
        name=codec.name,
        ratio=sample.nbytes / used,
        encode=sample.nbytes / encode,
        decode=sample.nbytes / decode,
        error=0.0 if codec.lossless else float(lost),
    )


def _why_none(exchange: Exchange, plain: Prediction, others: list[Prediction]) -> str:
    wire, compute = format_time(plain.wire), format_time(exchange.compute)
    if plain.hides:
        return f"{wire} on the wire hide under {compute} of computation as they are: fewer bytes gain nothing"
    if not others:
        return "there is no codec to choose from"
    best = min(others, key=lambda p: p.step)
    return (
        f"{wire} on the wire do not hide under {compute} of computation, but the best codec, {best.name}, would "
        f"take {format_time(best.step)} a step instead of {format_time(plain.step)}: "
        f"less than {LEAST_GAIN:.0%} gained"
    )


def _median(run: Callable[[], object], clock: Callable[[], float], repeats: int) -> float:
    run()
    taken = []
    for _ in range(repeats):
        start = clock()
        run()
        taken.append(clock() - start)
    # A clock may be too coarse for a small sample; no speed is infinite.
    return max(sorted(taken)[repeats // 2], 1e-9)
