"""HTA's definitions give HTA's figures, to the microsecond, where its times are whole microseconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.trace import read_trace
from tonnage.trace.hta import hta_breakdown

TRACES = Path(__file__).parents[1] / "data" / "traces"

# Printed by HolisticTraceAnalysis 0.5.0 with pandas 2.3.3: idle, compute, non-compute, span in
# microseconds, overlap in percent, a rank.
PRINTED = {
    "dlrm_v100_8ranks": [
        (6419, 1034, 5556, 13009, 4.5),
        (6428, 1246, 11075, 18749, 2.47),
        (7046, 1068, 3236, 11350, 7.88),
        (8145, 1240, 9468, 18853, 3.31),
        (8887, 1126, 6576, 16589, 0.56),
        (9121, 1041, 6230, 16392, 0.64),
        (7051, 1051, 3308, 11410, 7.56),
        (8308, 1059, 1600, 10967, 9.51),
    ],
    "sampled_2of128": [
        (321378, 106252, 172428, 600058, 11.81),
        (328671, 135548, 136455, 600674, 20.05),
    ],
}


@pytest.mark.parametrize("folder", PRINTED)
def test_figures_are_those_that_hta_prints(folder: str) -> None:
    found = [hta_breakdown(each) for each in read_trace(TRACES / folder).ranks]
    got = [
        (*(round(s * 1e6) for s in (b.idle, b.compute, b.non_compute, b.span)), round(b.overlap * 100, 2))
        for b in found
    ]
    assert got == PRINTED[folder]


def test_a_trace_without_device_events_has_no_time() -> None:
    (rank,) = read_trace(TRACES / "cpu_only_gloo_w300").ranks
    assert hta_breakdown(rank).span == 0
