"""Bytes by closed form: against a counter that walks through a step, and the worked example of 70B."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.ledger import wire_nbytes
from tonnage.plan import Batch, Layout, Model, Recipe, device_cluster, load_model, predict, software
from tonnage.plan.collectives import reach, split
from tonnage.plan.grid import chunk_counts, grid_of, kinds
from tonnage.plan.layout import chunk_layers
from tonnage.plan.model import Layer, runs
from tonnage.plan.model import attention as attention_matrices
from tonnage.plan.model import mlp as mlp_matrices
from tonnage.plan.rows import stage_flows
from tonnage.plan.traffic import FULLEST, distinct, layer_flows, pipeline_send_nbytes, pipeline_sends


def small(layers: int = 4, hidden: int = 64, vocab: int = 1024, heads: int = 8) -> Model:
    layer = Layer(
        matrices=(
            *attention_matrices(hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads),
            *mlp_matrices(hidden=hidden, ffn=4 * hidden, gated=False),
        ),
        vectors=2 * hidden,
        heads=heads,
        kv_heads=heads,
        qk_dim=hidden // heads,
        v_dim=hidden // heads,
        kv_width=2 * hidden,
        ffn=4 * hidden,
    )
    return Model(
        name="small",
        family="gpt2",
        hidden=hidden,
        vocab=vocab,
        layers=runs([layer] * layers),
        other_head=hidden,
    )


def planned(model: Model, layout: Layout, batch: Batch, *, stage: int = FULLEST) -> Counter[tuple[str, str]]:
    """Bytes that a rank of a stage sends in a step, by group and collective."""
    grid = grid_of([layout], model, batch)
    cluster = device_cluster("h100", layout.num_ranks)
    sent: Counter[tuple[str, str]] = Counter()
    for flow, times in stage_flows(model, grid, cluster, stage):
        calls, nbytes = float(np.ravel(flow.calls)[0]) * times, float(np.ravel(flow.nbytes)[0])
        size = int(np.ravel(flow.to.size)[0])
        if calls and size > 1:
            sent[(flow.group, flow.op)] += calls * wire_nbytes(flow.op, 1, size) * nbytes
    sends = float(np.ravel(pipeline_sends(grid, stage))[0])
    if sends:
        sent[("pp", "send")] += sends * float(np.ravel(pipeline_send_nbytes(model, grid))[0])
    return sent


def counted(model: Model, layout: Layout, batch: Batch) -> Counter[tuple[str, str]]:
    """The same of a middle stage, by walking through its micro-batches, layers and ranks' messages."""
    sent: Counter[tuple[str, str]] = Counter()
    t, d = layout.tp, layout.dp * layout.cp
    x = batch.seq * layout.micro_batch * model.hidden * 2 / layout.cp

    def ring(group: str, op: str, whole: float, size: int, rounds: int) -> None:
        # A ring hands a piece of 1/size on in each of size-1 steps, twice for an all-reduce.
        for _ in range(rounds * (size - 1)):
            sent[(group, op)] += whole / size

    own = [int(c) for c in chunk_counts(layout, model).sum(axis=1)][layout.pp // 2 :: layout.pp]
    for _ in range(layout.num_micro_batches(batch)):
        for layers in own:
            for _ in range(layers):
                for phase in ("forward", "backward", *(["again"] if layout.recompute == "full" else [])):
                    for _ in ("attention", "mlp"):
                        if layout.sp:
                            ring("tp", "all-gather", x, t, 1)
                            ring("tp", "reduce-scatter", x, t, 1)
                            if phase == "backward":
                                ring("tp", "all-gather", x, t, 1)
                        else:
                            ring("tp", "all-reduce", x, t, 2)
            if layout.pp > 1:
                sent[("pp", "send")] += 2 * (x / t if layout.sp or layout.recipe.scatter else x)
    matrices = model.main_layer.matrices
    params = sum(own) * (sum(m.params for m in matrices) / t + model.main_layer.vectors)
    if layout.pp == 1:
        params += 2 * model.vocab * model.hidden / t + model.other_head
    g = layout.recipe.grad_nbytes
    passes = layout.num_micro_batches(batch)
    if layout.zero == 0:
        ring("dp", "all-reduce", params * g, d, 2)
    else:
        for _ in range(passes if layout.zero >= 2 else 1):
            ring("dp", "reduce-scatter", params * g, d, 1)
        for _ in range(2 * passes if layout.zero == 3 else 1):
            ring("dp", "all-gather", params * 2, d, 1)
    return sent


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2, 3, 8]),
    pp=st.sampled_from([1, 4]),
    sp=st.booleans(),
    zero=st.sampled_from([0, 1, 2, 3]),
    micro_batch=st.sampled_from([1, 2]),
    passes=st.integers(1, 4),
    full=st.booleans(),
    grad_nbytes=st.sampled_from([2, 4]),
)
def test_closed_forms_agree_with_walking_through_a_step(
    tp: int,
    dp: int,
    pp: int,
    sp: bool,
    zero: int,
    micro_batch: int,
    passes: int,
    full: bool,
    grad_nbytes: int,
) -> None:
    model = small(layers=8, vocab=1024)
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        sp=sp and tp > 1,
        zero=zero,
        micro_batch=micro_batch,
        recompute="full" if full else "none",
        recipe=Recipe(grad_nbytes=grad_nbytes),
    )
    batch = Batch(sequences=dp * micro_batch * passes, seq=32)
    ours, walked = planned(model, layout, batch), counted(model, layout, batch)
    if pp == 1:
        # Embedding, head and loss stand beside the layers, and have a test of their own.
        ours = Counter({key: value for key, value in ours.items() if key[0] != "tp"})
        walked = Counter({key: value for key, value in walked.items() if key[0] != "tp"})
    assert set(ours) == {key for key, value in walked.items() if value}
    for key, value in ours.items():
        assert value == pytest.approx(walked[key], rel=1e-9), key


