"""Planned bytes against those that small real torch.distributed runs hand to their collectives."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tonnage.ledger import wire_nbytes
from tonnage.plan import Batch, Layout, Recipe, device_cluster, load_model
from tonnage.plan.grid import grid_of
from tonnage.plan.rows import stage_flows
from tonnage.plan.traffic import FULLEST

SCRIPT = Path(__file__).with_name("counted_run.py")
RANKS = 2

pytest.importorskip("torch", reason="real runs need torch")


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What the ranks counted in each case, from one launch."""
    meeting = tmp_path_factory.mktemp("ranks") / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(meeting)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [each.communicate(timeout=180) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0] * RANKS, outputs
    found: dict[str, dict[str, int]] = json.loads(outputs[0][0])
    return found


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("counted_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _planned(layout: Layout, passes: int, group: str) -> Counter[str]:
    run = _module()
    model = load_model(run.Decoder())
    batch = Batch(sequences=layout.dp * layout.micro_batch * passes, seq=run.SEQ)
    grid = grid_of([layout], model, batch)
    sent: Counter[str] = Counter()
    for flow, times in stage_flows(model, grid, device_cluster("h100", RANKS), FULLEST):
        calls, nbytes = float(np.ravel(flow.calls)[0]) * times, float(np.ravel(flow.nbytes)[0])
        size = int(np.ravel(flow.to.size)[0])
        if flow.group == group and calls and size > 1 and flow.label not in ("embedding", "head", "loss"):
            sent[flow.op] += calls * wire_nbytes(flow.op, 1, size) * nbytes
    return sent


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "layout", "passes", "group"),
    [
        ("dp", Layout(dp=RANKS, zero=0), 1, "dp"),
        ("zero-1", Layout(dp=RANKS, zero=1), 1, "dp"),
        ("zero-2", Layout(dp=RANKS, zero=2), 1, "dp"),
        ("zero-3", Layout(dp=RANKS, zero=3), 2, "dp"),
        ("tp", Layout(tp=RANKS), 1, "tp"),
    ],
)
def test_a_real_run_moves_the_planned_bytes(
    counted: dict[str, dict[str, int]], case: str, layout: Layout, passes: int, group: str
) -> None:
    planned = _planned(layout.replace(micro_batch=2, recipe=Recipe(grad_nbytes=4)), passes, group)
    assert set(counted[case]) == set(planned)
    for op, nbytes in planned.items():
        assert counted[case][op] == pytest.approx(nbytes, rel=1e-6), op


def test_a_live_module_has_the_planned_parameters() -> None:
    run = _module()
    module = run.Decoder()
    assert load_model(module).params == sum(p.numel() for p in module.parameters())
