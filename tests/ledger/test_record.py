from __future__ import annotations

import struct
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.ledger import Recorder

int64 = st.integers(-(2**63), 2**63 - 1)
entries = st.lists(
    st.tuples(
        st.integers(0, 2),  # channel
        st.integers(-1, 2**31 - 1),  # step
        int64,
        int64,
        st.floats(allow_nan=False),
        st.floats(allow_nan=False),
        st.floats(allow_nan=False),
        st.integers(1, 2**40),
    ),
    max_size=30,
)
NAMES = ("step", "nbytes", "wire_nbytes", "start", "stop", "exposed", "calls")


@given(entries, st.integers(1, 9))
def test_a_ledger_holds_what_was_added_whatever_the_block(added: list[tuple], block: int) -> None:
    recorder = Recorder(7, block=block)
    channels = [recorder.channel("gradient", "send", label=f"bucket {i}", group_size=i + 1) for i in range(3)]
    for num, (channel, *values) in enumerate(added):
        recorder.add(channels[channel], *values)
        assert len(recorder) == num + 1
    found = list(recorder.ledger({"run": "x"}))
    assert [tuple(row[name] for name in NAMES) for row in found] == [tuple(each[1:]) for each in added]
    assert [row["label"] for row in found] == [f"bucket {each[0]}" for each in added]
    assert [row["group_size"] for row in found] == [each[0] + 1 for each in added]
    assert all(row["rank"] == 7 for row in found)


def test_a_ledger_may_be_taken_while_the_run_goes_on() -> None:
    recorder = Recorder(0, block=2)
    channel = recorder.channel("gradient", "send")
    ledgers = []
    for i in range(5):
        recorder.add(channel, i, i, i, 0.0, 1.0)
        ledgers.append(recorder.ledger())
    assert [[row["nbytes"] for row in each] for each in ledgers] == [list(range(n + 1)) for n in range(5)]


def test_the_same_description_is_the_same_channel() -> None:
    recorder = Recorder(0)
    first = recorder.channel("gradient", "send", label="a")
    assert recorder.channel("gradient", "send", label="a") == first
    assert recorder.channel("gradient", "send", label="b") != first


def test_threads_that_add_at_once_lose_nothing() -> None:
    recorder, per_thread, num_threads = Recorder(0, block=37), 3000, 6
    start = threading.Barrier(num_threads)

    def add(thread: int) -> None:
        channel = recorder.channel("gradient", "send", label=str(thread))
        start.wait(timeout=30)
        for i in range(per_thread):
            recorder.add(channel, i, thread * per_thread + i, i, float(i), i + 1.0)

    threads = [threading.Thread(target=add, args=(i,)) for i in range(num_threads)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    rows = list(recorder.ledger())
    assert len(recorder) == len(rows) == per_thread * num_threads
    for thread in range(num_threads):
        mine = [row for row in rows if row["label"] == str(thread)]
        # In its own order, and no field torn from another thread's entry.
        assert [row["step"] for row in mine] == list(range(per_thread))
        assert all(row["nbytes"] == thread * per_thread + row["step"] for row in mine)
        assert all(row["wire_nbytes"] == row["step"] == row["start"] for row in mine)


def test_an_entry_that_does_not_fit_leaves_the_others() -> None:
    recorder = Recorder(0)
    channel = recorder.channel("gradient", "send")
    recorder.add(channel, 0, 1, 1, 0.0, 1.0)
    with pytest.raises(struct.error):
        recorder.add(channel, 0, 2**63, 1, 0.0, 1.0)
    recorder.add(channel, 0, 2, 2, 0.0, 1.0)
    assert [row["nbytes"] for row in recorder.ledger()] == [1, 2]


def test_an_entry_takes_56_bytes_and_a_row_of_python_several_times_that() -> None:
    num = 20_000

    def peak(add_all: object) -> float:
        tracemalloc.start()
        kept = add_all()  # type: ignore[operator]
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept
        return size / num

    def packed() -> Recorder:
        recorder = Recorder(0, block=1000)
        channel = recorder.channel("gradient", "send")
        for i in range(num):
            recorder.add(channel, i, i * 1000, i * 1000, i * 0.1, i * 0.2)
        return recorder

    def tuples() -> list[tuple]:
        return [(0, i, i * 1000, i * 1000, i * 0.1, i * 0.2, 0.0, 1) for i in range(num)]

    assert peak(packed) < 60
    assert peak(tuples) > 3 * peak(packed)


def test_nothing_added_is_an_empty_ledger() -> None:
    assert len(Recorder(0).ledger()) == 0
