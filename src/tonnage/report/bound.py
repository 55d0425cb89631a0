"""How low a step could go, and what stands between it and that.

The bound of a step is the larger of two terms, since neither can be had for less:

    bound = max(compute_time, wire / rate)

with ``compute_time`` the seconds of a step without communication, ``wire`` the bytes that the busiest
rank sends in a step, and ``rate`` the bytes per second that it can send. What a step takes beyond its
bound is its *gap*, in three parts (``standing`` still, ``slowed`` compute, ``rest``):

    step = compute + exposed + rest
    gap  = (compute - compute_time) + (exposed - unavoidable) + rest,
    unavoidable = max(0, wire / rate - compute_time)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Least seconds of a step: each term where its facts are known, one at least."""

    compute: float | None
    link: float | None

    @property
    def seconds(self) -> float:
        """The larger term."""
        return max(self.compute or 0.0, self.link or 0.0)

    @property
    def by_link(self) -> bool:
        """Whether the link's term is the larger."""
        return (self.link or 0.0) > (self.compute or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Seconds of a step beyond its bound, and what they consist of; ``None`` where not measured."""

    seconds: float
    standing: float
    slowed: float | None
    rest: float


def find_bound(*, compute_time: float | None, link_rate: float | None, wire_nbytes: float) -> Bound | None:
    """The bound of a step in which the busiest rank sends ``wire_nbytes``; ``None`` without any term."""
    link = wire_nbytes / link_rate if link_rate and wire_nbytes else None
    if link is None and compute_time is None:
        return None
    return Bound(compute=compute_time, link=link)


def find_gap(bound: Bound, *, step: float, compute: float, exposed: float) -> Gap:
    """What a step takes beyond its bound; ``compute`` and ``exposed`` are its mean seconds on a rank.

    ``compute`` is zero where the ledger has no compute rows; its part then lies in the rest.
    """
    unavoidable = max(0.0, (bound.link or 0.0) - bound.compute) if bound.compute is not None else 0.0
    standing = exposed - unavoidable
    slowed = compute - bound.compute if compute and bound.compute is not None else None
    beyond = step - bound.seconds
    return Gap(seconds=beyond, standing=standing, slowed=slowed, rest=beyond - standing - (slowed or 0.0))
