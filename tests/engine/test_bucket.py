from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from tonnage.engine import Bucket, ParameterSpec, cut_buckets, plan_hash
from tonnage.errors import EngineError

ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2}


@st.composite
def models(draw: st.DrawFn) -> list[ParameterSpec]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 5000), st.sampled_from(sorted(ITEMSIZES))), min_size=1))
    return [
        ParameterSpec(name=f"p{i}", numel=numel, dtype=dtype, itemsize=ITEMSIZES[dtype])
        for i, (numel, dtype) in enumerate(sizes)
    ]


caps = st.integers(1, 40_000)
worlds = st.integers(1, 9)


@given(models(), caps, worlds)
def test_each_parameter_lies_in_one_bucket_and_overlaps_none(
    model: list[ParameterSpec], cap: int, world_size: int
) -> None:
    buckets = cut_buckets(model, cap=cap, world_size=world_size)
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted(slot.index for slot in slots) == list(range(len(model)))
    assert all((model[s.index].name, model[s.index].numel) == (s.name, s.numel) for s in slots)
    for bucket in buckets:
        ends = [slot.offset + slot.numel for slot in bucket.slots]
        assert [slot.offset for slot in bucket.slots] == [0, *ends[:-1]]
        assert ends[-1] <= bucket.numel


@given(models(), caps, worlds)
def test_a_bucket_keeps_the_cap_unless_one_parameter_alone_is_larger(
    model: list[ParameterSpec], cap: int, world_size: int
) -> None:
    for bucket in cut_buckets(model, cap=cap, world_size=world_size):
        filled = sum(slot.numel for slot in bucket.slots) * bucket.itemsize
        assert filled <= cap or len(bucket.slots) == 1


@given(models(), caps, worlds)
def test_a_bucket_holds_one_dtype_in_order_of_readiness(
    model: list[ParameterSpec], cap: int, world_size: int
) -> None:
    buckets = cut_buckets(model, cap=cap, world_size=world_size)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert {model[slot.index].dtype for slot in bucket.slots} == {bucket.dtype}
        indices = [slot.index for slot in bucket.slots]
        assert indices == sorted(indices, reverse=True)


@given(models(), caps, worlds)
def test_shards_tile_the_bucket_and_slots_are_cut_at_their_borders(
    model: list[ParameterSpec], cap: int, world_size: int
) -> None:
    for bucket in cut_buckets(model, cap=cap, world_size=world_size):
        shards = [bucket.shard(rank) for rank in range(world_size)]
        assert [start for start, _ in shards] == [0, *(stop for _, stop in shards[:-1])]
        assert shards[-1][1] == bucket.numel
        assert bucket.shard_numel * bucket.itemsize % 64 == 0
        assert bucket.numel - sum(s.numel for s in bucket.slots) < world_size * max(1, 64 // bucket.itemsize)
        for slot in bucket.slots:
            parts = [slot.within(*shard) for shard in shards]
            assert sum(max(0, stop - start) for start, stop in parts) == slot.numel


@given(models(), caps, worlds, st.data())
def test_plans_that_differ_in_anything_hash_differently(
    model: list[ParameterSpec], cap: int, world_size: int, data: st.DataObject
) -> None:
    buckets = cut_buckets(model, cap=cap, world_size=world_size)
    assert plan_hash(buckets) == plan_hash(cut_buckets(list(model), cap=cap, world_size=world_size))
    place = data.draw(st.integers(0, len(model) - 1))
    changed = {
        "name": dataclasses.replace(model[place], name="other"),
        "numel": dataclasses.replace(model[place], numel=model[place].numel + 1),
        "dtype": dataclasses.replace(model[place], dtype="int32"),
    }[data.draw(st.sampled_from(["name", "numel", "dtype"]))]
    other = [*model[:place], changed, *model[place + 1 :]]
    assert plan_hash(cut_buckets(other, cap=cap, world_size=world_size)) != plan_hash(buckets)
    assert plan_hash(cut_buckets(model, cap=cap, world_size=world_size + 1)) != plan_hash(buckets)


def test_other_cuts_of_the_same_model_hash_differently() -> None:
    model = [ParameterSpec(name=f"p{i}", numel=16, dtype="float32", itemsize=4) for i in range(4)]
    plans = [cut_buckets(model, cap=cap, world_size=2) for cap in (64, 128, 256)]
    assert len({plan_hash(plan) for plan in plans}) == 3


def test_a_bucket_that_can_hold_nothing_is_refused() -> None:
    with pytest.raises(EngineError, match="holds nothing"):
        cut_buckets([], cap=0, world_size=1)


def test_a_bucket_tells_its_size_in_bytes() -> None:
    bucket = Bucket(index=3, slots=(), numel=32, dtype="float32", itemsize=4, world_size=2)
    assert (bucket.nbytes, bucket.shard_numel, bucket.label) == (128, 16, "b03")
