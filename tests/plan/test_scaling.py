"""Laws of scaling, and the figures that shaped links gave."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.cli import main
from tonnage.errors import LayoutError
from tonnage.plan import (
    DEFAULT_RANKS,
    SCHEDULES,
    Batch,
    Cluster,
    Gradients,
    Layout,
    Link,
    cut_timing,
    device_cluster,
    early_cycle,
    gradient_profile,
    level_line,
    load_model,
    scale,
    scaling_json,
    scaling_rows,
    software,
    wire,
)

RANKS = st.sampled_from([1, 2, 3, 8, 12, 64, 1000, 16384])


@st.composite
def profiles(draw: st.DrawFn) -> Gradients:
    count = draw(st.integers(1, 8))
    times = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e-1)), min_size=count, max_size=count)
    sizes = draw(st.lists(st.integers(0, 50_000_000), min_size=count, max_size=count))
    return Gradients(
        sizes=(*sizes, 1000),
        ready=tuple(itertools.accumulate([*draw(times), 1e-3])),
        forward=(*draw(times), 1e-3),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    base = device_cluster("h100", 8, domain=draw(st.sampled_from([1, 4, 8])))
    return dataclasses.replace(
        base.with_nic(10.0 ** draw(st.floats(7, 11))),
        pod=draw(st.sampled_from([0, 64])),
        oversubscription=draw(st.sampled_from([1.0, 4.0])),
    )


@settings(max_examples=60, deadline=None)
@given(profile=profiles(), cluster=clusters(), ranks=RANKS, passes=st.integers(1, 3))
def test_no_step_is_shorter_than_its_computation_or_than_its_bytes_take(
    profile: Gradients, cluster: Cluster, ranks: int, passes: int
) -> None:
    found = scale(profile, cluster, ranks, passes=passes)
    assert found.compute == pytest.approx(passes * (sum(profile.forward) + max(profile.ready)))
    for name in SCHEDULES:
        assert 0 < found.efficiency(name) <= 1
        assert found.steps[name].seconds >= max(found.compute, found.steps[name].moving) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(profile=profiles(), cluster=clusters(), ranks=RANKS, latency=st.sampled_from([0.0, 1e-4]))
def test_early_is_slower_than_an_all_reduce_by_no_more_than_its_gathers_starts(
    profile: Gradients, cluster: Cluster, ranks: int, latency: float
) -> None:
    # With links whose steps cost nothing, a ring and a tree are alike, and both ways move the same bytes.
    still = [dataclasses.replace(link, hop=0.0, latency=latency) for link in (cluster.scaleup, cluster.nic)]
    found = scale(profile, dataclasses.replace(cluster, scaleup=still[0], nic=still[1]), ranks)
    steps = found.steps
    starts = latency * steps["tuned"].num_buckets
    assert steps["tuned"].seconds <= steps["ddp"].seconds * (1 + 1e-9)
    assert steps["early"].seconds <= steps["shard"].seconds * (1 + 1e-9)
    assert steps["early"].seconds <= (steps["tuned"].seconds + starts) * (1 + 1e-9)


def test_one_rank_computes_and_nothing_else() -> None:
    profile = Gradients(sizes=(4000,), ready=(2.0,), forward=(1.0,))
    found = scale(profile, device_cluster("h100", 8), 1, passes=2)
    assert all(found.steps[name].seconds == 6.0 and found.efficiency(name) == 1.0 for name in SCHEDULES)


def stepwise(profile: Gradients, cut: tuple[int, ...], reduce: Link, gather: Link, tick: float) -> float:
    """The early schedule, followed tick by tick."""
    spans = list(itertools.pairwise([0, *cut]))
    owed = [reduce.latency + sum(profile.sizes[a:b]) / reduce.bandwidth for a, b in spans]
    due = [gather.latency + sum(profile.sizes[a:b]) / gather.bandwidth for a, b in spans]
    ready = [max(profile.ready[:b]) for _, b in spans]
    compute = [sum(profile.forward[a:b]) for a, b in spans]
    backward, now, begun = max(profile.ready), 0.0, len(spans)
    while begun or any(each > 1e-12 for each in compute):
        waiting = [k for k, each in enumerate(owed) if each > 1e-12 and ready[k] <= now + 1e-12]
        if waiting:
            owed[waiting[0]] -= tick
        else:
            free = [k for k, each in enumerate(due) if each > 1e-12 and owed[k] <= 1e-12]
            if free:
                due[free[-1]] -= tick
        now += tick
        while begun and (begun == len(spans) or compute[begun] <= 1e-12):
            if due[begun - 1] > 1e-12 or now < backward:
                break
            begun -= 1
        if begun < len(spans) and compute[begun] > 1e-12:
            compute[begun] -= tick
    return now


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_early_formula_is_what_following_every_tick_gives(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    whole = st.lists(st.integers(1, 20), min_size=count, max_size=count)
    profile = Gradients(
        sizes=tuple(data.draw(whole)),
        ready=tuple(float(t) for t in itertools.accumulate(data.draw(whole))),
        forward=tuple(float(t) for t in data.draw(whole)),
    )
    inner = data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
    cut = (*sorted(inner), count)
    reduce = Link(rate=1.0, latency=float(data.draw(st.integers(0, 3))))
    gather = Link(rate=1.0, latency=float(data.draw(st.integers(0, 3))))
    exact = early_cycle(profile, cut, reduce, gather)
    assert exact <= cut_timing(profile, cut, reduce=reduce, gather=gather).cycle + 1e-9
    # A tick starts late what became free within it: at most once a bucket.
    assert stepwise(profile, cut, reduce, gather, 1.0) == pytest.approx(exact, abs=len(cut) + 1)


def sleeping_model(comm: float, ratio: float) -> Gradients:
    """The model of benchmarks/engine_vs_ddp.py, whose layers sleep for their share of the compute."""
    width, context = 384, 256
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    shapes = [(256, width), (context, width), *block * 6, (256, width)]
    total = sum(rows * columns for rows, columns in shapes)
    sizes, ready, forward, now = [], [], [], 0.0
    for rows, columns in reversed(shapes):
        share = comm / ratio * rows * columns / total
        now += share * 2 / 3
        sizes += [4 * rows, 4 * rows * columns]
        ready += [now, now]
        forward += [0.0, share / 3]
    return Gradients(sizes=tuple(sizes), ready=tuple(ready), forward=tuple(forward))


@pytest.mark.parametrize(("ranks", "measured"), [(2, 0.64), (4, 0.68)])
def test_it_predicts_what_shaped_links_of_one_gigabit_gave(ranks: int, measured: float) -> None:
    # Measured on the links: 95.7 % of the rate, and 0.3-0.5 ms for a small collective of two ranks.
    nic = Link(rate=125e6, efficiency=0.957, latency=4e-4, hop=1e-4)
    cluster = dataclasses.replace(device_cluster("h100", ranks, domain=1), nic=nic)
    nbytes = sum(sleeping_model(1.0, 1.0).sizes)
    profile = sleeping_model(2 * (ranks - 1) / ranks * nbytes / 125e6, 1.0)
    found = scale(profile, cluster, ranks)
    assert found.steps["early"].seconds / found.steps["ddp"].seconds == pytest.approx(measured, abs=0.04)


def layout(model: str = "llama3-8b", tp: int = 8, **recipe: object) -> tuple[Gradients, Cluster]:
    cluster = device_cluster("h100", 8)
    batch = Batch(sequences=8 // tp, seq=8192)
    made = Layout(dp=8 // tp, tp=tp, zero=0, recipe=software("megatron-core", grad_nbytes=4, **recipe))
    return gradient_profile(load_model(model), made, cluster, batch), cluster


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "qwen3-30b-a3b", "llama3.2-1b"])
def test_a_profile_holds_every_parameter_once(name: str) -> None:
    profile, _ = layout(name, tp=1)
    # The vocabulary is padded to a multiple of 128.
    assert sum(profile.sizes) / 4 == pytest.approx(load_model(name).params, rel=2e-3)
    assert list(profile.ready) == sorted(profile.ready)
    assert max(profile.ready) > sum(profile.forward) > 0


def test_two_levels_keep_their_efficiency_to_sixteen_thousand_ranks() -> None:
    profile, cluster = layout()
    found = [scale(profile, cluster, ranks, stride=8) for ranks in DEFAULT_RANKS]
    assert [each.ranks for each in found] == list(DEFAULT_RANKS)
    for each in found:
        assert each.efficiency("levels") > each.efficiency("tuned") >= each.efficiency("ddp")
    # A flat ring has a step for every rank: it ends up behind a tree, and that is not hidden.
    assert found[-1].efficiency("early") < found[-1].efficiency("ddp")
    assert found[-1].efficiency("levels") > 0.85 * found[0].efficiency("levels")


def test_one_host_has_one_level() -> None:
    cluster = device_cluster("h100", 8)
    inside = level_line("all-gather", 8, cluster)
    assert inside.latency < level_line("all-gather", 16, cluster).latency
    assert inside.bandwidth >= level_line("all-gather", 16, cluster).bandwidth


def test_fewer_bytes_help_where_the_link_is_slow_and_cost_the_card_its_passes() -> None:
    profile, cluster = layout()
    slow = cluster.with_nic(125e6)
    int8 = wire("int8", grad_nbytes=4, cluster=cluster)
    assert int8.share == pytest.approx(1 / 3.94, rel=1e-3)
    assert int8.encode > int8.decode > 0
    plain, sent = (scale(profile, slow, 64, stride=8, sent=each) for each in (None, int8))
    assert sent.steps["early"].seconds < 0.3 * plain.steps["early"].seconds
    assert sent.steps["ddp"] == plain.steps["ddp"]
    assert wire("none", grad_nbytes=4, cluster=cluster).share == 1.0
    assert wire("bf16", grad_nbytes=2, cluster=cluster).share == 1.0


def test_what_has_no_meaning_is_refused() -> None:
    profile, cluster = layout()
    model, batch = load_model("llama3-8b"), Batch(sequences=8, seq=8192)
    with pytest.raises(LayoutError, match="pp 2"):
        gradient_profile(model, Layout(dp=4, pp=2, zero=0), cluster, batch)
    with pytest.raises(LayoutError, match="ZeRO 3"):
        gradient_profile(model, Layout(dp=8, zero=3), cluster, batch)
    with pytest.raises(LayoutError, match="0 ranks"):
        scale(profile, cluster, 0)
    with pytest.raises(LayoutError, match="int3"):
        wire("int3", grad_nbytes=4, cluster=cluster)


def test_tables_and_documents_say_the_same() -> None:
    profile, cluster = layout()
    found = [scale(profile, cluster, 64, stride=8)]
    document = scaling_json(profile, found)
    row = document["scaling"][0]
    assert row["ranks"] == 64
    assert set(row["schedules"]) == set(SCHEDULES)
    shown = scaling_rows(found)[0]
    assert shown[0] == "64"
    assert shown[2] == f"{row['schedules']['ddp']['efficiency']:.1%}"


def test_the_command_prints_a_table_a_document_and_markdown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["plan", "gpt2-xl", "--cluster", "h100x64", "--micro-batch", "8", "--seq", "1024", "--engine"]
    command += ["--ranks", "8,64"]
    table = tmp_path / "scaling.md"
    assert main([*command, "--markdown", str(table)]) == 0
    assert "two levels" in capsys.readouterr().out
    assert table.read_text().count("\n") == 4
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in document["scaling"]] == [8, 64]
    assert main([*command, "--pp", "2", "--json"]) == 1
