"""What a trace holds, as columns: one value a rank, whatever program wrote the file.

A rank's events are arrays of equal length, by start. Times are whole nanoseconds on the rank's own
clock; -1 stands for a number that the file doesn't give (a stream, a correlation). Texts are numbers
into the tables ``names``, ``categories`` and ``threads``, so that a question about a name is asked
once a name and not once an event::

    is_gemm = events.where_name(lambda name: "gemm" in name)   # a bool an event
    seconds = events.duration[is_gemm].sum() / 1e9

``details`` keeps the arguments of the few events that speak of a collective, by event number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]

NANOSECOND = 1e-9
"""Seconds in the unit of every time here."""

RankBasis = Literal["file", "name", "order", "argument"]
"""Where a rank's number comes from: written in the file, its name, the order of the files, the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """One rank's events; every array has one entry an event, ascending by ``start``.

    Attributes:
        start: nanoseconds on the rank's clock.
        duration: nanoseconds, 0 or more.
        name: index into ``names``.
        category: index into ``categories`` (lower case, as "kernel", "cuda_runtime", "cpu_op").
        thread: index into ``threads``: who ran it.
        device: number of the device that ran it, -1 on the host.
        stream: device stream, -1 on the host.
        correlation: joins a device event with the host call that launched it; -1 for none.
        external: "External id": joins both with the operator around them; -1 for none.
        nbytes: bytes that a copy or fill moved, as the file says; -1 for none.
        names: text of each name.
        categories: text of each category.
        threads: process and thread of each, as text.
        thread_names: what the file calls a thread, by index into ``threads``.
        details: arguments of the events that speak of a collective, by event number.
    """

    start: Int64s
    duration: Int64s
    name: Int32s
    category: Int32s
    thread: Int32s
    device: Int32s
    stream: Int64s
    correlation: Int64s
    external: Int64s
    nbytes: Int64s
    names: tuple[str, ...]
    categories: tuple[str, ...]
    threads: tuple[tuple[str, str], ...]
    thread_names: Mapping[int, str] = field(default_factory=dict)
    details: Mapping[int, Mapping[str, object]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def stop(self) -> Int64s:
        """Nanoseconds at which each event ended."""
        return self.start + self.duration

    def where_name(self, wanted: Callable[[str], bool]) -> Bools:
        """Whether each event has a name that is ``wanted``; asked once for each different name."""
        return _mask(self.names, self.name, wanted)

    def where_category(self, wanted: Callable[[str], bool]) -> Bools:
        """Whether each event has a category that is ``wanted``."""
        return _mask(self.categories, self.category, wanted)

    def name_of(self, event: int) -> str:
        """The event's name."""
        return self.names[int(self.name[event])]

    def select(self, keep: Bools) -> Events:
        """The events where ``keep``; event numbers in ``details`` follow."""
        number = np.cumsum(keep) - 1
        columns = {name: getattr(self, name)[keep] for name in COLUMNS}
        details = {int(number[i]): each for i, each in self.details.items() if keep[i]}
        return replace(self, **columns, details=details)


COLUMNS = (
    "start",
    "duration",
    "name",
    "category",
    "thread",
    "device",
    "stream",
    "correlation",
    "external",
    "nbytes",
)
"""The arrays of :class:`Events`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as the file declares it.

    Attributes:
        name: the file's short name ("0", "12").
        description: what the job calls it ("default_pg", "mesh_dp"); may be empty.
        ranks: its global ranks; empty if unknown or cut short by the profiler.
        size: how many take part; 0 if unknown.
    """

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step as the rank saw it: its number, and nanoseconds of start and stop on the host."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a file did not give.

    Attributes:
        what: one line ("3 events have no duration", "the file ends in the middle of an event").
        num_events: how many events are missing for it; -1 if that can't be known.
        where: byte offset in the unpacked text, or the time at which the trace stops.
    """

    what: str
    num_events: int = -1
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank recorded.

    Attributes:
        rank: its global rank.
        world_size: ranks of the job, 0 if the file doesn't say.
        events: what happened.
        groups: the process groups that the file declares.
        steps: its training steps, by start; empty if none are marked.
        losses: what could not be read; empty for a whole file.
        source: the file, for messages.
        rank_basis: where ``rank`` comes from.
        backend: the communication backend as written ("nccl", "cpu:gloo"), or empty.
        device_name: the accelerator as written, or empty.
        skipped: how many events of each kind were left out because no figure here needs them
            (flow arrows, counters, instants, names).
    """

    rank: int
    world_size: int
    events: Events
    groups: tuple[Group, ...] = ()
    steps: tuple[Step, ...] = ()
    losses: tuple[Loss, ...] = ()
    source: str = ""
    rank_basis: RankBasis = "file"
    backend: str = ""
    device_name: str = ""
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The ranks of one job that were read, by rank.

    Attributes:
        ranks: one value a rank.
        notes: lines that a reader should see: where ranks come from, what was lost.
    """

    ranks: tuple[RankTrace, ...]
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the job: as the files say, else as many as were read."""
        return max([len(self.ranks), *(each.world_size for each in self.ranks)])


BytesBasis = Literal["metadata", "dims", "ledger", "none", "unknown"]
"""Where a collective's bytes come from.

``metadata``: the counts and type that the profiler wrote on it. ``dims``: the shapes on the
annotation around it. ``ledger``: a recorded ledger. ``none``: it moves nothing (a barrier, a group of
one). ``unknown``: the file doesn't tell, and no figure is given.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """One rank's collectives, by start; every array has one entry a collective.

    Attributes:
        event: number of the event in the rank's ``events``.
        start: nanoseconds on the rank's clock.
        stop: nanoseconds on the rank's clock.
        op: words of the ledger's ``OPS`` ("all-reduce"), or "wait" where the file doesn't tell.
        nbytes: payload as the ledger defines it; -1 if unknown.
        basis: where ``nbytes`` comes from.
        group: name of the process group, "" if unknown.
        group_size: ranks that take part; 0 if unknown.
        seq: the group's own count of its collectives; -1 if the file doesn't give it.
        dtype: element type as written, "" if unknown.
        step: number of the training step it ran in, -1 outside.
        label: the name under which a person finds it.
    """

    event: Int64s
    start: Int64s
    stop: Int64s
    op: tuple[str, ...]
    nbytes: Int64s
    basis: tuple[BytesBasis, ...]
    group: tuple[str, ...]
    group_size: Int64s
    seq: Int64s
    dtype: tuple[str, ...]
    step: Int64s
    label: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.start)


def _mask(texts: tuple[str, ...], index: Int32s, wanted: Callable[[str], bool]) -> Bools:
    flags = np.fromiter((wanted(each) for each in texts), np.bool_, len(texts))
    return flags[index] if len(texts) else np.zeros(len(index), np.bool_)
