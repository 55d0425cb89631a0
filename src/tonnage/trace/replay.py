r"""The run as it would have been: changes the graph of all ranks and solves it again.

A *change* is written as ``key=value``, and several with commas between them are made one after the other:

=================== ===============================================================================
``nic=2x``          links twice as fast: the part of a transfer's time that grows with its bytes
``compress=bf16``   the same for payloads of a wider floating-point type
``bucket=25MB``     consecutive all-reduces or reduce-scatters of a step joined; larger ones cut
``fuse=yes``        small ones (up to 1 MiB) joined
``straggler=none``  ranks that lose 3 % of the run come at the others' pace; ``=7``: rank 7 does
``slow=none``       no transfer takes longer than the median of those of its kind and size
``early=yes``       a transfer begins once its input is there, however late the host asked for it
``overlap=full``    nothing waits for a transfer before the step ends (a bound, and no promise)
``sync=none``       the host waits for no device
=================== ===============================================================================

A step's time is that from the first rank's first moment to the last rank's last, over the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tonnage.errors import UsageError
from tonnage.trace.events import NANOSECOND
from tonnage.trace.graph import Graph, solve
from tonnage.trace.replay_changes import (
    Changed,
    bucketed,
    compressed,
    early,
    faster_links,
    no_straggler,
    overlapped,
    small_fused,
    unsynced,
    usual_transfers,
)
from tonnage.trace.replay_job import Job, span
from tonnage.units import parse_size

_WIRE = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}

_Change = Callable[[Job, Graph], Changed]

_PLAIN: dict[tuple[str, str], _Change] = {
    ("fuse", "yes"): small_fused,
    ("fuse", ""): small_fused,
    ("straggler", "none"): no_straggler,
    ("slow", "none"): usual_transfers,
    ("early", "yes"): early,
    ("overlap", "full"): overlapped,
    ("sync", "none"): unsynced,
}
_KNOWN = (
    "use nic=2x, compress=bf16, bucket=25MB, fuse=yes, straggler=none, slow=none, early=yes, "
    "overlap=full or sync=none"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a replay gives.

    Attributes:
        change: as it was asked for; empty for the run as it was.
        step: seconds of a step, mean.
        saved: seconds of a step less than measured; negative where it takes longer.
        touched: transfers, calls or ranks that were changed; 0 where there was nothing to change.
        note: what limits the figure; may be empty.
    """

    change: str
    step: float
    saved: float
    touched: int
    note: str = ""


def replay(job: Job, change: str = "") -> Outcome:
    """The run with this change; unchanged without one.

    Raises:
        UsageError: there is no such change.
    """
    changed, notes = Changed(graph=job.graph, touched=0), []
    for part in _parts(change):
        now = _change(part, job.ranks)(job, changed.graph)
        changed = Changed(graph=now.graph, touched=changed.touched + now.touched)
        notes.append(now.note)
    before, after = span(job.graph, job.graph.at), span(changed.graph, solve(changed.graph))
    return Outcome(
        change=change,
        step=after * NANOSECOND / job.num_steps,
        saved=(before - after) * NANOSECOND / job.num_steps,
        touched=changed.touched,
        note="; ".join(note for note in notes if note),
    )


def check_change(change: str) -> None:
    """Refuse what :func:`replay` would refuse of any trace.

    Raises:
        UsageError: there is no such change.
    """
    if not _parts(change):
        raise UsageError("an empty change", where="--what-if", hint=_KNOWN)
    for part in _parts(change):
        _change(part, None)


def _parts(change: str) -> list[str]:
    return [each.strip() for each in change.split(",") if each.strip()]


def _change(text: str, ranks: Sequence[int] | None) -> _Change:
    key, _, value = (each.strip().lower() for each in text.partition("="))
    if key == "nic":
        factor = _factor(text, value)
        return lambda job, graph: faster_links(job, graph, factor)
    if key == "compress" and value in _WIRE:
        return lambda job, graph: compressed(job, graph, _WIRE[value])
    if key == "bucket":
        size = parse_size(text.partition("=")[2].strip())
        if size < 1:
            raise UsageError(f"a bucket of {value}", where="--what-if", hint="name a size, as bucket=25MB")
        return lambda job, graph: bucketed(job, graph, size)
    if key == "straggler" and value.isdecimal():
        if ranks is not None and int(value) not in ranks:
            raise UsageError(f"rank {value} is not in the trace", where="--what-if", hint="name one that is")
        return lambda job, graph: no_straggler(job, graph, int(value))
    if (key, value) not in _PLAIN:
        raise UsageError(f"no such change: {text!r}", where="--what-if", hint=_KNOWN)
    return _PLAIN[key, value]


def _factor(text: str, value: str) -> float:
    try:
        factor = float(value.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor <= 1e6:
        raise UsageError(f"no factor: {text!r}", where="--what-if", hint="write nic=2x for twice as fast")
    return factor
