"""Training with compressed transfers, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.errors import EngineError

pytest.importorskip("torch")

WAYS = [
    *(
        (schedule, name)
        for schedule in ("shard", "early", "allreduce")
        for name in ("int8", "bf16", "lossless")
    ),
    ("shard", "fp16"),
    ("shard", "topk:0.05"),
    ("early", "sign"),
    ("allreduce", "topk:0.05"),
    ("allreduce", "sign"),
    ("allreduce", "power:2"),
]
every_way = pytest.mark.parametrize(("schedule", "compress"), WAYS)


@every_way
def test_all_ranks_hold_the_same_bits_and_send_fewer_bytes(quad: Any, schedule: str, compress: str) -> None:
    answers = quad.run("in_rank_squeeze.trained", schedule=schedule, compress=compress, steps=8)
    assert len({each["bits"] for each in answers}) == 1
    first = answers[0]
    assert first["facts"] == compress
    assert first["wire"] > 0
    if compress != "lossless":  # buckets this small have no exponents to save
        assert first["wire"] < (2 if schedule == "allreduce" else 1) * first["plain"]


@pytest.mark.parametrize("schedule", ["shard", "early", "allreduce"])
def test_what_is_lossless_gives_the_bits_of_no_compression(pair: Any, schedule: str) -> None:
    case = {"schedule": schedule, "steps": 6}
    packed = pair.run("in_rank_squeeze.trained", compress="lossless", **case)
    plain = pair.run("in_rank_squeeze.trained", compress=None, **case)
    assert [each["bits"] for each in packed] == [each["bits"] for each in plain]


@pytest.mark.parametrize(
    ("schedule", "compress"),
    [("shard", "int8"), ("early", "bf16"), ("allreduce", "int8"), ("allreduce", "power:4")],
)
def test_training_learns_as_it_does_without(pair: Any, schedule: str, compress: str) -> None:
    case = {"schedule": schedule, "steps": 60}
    packed = pair.run("in_rank_squeeze.trained", compress=compress, **case)[0]["losses"]
    plain = pair.run("in_rank_squeeze.trained", compress=None, **case)[0]["losses"]
    assert plain[-1] < 0.1 * plain[0]
    assert packed[-1] < 1.1 * plain[-1] + 0.02 * plain[0]


@every_way
def test_a_training_that_was_broken_off_goes_on_bit_for_bit(pair: Any, schedule: str, compress: str) -> None:
    for unbroken, broken in pair.run("in_rank_squeeze.resumed", schedule=schedule, compress=compress):
        assert broken == unbroken


@pytest.mark.parametrize("schedule", ["shard", "early"])
def test_parameters_loaded_in_mid_training_are_not_undone_by_the_exact_copies(
    pair: Any, schedule: str
) -> None:
    answers = pair.run("in_rank_squeeze.loaded", schedule=schedule, compress="int8")
    assert [far for far, _ in answers] == [0.0, 0.0]
    assert len({bits for _, bits in answers}) == 1


@pytest.mark.parametrize(
    ("schedule", "compress", "hint"),
    [
        ("shard", "power:2", "schedule='allreduce'"),
        ("shard", "zip", "int8"),
        ("shard", "topk:much", "topk:0.01"),
        ("allreduce", "power:x", "power:4"),
    ],
)
def test_what_can_t_be_meant_is_refused_with_what_to_write(
    pair: Any, schedule: str, compress: str, hint: str
) -> None:
    for error in pair.answers("in_rank_squeeze.refused", schedule=schedule, compress=compress):
        assert isinstance(error, EngineError)
        assert hint in str(error.hint)
