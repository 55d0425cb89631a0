"""A prediction in words: the headline, the rows of its tables, and the working behind each figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tonnage.plan import flops
from tonnage.plan.accuracy import Accuracy, SourceAccuracy
from tonnage.plan.collectives import wire_share
from tonnage.plan.grid import grid_of
from tonnage.plan.layout import Layout
from tonnage.plan.predict import Prediction
from tonnage.plan.rows import stage_flows
from tonnage.plan.search import slowest_nic
from tonnage.plan.traffic import FULLEST, activation_nbytes, rank_params
from tonnage.plan.words import LABELS_ZH, Language, say
from tonnage.units import format_bandwidth, format_rate, format_size, format_time

Rows = list[tuple[str, ...]]


def headline(prediction: Prediction, lang: Language = "en") -> str:
    """One sentence with what matters most."""
    p = prediction
    nic = _link_nbytes(p, ("nic", "spine"))
    inside = _link_nbytes(p, ("nvlink", "pcie", "loopback"))
    exposed = sum(p.parts[name] for name in ("tp", "cp", "ep", "dp", "pp")) / p.seconds
    if lang == "zh":
        return (
            f"{p.model.name}，{p.cluster.num_devices} 张 {p.cluster.device.name}：每步 {format_time(p.seconds)}，"
            f"每卡 {p.tokens_per_second_per_device:,.0f} tokens/s，MFU {p.mfu:.1%}（{p.convention} 口径，"
            f"峰值 {_tera(p.peak)} TFLOP/s）。每步单卡跨机发送 {format_size(nic)}，机内发送 {format_size(inside)}；"
            f"暴露通信占 {exposed:.1%}。显存 {p.memory_total / 2**30:.1f} GiB，{say('fits' if p.fits else 'does not fit', lang)}"
        )
    return (
        f"{p.model.name} on {p.cluster.num_devices} {p.cluster.device.name}: {format_time(p.seconds)} a step, "
        f"{p.tokens_per_second_per_device:,.0f} tokens/s a card, MFU {p.mfu:.1%} ({p.convention} convention, peak "
        f"{_tera(p.peak)} TFLOP/s). A card sends {format_size(nic)} a step between hosts and "
        f"{format_size(inside)} inside; {exposed:.1%} of the step waits for them. Memory "
        f"{p.memory_total / 2**30:.1f} GiB of {p.cluster.device.memory / 2**30:.1f}: "
        f"{say('fits' if p.fits else 'does not fit', lang)}"
    )


def _tera(rate: float) -> str:
    """A rate in units of 1e12, with digits where it is below one."""
    return f"{rate / 1e12:.0f}" if rate >= 1e12 else f"{rate / 1e12:.3g}"


def _link_nbytes(prediction: Prediction, links: Sequence[str]) -> float:
    """Bytes that the busiest of the ledger's ranks sends over these links."""
    frame = prediction.ledger.filter(link=list(links)).movements.frame
    by_rank = frame.group_by("rank").agg(
        frame["wire_nbytes"].sum() if frame.is_empty() else _sum("wire_nbytes")
    )
    return float(by_rank["wire_nbytes"].max() or 0) if len(by_rank) else 0.0  # type: ignore[arg-type]


def _sum(name: str) -> Any:
    import polars as pl

    return pl.col(name).sum()


def layout_text(layout: Layout) -> str:
    """A layout in a few words, without what is at its default: ``dp16 tp8 pp4 zero1 mb1 sp``."""
    parts = [
        f"{name}{getattr(layout, name)}"
        for name in ("dp", "tp", "pp", "cp", "ep")
        if getattr(layout, name) > 1
    ]
    if layout.virtual > 1:
        parts.append(f"v{layout.virtual}")
    parts += [f"zero{layout.zero}", f"mb{layout.micro_batch}"]
    if layout.shard:
        parts.append(f"shard{layout.shard}")
    if layout.recompute != "none":
        share = "" if layout.recompute_share == 1 else f" {layout.recompute_share:.0%}"
        parts.append(f"recompute-{layout.recompute}{share}")
    if layout.tp > 1:
        parts.append("sp" if layout.sp else "no-sp")
    return " ".join(parts)


