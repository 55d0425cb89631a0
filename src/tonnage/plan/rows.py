"""The predicted ledger: one row a collective, rank and link level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tonnage.plan.cluster import Cluster
from tonnage.plan.collectives import Numbers, seconds, split
from tonnage.plan.grid import Grid, kinds, stage_layers
from tonnage.plan.layout import Layout
from tonnage.plan.model import Model
from tonnage.plan.overlap import Simulated
from tonnage.plan.steptime import send_time
from tonnage.plan.traffic import (
    FIRST,
    FULLEST,
    LAST,
    Flow,
    data_flows,
    layer_flows,
    pipeline_send_nbytes,
    pipeline_sends,
    vocab_flows,
)


def ledger_rows(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    grid: Grid,
    parts: dict[str, float],
    result: Simulated,
) -> list[dict[str, Any]]:
    """Rows of one rank of the first, the fullest and the last stage; of one rank without pipeline."""
    rows: list[dict[str, Any]] = []
    for stage, rank in _ranks(model, layout):
        moved = list(_stage_rows(model, cluster, layout, grid, stage, rank))
        _share_exposed(moved, parts)
        rows += moved
        rows += _still_rows(rank, parts, result)
    return rows


def _ranks(model: Model, layout: Layout) -> list[tuple[int, int]]:
    """The stages shown, with the number of the first rank of each."""
    each = layout.tp * layout.cp * layout.dp
    if layout.pp == 1:
        return [(FULLEST, 0)]
    ends = [(FIRST, 0), (LAST, (layout.pp - 1) * each)]
    if layout.pp == 2:
        return ends
    loads = stage_layers(layout, model).sum(axis=1)[1:-1]
    return [ends[0], (FULLEST, (1 + int(np.argmax(loads))) * each), ends[1]]


def stage_flows(model: Model, grid: Grid, cluster: Cluster, stage: int) -> list[tuple[Flow, float]]:
    """All collectives of a rank of a stage, with how often a step repeats them."""
    found: list[tuple[Flow, float]] = []
    m = float(grid.m[0])
    for i, (layer, _) in enumerate(kinds(model)):
        times = float(grid.counts[0, stage, i]) * m
        found += [(flow, times) for flow in layer_flows(layer, model, grid, cluster)]
    found += [(flow, m) for flow in vocab_flows(model, grid, cluster, stage)]
    found += [(flow, 1.0) for flow in data_flows(model, grid, cluster, stage)]
    return found


def _stage_rows(
    model: Model, cluster: Cluster, layout: Layout, grid: Grid, stage: int, rank: int
) -> Iterator[dict[str, Any]]:
    for flow, times in stage_flows(model, grid, cluster, stage):
        calls, size = _one(flow.calls) * times, int(_one(flow.to.size))
        nbytes = _one(flow.nbytes)
        if calls <= 0 or size <= 1 or nbytes <= 0:
            continue
        spent = _one(seconds(flow.op, flow.nbytes, flow.to, cluster)) * calls
        inside, outside = (_one(each) * calls for each in split(flow.op, flow.nbytes, flow.to))
        levels = [(cluster.scaleup_level, inside, flow.label)]
        if outside > 0:
            far = "spine" if bool(_one(flow.to.spine)) else "nic"
            levels = [(far, outside, flow.label)]
            if inside > 0:
                levels.append((cluster.scaleup_level, inside, f"{flow.label}, inside the host"))
        for i, (level, wire, label) in enumerate(levels):
            # Payload and calls count once; the second row holds what the same calls move inside.
            yield _row(
                rank,
                kind=flow.kind,
                op=flow.op,
                group=flow.group,
                group_size=size,
                link=level,
                calls=round(calls) if i == 0 else 0,
                nbytes=round(nbytes * calls) if i == 0 else 0,
                wire_nbytes=round(wire),
                seconds=spent if i == 0 else 0.0,
                label=label,
            )
    sends = _one(pipeline_sends(grid, stage))
    if sends:
        stride = layout.tp * layout.cp * layout.dp
        level = cluster.scaleup_level if stride < cluster.domain else "nic"
        nbytes = round(_one(pipeline_send_nbytes(model, grid)) * sends)
        yield _row(
            rank,
            kind="activation",
            op="send",
            group="pp",
            group_size=layout.pp,
            link="spine" if level == "nic" and 0 < cluster.pod <= stride else level,
            calls=round(sends),
            nbytes=nbytes,
            wire_nbytes=nbytes,
            seconds=_one(send_time(model, grid, cluster)) * sends,
            label="pipeline",
        )


def _row(rank: int, *, seconds: float, **rest: Any) -> dict[str, Any]:
    return {"rank": rank, "step": 0, "start": 0.0, "stop": seconds, **rest}


def _share_exposed(rows: list[dict[str, Any]], parts: dict[str, float]) -> None:
    """Give each group's exposed seconds to its rows in proportion to their own."""
    for group in ("tp", "cp", "ep", "dp", "pp"):
        own = [row for row in rows if row["group"] == group]
        total = sum(row["stop"] for row in own)
        for row in own:
            row["exposed"] = min(parts[group], total) * row["stop"] / total if total else 0.0


def _still_rows(rank: int, parts: dict[str, float], result: Simulated) -> list[dict[str, Any]]:
    common = {"rank": rank, "step": 0, "start": 0.0}
    return [
        {**common, "kind": "step", "op": "step", "stop": result.seconds, "label": "predicted step"},
        {**common, "kind": "compute", "op": "kernel", "stop": parts["compute"], "label": "layers"},
        {
            **common,
            "kind": "compute",
            "op": "optimizer",
            "start": parts["compute"],
            "stop": parts["compute"] + parts["optimizer"],
            "label": "optimizer",
        },
    ]


def _one(value: Numbers) -> float:
    return float(np.ravel(value)[0])
