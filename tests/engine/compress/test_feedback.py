from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from tonnage.engine import Bucket, ParameterSpec, cut_buckets
from tonnage.engine.compress import ErrorFeedback
from tonnage.errors import EngineError

MODEL = [
    ParameterSpec(name=f"p{i}", numel=n, dtype="float32", itemsize=4) for i, n in enumerate((3, 700, 65, 1))
]


def plan(cap: int, world_size: int) -> tuple[Bucket, ...]:
    return cut_buckets(MODEL, cap=cap, world_size=world_size)


def job(
    cap: int, world_size: int, *, own_shard: bool = False, seed: int | None = None
) -> list[ErrorFeedback]:
    buckets = plan(cap, world_size)
    ranks = [ErrorFeedback(buckets, rank=r, device="cpu", own_shard=own_shard) for r in range(world_size)]
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for rank, feedback in enumerate(ranks):
            for bucket in buckets:
                start, stop = bucket.shard(rank) if own_shard else (0, bucket.numel)
                residual = feedback.residual(bucket.index, start, stop)
                residual.copy_(torch.randn(len(residual), generator=generator))
    return ranks


def owed(ranks: list[ErrorFeedback], *, mean: bool) -> dict[str, torch.Tensor]:
    """What is owed of each parameter, put together from all ranks."""
    whole = {spec.name: torch.zeros(spec.numel) for spec in MODEL}
    for feedback in ranks:
        for name, stretches in feedback.state_dict()["owed"].items():
            for stretch in stretches:
                values = stretch["values"] / (len(ranks) if mean else 1)
                whole[name][stretch["start"] : stretch["start"] + len(values)] += values
    return whole


caps, worlds = st.integers(4, 4000), st.integers(1, 5)


@given(caps, worlds, caps, worlds, st.booleans())
@settings(max_examples=60)
def test_what_is_owed_survives_other_buckets_and_another_world_size(
    cap: int, world: int, new_cap: int, new_world: int, own_shard: bool
) -> None:
    old = job(cap, world, own_shard=own_shard, seed=cap)
    new = job(new_cap, new_world, own_shard=own_shard)
    for feedback in new:
        feedback.load_state_dict(each.state_dict() for each in old)
    before, after = owed(old, mean=not own_shard), owed(new, mean=not own_shard)
    for name in before:
        assert torch.allclose(before[name], after[name], atol=1e-5)


@given(caps, caps, worlds)
@settings(max_examples=30)
def test_on_the_same_world_size_each_rank_takes_its_own_back_bit_for_bit(
    cap: int, new_cap: int, world: int
) -> None:
    old, new = job(cap, world, seed=1), job(new_cap, world)
    for before, after in zip(old, new, strict=True):
        after.load_state_dict([before.state_dict()])
        assert before.norm() == pytest.approx(after.norm(), rel=0.5)
    for before, after in zip(old, new, strict=True):
        mine, theirs = owed([before], mean=False), owed([after], mean=False)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_state_is_a_copy_and_can_be_saved(tmp_path: object) -> None:
    (feedback,) = job(4000, 1, seed=1)
    state = feedback.state_dict()
    before = state["owed"]["p1"][0]["values"].clone()
    feedback.reset()
    torch.save(state, f"{tmp_path}/state.pt")
    assert torch.equal(torch.load(f"{tmp_path}/state.pt")["owed"]["p1"][0]["values"], before)
    assert feedback.norm() == 0


def test_states_that_do_not_fit_together_are_refused_and_change_nothing() -> None:
    three, two = job(400, 3, seed=1), job(400, 2, seed=2)
    states = [each.state_dict() for each in three]
    before = two[0].norm()
    for wrong in (
        [],
        states[:2],
        [*states[:2], states[1]],
        [states[0], {**states[1], "world_size": 4}],
        [{**states[0], "format": 99}],
    ):
        with pytest.raises(EngineError):
            two[0].load_state_dict(wrong)
    assert two[0].norm() == before


def test_a_parameter_that_is_new_owes_nothing_and_one_that_is_gone_is_forgotten() -> None:
    (old,) = job(400, 1, seed=1)
    buckets = cut_buckets(
        [ParameterSpec(name=n, numel=65, dtype="float32", itemsize=4) for n in ("p2", "new")],
        cap=10_000,
        world_size=1,
    )
    new = ErrorFeedback(buckets, rank=0, device="cpu")
    new.load_state_dict([old.state_dict()])
    state = new.state_dict()["owed"]
    assert torch.equal(state["p2"][0]["values"], old.state_dict()["owed"]["p2"][0]["values"])
    assert not state["new"][0]["values"].any()
