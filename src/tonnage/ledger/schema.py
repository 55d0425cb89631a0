"""The columns of a ledger, their units, and the words that they may hold.

A row is one movement of bytes, or several alike (``calls``). Two kinds of row move nothing and give
the movements their background: ``compute`` (a stretch in which the rank computed) and ``step`` (the
whole of a training step). Both have zero bytes, so sums of bytes need not leave them out.
"""

from __future__ import annotations

from typing import Literal, get_args

import polars as pl

SCHEMA_VERSION = 1

Kind = Literal[
    "gradient",
    "parameter",
    "activation",
    "optimizer state",
    "buffer",
    "sample",
    "checkpoint",
    "chunk",
    "control",
    "unknown",
    "compute",
    "step",
]
Op = Literal[
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "broadcast",
    "reduce",
    "send",
    "recv",
    "barrier",
    "copy",
    "read",
    "write",
    "forward",
    "backward",
    "optimizer",
    "wait",
    "kernel",
    "step",
]
LinkLevel = Literal["device", "nvlink", "pcie", "nic", "spine", "loopback", "disk", "object store", "none"]

KINDS: tuple[str, ...] = get_args(Kind)
OPS: tuple[str, ...] = get_args(Op)
LINKS: tuple[str, ...] = get_args(LinkLevel)

STILL_KINDS = ("compute", "step")
"""Kinds of row that move nothing."""

COLUMNS: dict[str, pl.DataType] = {
    "rank": pl.Int32(),
    "step": pl.Int32(),
    "kind": pl.String(),
    "op": pl.String(),
    "group": pl.String(),
    "group_size": pl.Int32(),
    "link": pl.String(),
    "calls": pl.Int64(),
    "nbytes": pl.Int64(),
    "wire_nbytes": pl.Int64(),
    "start": pl.Float64(),
    "stop": pl.Float64(),
    "exposed": pl.Float64(),
    "label": pl.String(),
}
"""Name and type of each column, in the order of the file; DESIGN's table gives their meaning."""

DEFAULTS: dict[str, object] = {
    "rank": 0,
    "step": -1,
    "group": "dp",
    "group_size": 1,
    "link": "none",
    "calls": 1,
    "nbytes": 0,
    "wire_nbytes": 0,
    "start": float("nan"),
    "stop": float("nan"),
    "exposed": 0.0,
    "label": "",
}
"""What a row holds where its writer gives nothing; ``kind`` and ``op`` must be given."""
