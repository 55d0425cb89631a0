"""The ledger: every movement of bytes in one table, that all parts of Tonnage write or read."""

from tonnage.ledger.collectives import Algorithm, algbw, bus_factor, busbw, num_steps, wire_nbytes
from tonnage.ledger.compare import Comparison, compare, median_step_seconds
from tonnage.ledger.file import from_bytes, read_ledger, to_bytes, write_ledger
from tonnage.ledger.intervals import (
    Intervals,
    difference,
    exposed,
    intersection,
    intervals,
    length,
    overlap,
    union,
)
from tonnage.ledger.record import Recorder
from tonnage.ledger.schema import COLUMNS, KINDS, LINKS, OPS, SCHEMA_VERSION, STILL_KINDS
from tonnage.ledger.table import Ledger

__all__ = [
    "COLUMNS",
    "KINDS",
    "LINKS",
    "OPS",
    "SCHEMA_VERSION",
    "STILL_KINDS",
    "Algorithm",
    "Comparison",
    "Intervals",
    "Ledger",
    "Recorder",
    "algbw",
    "bus_factor",
    "busbw",
    "compare",
    "difference",
    "exposed",
    "from_bytes",
    "intersection",
    "intervals",
    "length",
    "median_step_seconds",
    "num_steps",
    "overlap",
    "read_ledger",
    "to_bytes",
    "union",
    "wire_nbytes",
    "write_ledger",
]
