"""The report as one JSON document, for scripts and continuous integration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tonnage.ledger import Ledger
from tonnage.report.facts import run_names
from tonnage.report.run import Run, weigh
from tonnage.report.sections import per_step
from tonnage.report.verdict import judge, to_baseline

REPORT_SCHEMA = "tonnage.report/1"


def report_json(ledgers: Sequence[Ledger]) -> dict[str, Any]:
    """All numbers of the report in base units; what was not measured is null, and nothing is NaN."""
    runs = [weigh(ledger, name) for ledger, name in zip(ledgers, run_names(ledgers), strict=True)]
    document = {
        "schema": REPORT_SCHEMA,
        "verdict": asdict(judge(runs)) if runs else None,
        "runs": [_run(run, runs) for run in runs],
    }
    safe: dict[str, Any] = json_safe(document)
    return safe


def json_safe(value: Any) -> Any:
    """``value`` with every number that JSON can't hold replaced by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(each) for each in value]
    return value


def _run(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    beyond, bound = run.gap, run.bound
    return {
        "name": run.name,
        "facts": asdict(run.facts),
        "ranks": run.ranks,
        "num_steps": run.num_steps,
        "steps": asdict(run.steps) if run.steps else None,
        "to_ddp": to_baseline(run, runs),
        "bound": {**asdict(bound), "seconds": bound.seconds} if bound else None,
        "to_bound": run.to_bound,
        "gap": asdict(beyond) if beyond else None,
        "spent": asdict(run.spent),
        "moved": {**asdict(run.moved), "mean_nbytes": run.moved.mean_nbytes},
        "movements": per_step(run).to_dicts(),
        "exposed_most": [asdict(each) for each in run.worst[:10]],
        "behind": asdict(run.behind) if run.behind else None,
        "final_loss": run.final_loss,
    }
