"""Two small ledgers on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.ledger import Ledger, write_ledger


def ledger(name: str, seconds: float, calls: int) -> Ledger:
    rows = []
    for step in range(2):
        # The first step is warm-up, and ten times as long.
        stop = step * 100 + seconds * (10 if step == 0 else 1)
        rows.append({"step": step, "kind": "step", "op": "step", "start": step * 100.0, "stop": stop})
        rows.append(
            {
                "step": step,
                "kind": "gradient",
                "op": "all-reduce",
                "calls": calls,
                "nbytes": 80,
                "wire_nbytes": 80,
            }
        )
    return Ledger.from_rows(rows, {"run": name, "warmup": 1})


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    before, after = ledger("before", 1.0, 10), ledger("after", 1.2, 2)
    return (
        str(write_ledger(before, tmp_path / "before.ledger")),
        str(write_ledger(after, tmp_path / "after.ledger")),
    )