def test_the_70b_example_moves_what_a_calculation_by_hand_gives() -> None:
    # 80 layers of 855.65 M parameters on tp 8 x pp 4 x dp 16; X is 134.2 MB, 32 micro-batches.
    model = load_model("llama3-70b")
    batch = Batch(sequences=512, seq=8192)
    base = Layout(dp=16, tp=8, pp=4, sp=True, zero=1, recipe=software("megatron-core", grad_nbytes=4))

    def sent(layout: Layout, group: str) -> float:
        return sum(v for key, v in planned(model, layout, batch).items() if key[0] == group) / 1e9

    assert sent(base, "tp") == pytest.approx(752, abs=1)
    assert sent(base.replace(recompute="full"), "tp") == pytest.approx(1052, abs=1)
    assert sent(base.replace(sp=False), "tp") == pytest.approx(601, abs=1)
    assert sent(base.replace(sp=False, recompute="full"), "tp") == pytest.approx(902, abs=1)
    assert sent(base, "dp") == pytest.approx(12.03, abs=0.01)
    assert sent(base.replace(recipe=software("megatron-core", grad_nbytes=2)), "dp") == pytest.approx(
        8.02, abs=0.01
    )
    plain = base.replace(zero=0)
    assert sent(plain, "dp") == pytest.approx(16.04, abs=0.01)
    assert sent(plain.replace(recipe=software("megatron-core", grad_nbytes=2)), "dp") == pytest.approx(
        8.02, abs=0.01
    )
    two = software("megatron-core", grad_nbytes=2)
    assert sent(base.replace(zero=3, recipe=two), "dp") == pytest.approx(385, abs=1)
    assert sent(base, "pp") == pytest.approx(1.07, abs=0.01)
    whole = software("megatron-core", scatter=False)
    assert sent(base.replace(sp=False, recipe=whole), "pp") == pytest.approx(8.59, abs=0.01)
    assert sent(base.replace(virtual=5), "pp") == pytest.approx(5.37, abs=0.01)
    assert sent(base.replace(sp=False, recipe=whole, virtual=5), "pp") == pytest.approx(42.9, abs=0.1)


def test_sharding_70b_over_all_512_cards_moves_422_gb_a_pass() -> None:
    model = load_model("llama3-70b")
    layout = Layout(dp=512, zero=3, recipe=Recipe(grad_nbytes=2))
    sent = planned(model, layout, Batch(sequences=512, seq=8192))
    assert sum(sent.values()) / 1e9 == pytest.approx(422.5, abs=0.5)


def test_context_parallel_by_ring_moves_keys_and_values_three_times() -> None:
    model = load_model("llama3-70b")
    layout = Layout(dp=8, tp=8, pp=4, cp=2, sp=True, recipe=Recipe(context="ring"))
    sent = planned(model, layout, Batch(sequences=512, seq=8192))
    # 6 (c-1)/c s B (k/t) b is 6.3 MB a layer and micro-batch; 20 layers, 64 micro-batches.
    assert sum(v for key, v in sent.items() if key[0] == "cp") == pytest.approx(6.291e6 * 20 * 64, rel=1e-3)


@pytest.mark.parametrize(("cp", "ring"), [(2, True), (8, False)])
def test_ring_or_ulysses_is_chosen_by_its_bytes(cp: int, ring: bool) -> None:
    # With 8 key heads on tp 1 the ring is cheaper at c 2 and dearer at c 8.
    model = load_model("llama3-70b")
    sent = planned(model, Layout(cp=cp, recipe=Recipe()), Batch(sequences=1, seq=131072))
    assert (("cp", "all-to-all") in sent) is not ring


def test_experts_exchange_107_gb_in_the_deepseek_example() -> None:
    model = load_model("deepseek-v3")
    sent = planned(model, Layout(dp=64, ep=64), Batch(sequences=64, seq=4096))
    assert sent[("ep", "all-to-all")] / 1e9 == pytest.approx(1.85 * 58, rel=0.01)


