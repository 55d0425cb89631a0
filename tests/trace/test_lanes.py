"""Lanes and the Perfetto file: everything that ran, on one clock, waiting apart from moving."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tonnage.errors import TonnageError
from tonnage.trace import Job, lanes, split, write_perfetto

Jobs = Callable[[str], Job]


def test_pieces_of_a_stream_do_not_overlap_and_add_up_to_the_split(job: Jobs) -> None:
    made = job("dlrm_v100_8ranks")
    shown = lanes(made, budget=None)
    waiting = sum(each.stop - each.start for each in shown.pieces if each.kind == "waiting")
    assert waiting * 1e-6 / len(made.ranks) == pytest.approx(split(made).waiting)
    for one, other in zip(shown.pieces, shown.pieces[1:], strict=False):
        assert one.lane < other.lane or one.stop <= other.start + 1e-6


def test_a_small_budget_keeps_the_extent_of_every_lane(job: Jobs) -> None:
    made = job("dlrm_v100_8ranks")
    whole, small = lanes(made, budget=None), lanes(made, budget=400)
    assert len(small.pieces) < len(whole.pieces)
    assert sum(each.merged for each in small.pieces) == len(whole.pieces)
    for lane in range(len(whole.names)):
        ends = [
            (min(p.start for p in mine), max(p.stop for p in mine))
            for mine in ([p for p in each.pieces if p.lane == lane] for each in (whole, small))
        ]
        assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_the_perfetto_file_holds_every_piece_and_says_who_is_who(
    job: Jobs, name: str, tmp_path: Path
) -> None:
    made = job("own_gloo_ddp_4ranks")
    path = write_perfetto(made, tmp_path / name)
    raw = path.read_bytes()
    events = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)["traceEvents"]
    shown = lanes(made, budget=None)
    assert sum(each["ph"] == "X" for each in events) == len(shown.pieces) + len(shown.steps)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        f"rank {r}" for r in range(4)
    }
    assert any(each["name"].startswith("wait for all-reduce") for each in events)
    arrows = [each for each in events if each["ph"] in "sf"]
    assert sum(each["ph"] == "s" for each in arrows) == 9
    assert min(each["ts"] for each in events if each["ph"] == "X") == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_in_no_folder_is_told(job: Jobs, tmp_path: Path) -> None:
    with pytest.raises(TonnageError, match="can't write the Perfetto file"):
        write_perfetto(job("own_gloo_ddp_4ranks"), tmp_path / "no" / "run.json")
