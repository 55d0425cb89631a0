"""What a trace says is read as it is; what is broken costs what is broken and no more."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.errors import TonnageError, UsageError
from tonnage.trace import read_trace
from tonnage.trace.read_kineto import read_kineto

TRACES = Path(__file__).parents[1] / "data" / "traces"
MALFORMED = TRACES / "malformed"
WHOLE = {
    "01_truncated_mid_event.json": 4,
    "02_truncated_after_event.json": 4,
    "15_missing_dur_and_negative.json": 3,
    "20_truncated_gzip.json.gz": 2,
    "26_uint64_ts.json": 4,
    "28_begin_end_pairs.json": 1,
}
SAYS = {
    "01": "cut off at the end",
    "02": "end of the file is missing",
    "03": "mended",
    "05": "mended",
    "15": "2 events have no time or a negative duration",
    "16": "order of the files",
    "20": "cut off at the end",
    "26": "another clock",
    "27": "further documents",
}
EVENT = st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "name": st.text(max_size=12),
        "cat": st.sampled_from(["kernel", "cpu_op"]),
        "pid": st.integers(0, 9),
        "tid": st.integers(0, 9),
        "ts": st.integers(0, 10**9) | st.decimals(0, 10**9, places=3),
        "dur": st.integers(0, 10**9) | st.decimals(0, 10**9, places=3),
        "args": st.fixed_dictionaries({"stream": st.integers(0, 9), "correlation": st.integers(0, 9)}),
    }
)


def written(events: list[dict[str, object]]) -> str:
    """The trace as text in which decimals keep their digits."""
    rows = []
    for event in events:
        plain = {key: value for key, value in event.items() if not isinstance(value, Decimal)}
        numbers = "".join(f', "{k}": {v}' for k, v in event.items() if isinstance(v, Decimal))
        rows.append(json.dumps(plain)[:-1] + numbers + "}")
    return '{"traceEvents": [' + ",\n".join(rows) + '], "distributedInfo": {"rank": 3, "world_size": 8}}'


# A clock begins with the job, with the machine, or in 1970.
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0, 5_231_399_999_694, 1_694_128_201_426_556]), st.lists(EVENT, min_size=1, max_size=9)
)
def test_every_event_is_read_to_the_nanosecond(tmp_path_factory, base: int, events) -> None:
    events = [{**each, "ts": each["ts"] + base} for each in events]
    path = tmp_path_factory.mktemp("trace") / "any.json.gz"
    path.write_bytes(gzip.compress(written(events).encode()))
    rank = read_kineto(path)
    want = sorted((int(Decimal(e["ts"]) * 1000), int(Decimal(e["dur"]) * 1000)) for e in events)
    assert sorted(zip(rank.events.start.tolist(), rank.events.duration.tolist(), strict=True)) == want
    assert sorted(rank.events.name_of(i) for i in range(len(events))) == sorted(e["name"] for e in events)
    assert (rank.rank, rank.world_size, rank.losses) == (3, 8, ())


def test_blocks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    path = TRACES / "dlrm_v100_8ranks" / "rank7.json.gz"
    whole = read_kineto(path)
    monkeypatch.setattr("tonnage.trace.read_text.BLOCK", 5000)
    cut = read_kineto(path)
    assert np.array_equal(whole.events.start, cut.events.start)
    assert np.array_equal(whole.events.correlation, cut.events.correlation)
    assert whole.events.details == cut.events.details
    assert (whole.steps, whole.skipped, cut.losses) == (cut.steps, cut.skipped, ())


@pytest.mark.parametrize("path", sorted(MALFORMED.iterdir()), ids=lambda path: path.name)
def test_a_broken_file_gives_its_whole_events(path: Path) -> None:
    if path.name[:2] in ("18", "19"):
        with pytest.raises(TonnageError, match="no events"):
            read_trace(path)
        return
    trace = read_trace(path)
    assert len(trace.ranks[0].events) == WHOLE.get(path.name, 5)
    assert SAYS.get(path.name[:2], "") in " ".join(trace.notes)


def test_the_last_of_duplicate_keys_counts() -> None:
    events = read_trace(MALFORMED / "07_duplicate_keys.json").ranks[0].events
    assert 2 in events.correlation
    assert 999 not in events.correlation


def test_begin_and_end_make_one_event() -> None:
    events = read_trace(MALFORMED / "28_begin_end_pairs.json").ranks[0].events
    assert (events.duration.tolist(), events.stream.tolist()) == ([20_000], [20])


def test_one_broken_event_costs_itself_alone(tmp_path: Path) -> None:
    rows = [
        json.dumps({"ph": "X", "name": f"k{i}", "ts": i, "dur": 1, "pid": 0, "tid": 0}) for i in range(9999)
    ]
    rows[5000] = rows[5000].replace('"ts": ', '"ts": !')
    path = tmp_path / "broken.json"
    path.write_text('{"traceEvents": [' + ",\n".join(rows) + "]}")
    rank = read_kineto(path)
    assert len(rank.events) == 9998
    assert [loss.num_events for loss in rank.losses] == [1]


def test_ranks_come_from_the_file_else_its_name_else_the_order(tmp_path: Path) -> None:
    one = (MALFORMED / "16_no_distributed_info.json").read_text()
    for name in ("rank12.json", "rank3.json"):
        (tmp_path / name).write_text(one)
    trace = read_trace(tmp_path)
    assert [(each.rank, each.rank_basis) for each in trace.ranks] == [(3, "name"), (12, "name")]
    assert [each.rank for each in read_trace(tmp_path, ranks=[5, 6]).ranks] == [5, 6]
    with pytest.raises(UsageError):
        read_trace(tmp_path, ranks=[5])


def test_several_files_are_all_ranks() -> None:
    trace = read_trace(TRACES / "dlrm_v100_8ranks")
    assert [each.rank for each in trace.ranks] == list(range(8))
    assert trace.world_size == 8
    assert trace.notes == ()


def test_a_trace_without_device_or_steps_is_read() -> None:
    trace = read_trace(TRACES / "cpu_only_gloo_w300")
    assert (trace.ranks[0].rank, trace.world_size, len(trace.ranks[0].groups)) == (34, 300, 11)
    assert (trace.ranks[0].events.stream < 0).all()


def test_nsight_gives_a_rank_a_device() -> None:
    trace = read_trace(TRACES / "nsys_2gpu")
    kernels = [
        int((each.events.where_name(lambda name: name.startswith("nccl")) & (each.events.stream >= 0)).sum())
        for each in trace.ranks
    ]
    assert kernels == [33, 33]


def test_a_file_that_is_no_database_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_text("no database at all, however one looks at it")
    with pytest.raises(TonnageError, match="Nsight"):
        read_trace(path)


def test_a_path_without_traces_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no trace"):
        read_trace(tmp_path)
    with pytest.raises(UsageError, match="no trace"):
        read_trace(tmp_path / "*.json")


def test_steps_limit_what_is_kept() -> None:
    whole = read_trace(TRACES / "own_gloo_ddp_4ranks").ranks[0]
    step = whole.steps[1]
    part = read_trace(TRACES / "own_gloo_ddp_4ranks", steps=range(step.number, step.number + 1)).ranks[0]
    assert part.steps == (step,)
    assert 0 < len(part.events) < len(whole.events)
    assert part.events.start.min() >= step.start