@settings(deadline=None)
@given(per=st.integers(1, 4), groups=st.integers(1, 4), data=st.data())
def test_a_token_goes_once_to_each_group_that_has_one_of_its_experts(
    per: int, groups: int, data: st.DataObject
) -> None:
    experts = per * groups
    chosen = data.draw(st.integers(1, experts))
    layer = dataclasses.replace(load_model("mixtral-8x7b").layers[0][0], experts=experts, top_k=chosen)
    choices = list(combinations(range(experts), chosen))
    counted = sum(len({expert // per for expert in choice}) for choice in choices) / len(choices)
    assert float(distinct(layer, groups)) == pytest.approx(counted)


@pytest.mark.parametrize(("ep", "hosts"), [(8, 1), (16, 2), (64, 8)])
def test_tokens_sent_once_cross_the_network_once_a_host(ep: int, hosts: int) -> None:
    model, batch = load_model("deepseek-v3"), Batch(sequences=ep, seq=4096)
    layout = Layout(dp=ep, ep=ep, recipe=Recipe(dispatch="once"))
    grid = grid_of([layout], model, batch)
    cluster = device_cluster("h100", ep)
    layer = model.layers[-1][0]
    between, inside = (
        next(f for f in layer_flows(layer, model, grid, cluster) if f.label.endswith(where))
        for where in ("between hosts", "in a host")
    )
    token = model.hidden * 2.0
    outside = split("all-to-all", between.nbytes, between.to)[1]
    # Eight experts in 256 lie on that many hosts on average, and no token leaves for its own.
    reached = hosts * (1 - np.prod([(256 - 256 / hosts - i) / (256 - i) for i in range(8)]))
    assert float(outside[0]) == pytest.approx(4096 * token * reached * (hosts - 1) / hosts)
    assert float(inside.to.size[0]) == 8
    # A copy for each expert sends more over the network, wherever it is left.
    each = split("all-to-all", 4096 * token * 8, reach(cluster, size=ep, stride=1))[1]
    assert float(outside[0]) < float(each) or hosts == 1


@given(share=st.floats(0.01, 1.0), h=st.integers(1, 100))
def test_frozen_masked_and_local_gradients_send_their_share(share: float, h: int) -> None:
    model, batch = small(), Batch(sequences=8, seq=32)
    full = planned(model, Layout(dp=8), batch)[("dp", "all-reduce")]
    for recipe in (Recipe(trainable=share), Recipe(keep=share)):
        assert planned(model, Layout(dp=8, recipe=recipe), batch)[("dp", "all-reduce")] == pytest.approx(
            full * share
        )
    local = planned(model, Layout(dp=8, recipe=Recipe(local_steps=h)), batch)
    assert local[("dp", "all-reduce")] == pytest.approx(full / h)
    packed = planned(model, Layout(dp=8, recipe=Recipe(compress="int8")), batch)
    assert packed[("dp", "all-reduce")] == pytest.approx(full / 4)


def test_zero_3_gathers_frozen_weights_in_every_pass() -> None:
    # Llama-3-8B with adapters on 2 hosts of 8: 15.06 GB an all-gather, two a micro-batch.
    model = load_model("llama3-8b")
    layout = Layout(dp=16, zero=3, recipe=Recipe(trainable=0.001))
    sent = planned(model, layout, Batch(sequences=16, seq=4096))
    assert sent[("dp", "all-gather")] / 2 / 1e9 == pytest.approx(15.06, abs=0.01)
    assert sent[("dp", "reduce-scatter")] / 1e9 < 0.04


def test_shards_in_a_host_keep_gathers_off_the_network() -> None:
    model = load_model("llama3-8b")
    batch = Batch(sequences=32, seq=8192)
    cluster = device_cluster("a100", 32)
    flat = predict(model, cluster, Layout(dp=32, zero=3), batch)
    hybrid = predict(model, cluster, Layout(dp=32, zero=3, shard=8), batch)

    def on_nic(prediction: object) -> int:
        frame = prediction.ledger.filter(link="nic").frame  # type: ignore[attr-defined]
        return int(frame["wire_nbytes"].sum())

    assert on_nic(hybrid) < on_nic(flat)
    kinds_on_nic = set(hybrid.ledger.filter(link="nic").frame["op"].to_list())
    assert kinds_on_nic == {"all-reduce"}


@given(
    size=st.integers(1, 64),
    stride=st.sampled_from([1, 2, 4, 8, 16]),
    op=st.sampled_from(["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]),
)
def test_links_together_carry_what_the_ledger_says(size: int, stride: int, op: str) -> None:
    cluster = device_cluster("h100", 1024)
    inside, outside = split(op, 1e9, reach(cluster, size=size, stride=stride))
    assert float(inside + outside) == pytest.approx(wire_nbytes(op, 10**9, size), rel=1e-9)
    assert float(outside) >= 0
    assert (size * stride <= 8) == (float(outside) == 0) or size == 1


def test_an_uneven_pipeline_sends_no_layer_twice() -> None:
    model = load_model("llama3.1-405b")
    layout = Layout(pp=8, virtual=8)
    assert chunk_counts(layout, model).sum() == 126
    assert [int(n) for n in chunk_counts(layout, model).sum(axis=1)] == list(chunk_layers(126, 64))
    assert len(kinds(model)) == 1
