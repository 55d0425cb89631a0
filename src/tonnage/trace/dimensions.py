"""Which parallel dimension a process group is, and how that is known.

In this order: what the caller says; what the job calls the group ("DATA_PARALLEL_GROUP", "mesh_dp");
what lies in it (neighbouring ranks exchange activations, ranks far apart gradients or stages); what it is
used for. A guess is called one, by its basis.

Source: names of Megatron-LM's ``parallel_state`` and of PyTorch's ``DeviceMesh``; the usual order of
ranks, tensor parallel innermost and pipeline outermost (Narayanan et al., 2104.04473, section 3).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tonnage.trace.events import Group
from tonnage.trace.replay_job import Job
from tonnage.trace.transfers import Transfer

DimensionBasis = Literal["given", "name", "ranks", "use", "unknown"]

DIMENSIONS = ("dp", "tp", "pp", "cp", "ep", "sp")

_NAMES = (
    ("dp", re.compile(r"expert.*data|data.*parallel|fsdp|shard|replicat|hsdp", re.I)),
    ("ep", re.compile(r"expert", re.I)),
    ("cp", re.compile(r"context", re.I)),
    ("pp", re.compile(r"pipe|stage", re.I)),
    ("tp", re.compile(r"tensor|model_parallel", re.I)),
    *((each, re.compile(rf"(?<![a-z]){each}(?![a-z])", re.I)) for each in DIMENSIONS),
)
_GRADIENTS = frozenset(("all-reduce", "reduce-scatter", "all-gather", "broadcast", "barrier", "reduce"))

Key = tuple[str, int]
"""A group's name and size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """What a group is: a word of ``DIMENSIONS``, "world" or "unknown", and how that is known."""

    name: str
    basis: DimensionBasis


def dimensions(job: Job, given: Mapping[str, str] | None = None) -> dict[Key, Dimension]:
    """The dimension of each group that some transfer ran in.

    Args:
        job: the trace, ready for replays.
        given: dimension by a group's name or description; stands above every guess.
    """
    used: dict[Key, set[str]] = {}
    for each in job.transfers:
        used.setdefault((each.group, each.group_size), set()).add(each.op)
    declared = declared_groups(job)
    return {key: _dimension(key, ops, declared.get(key), job, given or {}) for key, ops in used.items()}


def declared_groups(job: Job) -> dict[Key, Group]:
    """The groups that the ranks' files declare, by name and size; the fullest declaration of each."""
    found: dict[Key, Group] = {}
    for work in job.works:
        for group in work.groups:
            key = (group.name, group.size or len(group.ranks))
            if key not in found or len(group.ranks) > len(found[key].ranks):
                found[key] = group
    return found


def kind_of(transfer: Transfer, dimension: str) -> str:
    """What a transfer moves, a word of the ledger's ``KINDS``, as its dimension and op suggest."""
    if transfer.op in ("barrier", "wait"):
        return "control"
    if dimension in ("tp", "pp", "cp", "ep", "sp"):
        return "activation"
    if dimension != "dp":
        return "unknown"
    usual = {"all-gather": "parameter", "broadcast": "buffer"}
    return usual.get(transfer.op, "gradient" if transfer.op in _GRADIENTS else "unknown")


def _dimension(key: Key, ops: set[str], group: Group | None, job: Job, given: Mapping[str, str]) -> Dimension:
    name, size = key
    words = group.description if group else ""
    for said in (name, words):
        if said and said in given:
            return Dimension(name=given[said], basis="given")
    for dimension, pattern in _NAMES:
        if pattern.search(words) or (not name.isdigit() and pattern.search(name)):
            return Dimension(name=dimension, basis="name")
    if group is not None and 1 < len(group.ranks) == size < _world(job):
        return Dimension(name=_by_ranks(group.ranks, ops, _world(job)), basis="ranks")
    return _by_use(ops, size, _world(job))


def _world(job: Job) -> int:
    return max([len(job.ranks), *(work.world_size for work in job.works)])


def _by_ranks(ranks: tuple[int, ...], ops: set[str], world: int) -> str:
    stride = min(b - a for a, b in zip(sorted(ranks), sorted(ranks)[1:], strict=False))
    if ops <= {"send", "recv"}:
        return "pp"
    if "all-to-all" in ops and not ops & {"all-reduce", "reduce-scatter"}:
        return "ep"
    # Neighbours share a host, and what they exchange is what needs the fastest links.
    return "tp" if stride == 1 and len(ranks) < world else "dp"


def _by_use(ops: set[str], size: int, world: int) -> Dimension:
    if ops <= {"send", "recv"}:
        return Dimension(name="pp", basis="use")
    if size == world and ops <= _GRADIENTS | {"wait"} and ops & {"all-reduce", "reduce-scatter"}:
        return Dimension(name="dp", basis="use")
    if size == world:
        return Dimension(name="world", basis="use")
    return Dimension(name="unknown", basis="unknown")