def part_rows(prediction: Prediction, lang: Language = "en") -> Rows:
    """The step's seconds: part, time, share."""
    rows = [
        (say(name, lang), format_time(value), f"{value / prediction.seconds:.1%}")
        for name, value in prediction.parts.items()
        if value > 1e-9 * prediction.seconds
    ]
    return [*rows, (say("total", lang), format_time(prediction.seconds), "100.0%")]


def memory_rows(prediction: Prediction, lang: Language = "en") -> Rows:
    """The fullest card's memory: part, size."""
    rows = [(say(name, lang), f"{value / 2**30:.2f} GiB") for name, value in prediction.memory.items()]
    return [*rows, (say("total", lang), f"{prediction.memory_total / 2**30:.2f} GiB")]


def ledger_table(prediction: Prediction, lang: Language = "en", *, rank: int | None = None) -> Rows:
    """The ledger's movements of a rank: what, collective, group, link, calls, sent, time, exposed.

    Without a rank it is that of the fullest stage.
    """
    ranks = prediction.ledger.ranks
    # Of three ranks shown, the fullest stage's is the middle one; two are first and last.
    wanted = rank if rank is not None else ranks[len(ranks) // 2]
    rows: Rows = []
    for row in prediction.ledger.movements:
        if row["rank"] != wanted:
            continue
        label, inside, _ = row["label"].partition(", inside the host")
        if lang == "zh":
            label, inside = LABELS_ZH.get(label, label), "（机内）" if inside else ""
        rows.append(
            (
                label + inside,
                row["op"],
                f"{row['group']} {row['group_size']}",
                row["link"],
                f"{row['calls']:,}",
                format_size(row["wire_nbytes"]),
                format_time(row["stop"] - row["start"]),
                format_time(row["exposed"]),
            )
        )
    return rows


def working(prediction: Prediction, lang: Language = "en") -> list[str]:
    """How the main figures came about, term by term, with units."""
    p = prediction
    layout, model, batch = p.layout, p.model, p.batch
    grid = grid_of([layout], model, batch)
    dense, routed = (float(np.ravel(v)[0]) for v in rank_params(model, grid, FULLEST))
    x = float(np.ravel(activation_nbytes(model, grid))[0])
    m = layout.num_micro_batches(batch)
    how = flops.convention(p.convention)
    token = flops.flops_per_token(model, batch.seq, how, recompute=layout.recompute)
    lines = [
        f"parameters: {model.params:,}; {model.active_params:,} met by a token",
        f"ranks: dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {layout.num_ranks}",
        f"micro-batches: {batch.sequences} sequences / (dp {layout.dp} x micro-batch {layout.micro_batch}) = {m}",
        f"parameters on a card of the fullest stage: P = {dense:,.0f}"
        + (f" + {routed:,.0f} in its experts" if routed else ""),
        f"one activation: X = s B h 2 bytes / c = {batch.seq} x {layout.micro_batch} x {model.hidden} x 2 / "
        f"{layout.cp} = {format_size(x)}",
    ]
    for flow, times in stage_flows(model, grid, p.cluster, FULLEST):
        calls, size = float(np.ravel(flow.calls)[0]) * times, int(np.ravel(flow.to.size)[0])
        if calls <= 0 or size < 2:
            continue
        payload = float(np.ravel(flow.nbytes)[0])
        share = float(np.ravel(wire_share(flow.op, flow.to.size))[0])
        lines.append(
            f"{flow.group} {flow.label}, {flow.op}: {calls:,.0f} calls x {format_size(payload)} x "
            f"{share:.4f} ({flow.op} over {size}) = {format_size(calls * payload * share)} sent a card"
        )
    lines += [
        f"FLOP: {token / 1e9:.2f} GFLOP a token ({how.name}: attention {'halved' if how.halved else 'whole'}, "
        f"recomputation {'counted' if how.recompute else 'not counted'}; {how.source})",
        f"MFU: {token / 1e9:.2f} GFLOP x {batch.tokens:,} tokens / ({p.seconds:.3f} s x {layout.num_ranks} cards x "
        f"{_tera(p.peak)} TFLOP/s, dense {layout.recipe.precision} peak) = {p.mfu:.1%}",
        f"links: {p.cluster.scaleup_level} {format_bandwidth(p.cluster.scaleup.rate)} at "
        f"{p.cluster.scaleup.efficiency:.0%}, nic {format_rate(p.cluster.nic.rate)} at {p.cluster.nic.efficiency:.0%}, "
        f"a card, one direction",
    ]
    slow = slowest_nic(p)
    lines.append(
        "slowest NIC that costs at most 5 %: any, nothing is sent between hosts"
        if slow == 0
        else f"slowest NIC that costs at most 5 %: {format_rate(slow)} a card"
    )
    if lang == "zh":
        lines.insert(0, "推导（公式与单位保留英文，便于对照文献）：")
    return lines


def measured_lines(prediction: Prediction, seconds: float, lang: Language = "en") -> list[str]:
    """What a measured step time says of the links, when computation went as predicted.

    Args:
        prediction: the run as planned.
        seconds: measured, of one step.
        lang: of the sentences.
    """
    p = prediction
    moved = p.ledger.movements.frame.group_by("group", "link").agg(_sum("wire_nbytes"))
    heaviest = moved.sort("wire_nbytes").tail(1).to_dicts()
    error = f"{p.seconds / seconds - 1:+.0%}"
    lines = [
        say("measured", lang).format(
            measured=format_time(seconds), predicted=format_time(p.seconds), error=error
        )
    ]
    left = seconds - p.parts["compute"] - p.parts["optimizer"] - p.parts["bubble"]
    if not heaviest or left <= 0:
        return [*lines, say("not the links", lang)]
    group, link = heaviest[0]["group"], heaviest[0]["link"]
    ranks = len(p.ledger.ranks)
    rate = float(heaviest[0]["wire_nbytes"]) / ranks / left
    line = p.cluster.nic.rate if link in ("nic", "spine") else p.cluster.scaleup.rate
    lines.append(
        say("implied", lang).format(
            size=format_size(heaviest[0]["wire_nbytes"] / ranks),
            group=group,
            link=link,
            left=format_time(left),
            rate=format_bandwidth(rate),
            share=f"{rate / line:.1%}",
        )
    )
    if rate < 0.1 * line:
        lines.append(say("implausible", lang).format(link=link))
    return lines


def accuracy_rows(accuracy: Accuracy) -> Rows:
    """The accuracy table: one row a source, the held-out ones together last."""
    return [_source_row(each) for each in [*accuracy.sources, accuracy.held_out]]


ACCURACY_COLUMNS = (
    "source",
    "use",
    "rows",
    "refused",
    "MAPE",
    "bias",
    "worst",
    "baseline MAPE",
    "memory: rows, median, bias",
    "tau of best (pairs)",
    "tau, same question (pairs)",
    "regret",
)


def _source_row(each: SourceAccuracy) -> tuple[str, ...]:
    memory = (
        ""
        if not each.memory_rows
        else f"{each.memory_rows}, {_percent(each.memory_median, sign=False)}, {_percent(each.memory_bias)}"
    )
    return (
        each.source,
        "tuned on" if each.tuned else "held out",
        str(each.rows),
        str(each.refused),
        _percent(each.mape, sign=False),
        _percent(each.bias),
        _percent(each.worst),
        _percent(each.baseline, sign=False),
        memory,
        "" if each.tau is None else f"{each.tau:.2f} of {each.tau_best:.2f} ({each.pairs})",
        "" if each.tau_same is None else f"{each.tau_same:.2f} ({each.pairs_same})",
        _percent(each.regret, sign=False),
    )


def _percent(value: float | None, *, sign: bool = True) -> str:
    if value is None:
        return ""
    return f"{value:+.1%}" if sign else f"{value:.1%}"


def accuracy_markdown(accuracy: Accuracy) -> str:
    """The accuracy table as a page, with what each column means."""
    rows = accuracy_rows(accuracy)
    table = [
        "| " + " | ".join(ACCURACY_COLUMNS) + " |",
        "|" + "|".join(" --- " if i < 2 else " ---: " for i in range(len(ACCURACY_COLUMNS))) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    refused = [f"- row {row} of {source}: {reason}" for row, source, reason in accuracy.refused]
    return _PAGE.format(table="\n".join(table), refused="\n".join(refused) or "None.")


_PAGE = """# Accuracy of the planner

This page is written by `tonnage plan accuracy RUNS.csv --markdown docs/accuracy.md`. Each row of the file
is a published training run; the planner sees what ran, not how fast. Your own runs work the same way: the
columns are `source, model, layers, hidden, heads, kv_heads, ffn, vocab, n_experts, top_k, seq_len, gpu,
n_gpus, gpus_per_node, dp, tp, pp, cp, ep, virtual_stages, zero_stage, micro_batch, global_batch, recompute,
precision`, one of `step_seconds, tokens_per_s_per_gpu, tflops_per_gpu` as the result, `memory_gb_per_gpu`
where known, and, for runs of nobody's table, `software` and `nic_gbit`.

{table}

- **error** is predicted / measured - 1. MAPE is the mean of its size, bias its mean.
- **tuned on**: the three constants that were fitted (`IN_TRAINING`, `STREAM` and the rate of the first flash
  attention, in `plan/compute.py`) were set on these rows alone. Everything else has a source that is no
  training run: data sheets, matrix product and collective benchmarks, papers on attention kernels, and a
  measurement of PyTorch's cost a kernel.
- **held out**: no constant was set on these rows. They were looked at to find what the model had *left out*:
  a first pass stood at 21 %. What was then added comes from elsewhere, each with its source in the code: the
  power limit of newer cards (benchmarks of random matrices), the older instructions of flash attention 2 on
  Hopper, narrow heads, alignment, serial sends and separate gradient sums in DeepSpeed's engine, uneven stages,
  recomputation of a part of the layers, quantisation passes, the host's cost of a kernel and a collective,
  tokens sent once to a rank, the wait for the experts' counts, the measured share of their exchange that hides,
  and attention on cards with few exponentials.
  Which software a source ran (`plan/data/sources.toml`) was reconsidered in that pass too: NeMo and Megatron of
  early 2024 before cuDNN's attention, llm-foundry the same on H100 as on A100, and for each row of
  Megatron-Bridge what the recipe of that release turned on (graphs, dispatcher, overlap). So the held-out figures are those
  of a model whose *structure* has seen these runs and whose constants have not; runs that nobody has shown it
  may fare worse.
- **baseline** is one constant: FLOP / (cards x peak x share) x (1 + (p - 1) / (m v)), its share the median of
  the other sources on that family of cards.
- **tau** is Kendall's over all pairs of a source. The best there can be is that of somebody who knew the median
  of all runs written down alike: on BLOOM, where one layout took from 116 to 163 s, not 1; **same question** counts only pairs of one model on the same
  cards and batch whose times differ by more than 5 %, the noise of a published number.
- **regret** is what the layout predicted fastest took more than the fastest measured, on average over such
  groups.
- What a row leaves open (micro-batch, interleaving, recomputation) is taken as the fastest choice that fits.
- `vtrain-single` is kept out of the last row: small runs, bound by the host, would decide it alone.

## Refused rows

{refused}
"""
