"""The same run, changed in one or several points.

A change is text such as ``nic=100`` (Gbit/s a card), ``compress=int8`` or ``tp=4,pp=8``. Data
parallelism takes up what other degrees leave free, and the global batch stays.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tonnage.errors import LayoutError, UsageError
from tonnage.plan.cluster import Cluster, device_cluster
from tonnage.plan.layout import Batch, Layout, nearest_divisor
from tonnage.plan.model import Model
from tonnage.units import parse_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is predicted: model, cluster, layout and batch under one name."""

    name: str
    model: Model
    cluster: Cluster
    layout: Layout
    batch: Batch


def change(base: Scenario, text: str) -> Scenario:
    """The scenario with the changes in ``text``, which becomes its name.

    Raises:
        UsageError: a change that has no meaning; the nearest is named.
        LayoutError: the changed parts don't fit each other.
    """
    cluster, layout, batch = base.cluster, base.layout, base.batch
    degrees: dict[str, int] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not value:
            raise UsageError(f"{part!r} is no change", hint="write it like nic=100 or compress=int8")
        key = key.replace("-", "_")
        if key in _DEGREES:
            degrees[key] = _whole(key, value)
        elif key in _LAYOUT:
            layout = layout.replace(**{key: _LAYOUT[key](value)})
        elif key in _RECIPE:
            layout = layout.replace(recipe=dataclasses.replace(layout.recipe, **{key: _RECIPE[key](value)}))
        elif key in _BATCH:
            batch = dataclasses.replace(batch, **{_BATCH[key]: _whole(key, value)})
        elif key in _CLUSTER:
            cluster = _CLUSTER[key](cluster, value)
        else:
            known = [*_DEGREES, *_LAYOUT, *_RECIPE, *_BATCH, *_CLUSTER]
            near = difflib.get_close_matches(key, known, n=2)
            raise UsageError(
                f"nothing is called {key!r}",
                hint=f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}",
            )
    return Scenario(
        name=text, model=base.model, cluster=cluster, layout=_fill(layout, cluster, degrees), batch=batch
    )


def _fill(layout: Layout, cluster: Cluster, degrees: dict[str, int]) -> Layout:
    """The layout with other degrees; data parallelism takes the ranks that are left."""
    if not degrees and layout.num_ranks == cluster.num_devices:
        return layout
    wanted = {name: degrees.get(name, getattr(layout, name)) for name in ("tp", "pp", "cp")}
    used = wanted["tp"] * wanted["pp"] * wanted["cp"]
    if cluster.num_devices % used:
        raise LayoutError(
            f"tp x pp x cp = {used} does not divide {cluster.num_devices} cards",
            hint=f"use a product of {nearest_divisor(cluster.num_devices, used)}",
        )
    dp = degrees.get("dp", cluster.num_devices // used)
    ep = degrees.get("ep", layout.ep)
    shard = layout.shard if layout.shard and (dp * wanted["cp"]) % layout.shard == 0 else 0
    changes: dict[str, Any] = {**wanted, "dp": dp, "ep": ep, "shard": shard}
    if wanted["pp"] == 1:
        changes["virtual"] = 1
    if wanted["tp"] == 1:
        changes["sp"] = False
    elif layout.tp == 1:
        changes["sp"] = True
    if (wanted["pp"], changes.get("virtual", layout.virtual)) != (layout.pp, layout.virtual):
        changes["stages"] = ()
    return layout.replace(**changes)


def _whole(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 10**15):
        raise UsageError(f"{key} is {value!r}", hint=f"write a whole number of 1 or more, like {key}=8")
    return int(value)


def _number(value: str) -> float:
    try:
        return float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError as error:
        raise UsageError(f"{value!r} is no number", hint="write a number, like 0.01 or 1%") from error


def _yes(value: str) -> bool:
    if value.lower() in ("yes", "on", "true", "1"):
        return True
    if value.lower() in ("no", "off", "false", "0"):
        return False
    raise UsageError(f"{value!r} is neither yes nor no", hint="write yes or no")


def nic_rate(text: str) -> float:
    """Bytes per second of ``100`` (Gbit/s), ``100gbit`` or ``12.5GB/s``."""
    return parse_rate(f"{text}gbit" if text.replace(".", "", 1).isdigit() else text)


def _device(cluster: Cluster, name: str) -> Cluster:
    return device_cluster(name, cluster.num_devices)


def _oversubscribed(cluster: Cluster, value: str) -> Cluster:
    return dataclasses.replace(cluster, oversubscription=_number(value), pod=cluster.pod or cluster.domain)


_DEGREES = ("dp", "tp", "pp", "cp", "ep")
_LAYOUT: dict[str, Callable[[str], Any]] = {
    "virtual": lambda v: _whole("virtual", v),
    "zero": lambda v: 0 if v == "0" else _whole("zero", v),
    "shard": lambda v: _whole("shard", v),
    "micro_batch": lambda v: _whole("micro_batch", v),
    "recompute": str,
    "recompute_share": _number,
    "sp": _yes,
}
_RECIPE: dict[str, Callable[[str], Any]] = {
    "precision": str,
    "attention": str,
    "optimizer": str,
    "compress": str,
    "keep": _number,
    "trainable": _number,
    "local_steps": lambda v: _whole("local_steps", v),
    "grad_nbytes": lambda v: _whole("grad_nbytes", v),
    "context": str,
    "graphs": str,
    "dispatch": str,
    "fused_experts": _yes,
    "low_attention": _yes,
    "blocking": _yes,
    "overlap_grad": _yes,
    "overlap_param": _yes,
    "overlap_tp": _yes,
    "overlap_p2p": _yes,
    "overlap_ep": _yes,
    "fused": _yes,
}
_BATCH = {"global_batch": "sequences", "seq": "seq"}
_CLUSTER: dict[str, Callable[[Cluster, str], Cluster]] = {
    "nic": lambda cluster, value: cluster.with_nic(nic_rate(value)),
    "card": _device,
    "cards": lambda cluster, value: cluster.with_devices(_whole("cards", value)),
    "oversubscription": _oversubscribed,
}
