"""Published runs as the planner's questions: a row of a CSV file to model, cluster, layout and answer.

A row says what ran and how fast. What it leaves open (a micro-batch, whether anything was recomputed)
its authors chose well, since they published it: of the choices that fit in memory the planner takes
the one that it predicts fastest. What a row's source used (software, network) is in
``data/sources.toml``; columns ``software`` and ``nic_gbit`` in the file say it for one's own runs.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.errors import LayoutError, UsageError
from tonnage.plan import flops
from tonnage.plan.cluster import Cluster, device_cluster
from tonnage.plan.families import model_from_config
from tonnage.plan.grid import grid_of
from tonnage.plan.layout import Batch, Layout, Recipe, check, nearest_divisor
from tonnage.plan.load import preset, presets
from tonnage.plan.memory import worst_memory
from tonnage.plan.model import Model
from tonnage.plan.software import software
from tonnage.plan.steptime import step_time

NEEDED = ("source", "model", "layers", "hidden", "heads", "seq_len", "gpu", "n_gpus")
"""Columns that a file must have; see ``docs/accuracy.md`` for the others."""

GATED = (
    "llama",
    "qwen",
    "deepseek",
    "internlm",
    "nanotron",
    "mistral",
    "mixtral",
    "gemma",
    "gpt-oss",
    "phi-3",
)
"""Starts of the names of models whose MLP has a gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run.

    Attributes:
        row: its number in the file.
        source: key of the publication.
        label: model and size, for tables.
        model: the model.
        cluster: cards and network.
        layouts: the layout, or several where the row leaves choices open.
        batch: the batch.
        seconds: measured, of one step.
        memory: measured peak, bytes; 0 where none is printed.
        allocator: whether that is what the framework's allocator held, without driver and NCCL.
        hardware_flops: FLOP of a step, recomputation counted.
        tuned: whether the model's constants were set on this source.
        group: runs that answer the same question: equal model, cards and batch.
    """

    row: str
    source: str
    label: str
    model: Model
    cluster: Cluster
    layouts: tuple[Layout, ...]
    batch: Batch
    seconds: float
    memory: float
    allocator: bool
    tuned: bool
    group: tuple[object, ...]


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows of a file of runs.

    Raises:
        UsageError: it can't be read or lacks a column.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            names = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"can't read the runs: {error}", where=str(path), hint="give a CSV file with one run a line"
        ) from error
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise UsageError(
            f"the runs have no column {missing[0]!r}", where=str(path), hint=f"needed: {', '.join(NEEDED)}"
        )
    if not rows:
        raise UsageError("the file has no runs", where=str(path), hint="give one run a line")
    return rows


def run_of(row: Mapping[str, str]) -> Run:
    """The question and answer in one row.

    Raises:
        LayoutError: a value is missing or fits no layout.
    """
    cells = _Cells(row)
    what = " ".join(cells.text(name, "") for name in ("source", "model", "gpu", "precision"))
    facts = source_facts(cells.text("source"), notes=cells.text("notes", ""), what=what)
    model = _model(cells)
    cluster = _cluster(cells, facts)
    batch = Batch(sequences=_sequences(cells, cluster), seq=cells.number("seq_len"))
    recipe = _recipe(cells, facts, cluster)
    layouts = tuple(_layouts(cells, model, cluster, batch, recipe))
    seconds = _seconds(cells, model, batch, cluster, layouts[0])
    tuned = bool(facts.get("tuned")) and cluster.device.name.startswith(facts.get("tuned_gpu", ""))
    return Run(
        row=cells.text("row_id", "?"),
        source=cells.text("source"),
        label=f"{cells.text('model')} on {cells.number('n_gpus')} {cells.text('gpu')}",
        model=model,
        cluster=cluster,
        layouts=layouts,
        batch=batch,
        seconds=seconds,
        memory=cells.real("memory_gb_per_gpu") * _memory_unit(cells),
        allocator=facts.get("memory") == "allocator",
        tuned=tuned,
        group=(
            cells.text("model"),
            cluster.num_devices,
            cluster.device.name,
            batch,
            cells.text("precision", ""),
        ),
    )


def choose(run: Run) -> Layout:
    """The layout, or of several the one predicted fastest among those that fit in memory."""
    if len(run.layouts) == 1:
        return run.layouts[0]
    grid = grid_of(run.layouts, run.model, run.batch)
    needed, _ = worst_memory(run.model, grid, run.cluster)
    times = step_time(run.model, grid, run.cluster).total
    fits = needed <= run.cluster.device.memory
    # A run that was published fitted, whatever we think: then the smallest is nearest to it.
    best = np.argmin(np.where(fits, times, np.inf)) if fits.any() else np.argmin(needed)
    return run.layouts[int(best)]


@cache
def _sources() -> dict[str, dict[str, Any]]:
    text = resources.files("tonnage.plan").joinpath("data/sources.toml").read_text("utf-8")
    return tomllib.loads(text)


def source_facts(source: str, *, notes: str = "", what: str = "") -> dict[str, Any]:
    """What is known of a source: the longest key that its name starts with, as its parts change it.

    Args:
        source: name of the source.
        notes: the row's notes.
        what: source, model, card and precision of the row, with blanks between.
    """
    found = [key for key in _sources() if source.startswith(key)]
    facts = dict(_sources()[max(found, key=len)]) if found else {}
    for part in facts.pop("parts", []):
        if re.search(part.get("notes", ""), notes) and re.search(part.get("what", ""), what):
            facts |= part
    return facts


@dataclass(frozen=True, slots=True)
class _Cells:
    row: Mapping[str, str]

    def text(self, name: str, default: str | None = None) -> str:
        value = (self.row.get(name) or "").strip()
        if value:
            return value
        if default is None:
            raise LayoutError(f"the row names no {name}", hint=f"fill in the column {name}")
        return default

    def real(self, name: str) -> float:
        value = (self.row.get(name) or "").strip()
        try:
            number = float(value) if value else 0.0
        except ValueError as error:
            raise LayoutError(f"{name} is {value!r}", hint="write a number, or leave it empty") from error
        if not 0 <= number < float("inf"):
            raise LayoutError(f"{name} is {value!r}", hint="write a number of 0 or more")
        return number

    def number(self, name: str, default: int | None = None) -> int:
        value = int(self.real(name))
        if value >= 1:
            return value
        if default is None:
            raise LayoutError(f"the row gives no {name}", hint=f"fill in the column {name}")
        return default


def _model(cells: _Cells) -> Model:
    name = cells.text("model")
    layers, hidden, heads = cells.number("layers"), cells.number("hidden"), cells.number("heads")
    lowered = name.lower()
    known = _known(lowered, hidden)
    if known is not None:
        # A published variant may have fewer layers than the preset.
        depth = (
            "num_hidden_layers"
            if "num_hidden_layers" in known
            else "n_layer"
            if "n_layer" in known
            else "n_layers"
        )
        return model_from_config({**known, depth: layers}, name=name)
    gated = lowered.startswith(GATED)
    ffn = cells.number("ffn", 4 * hidden)
    vocab = cells.number("vocab", 32000 if gated else 51200)
    kv_heads = cells.number("kv_heads", heads)
    common = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
    }
    experts = cells.number("n_experts", 0)
    if experts:
        common |= {"num_experts": experts, "num_experts_per_tok": cells.number("top_k", 2)}
        common |= {"moe_intermediate_size": ffn, "head_dim": max(1, hidden // heads)}
        return model_from_config({"model_type": "qwen3_moe", **common}, name=name)
    if gated:
        return model_from_config(
            {"model_type": "llama", **common, "head_dim": max(1, hidden // heads)}, name=name
        )
    config: dict[str, Any] = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": ffn,
        "n_positions": cells.number("seq_len"),
        "vocab_size": vocab,
        "head_dim": max(1, hidden // heads),
        "num_key_value_heads": kv_heads,
    }
    if lowered.startswith("bloom"):
        config["model_type"] = "bloom"
    elif lowered.startswith("mpt"):
        config |= {"model_type": "mpt", "expansion_ratio": max(1, ffn // hidden)}
    elif lowered.startswith("nemotron"):
        config["tie_word_embeddings"] = False
    return model_from_config(config, name=name)


def _known(name: str, hidden: int) -> Mapping[str, Any] | None:
    """The preset of that name, when its width agrees and it holds more than the columns say."""
    special = ("deepseek", "qwen", "gpt-oss", "llama4", "gemma", "mixtral")
    if not name.startswith(special):
        return None
    try:
        found = preset(name)
    except LayoutError:
        return None
    return presets()[found.name] if found.hidden == hidden else None


def _cluster(cells: _Cells, facts: Mapping[str, Any]) -> Cluster:
    gpu, count = cells.text("gpu"), cells.number("n_gpus")
    cluster = device_cluster(gpu, count)
    per_host = cells.number("gpus_per_node", cluster.domain)
    # A tray of four in a rack of 72 is no domain of its own; a host of four PCIe cards is.
    if cluster.domain <= 8 and per_host < cluster.domain:
        cluster = dataclasses.replace(cluster, domain=per_host)
    rate = cells.real("nic_gbit") * 1e9 / 8
    if not rate:
        rate = facts.get("nic", 0.0)
        if cluster.device.name.startswith(("H100", "H200")) and "h100_nic" in facts:
            rate = facts["h100_nic"]
    return cluster.with_nic(rate) if rate else cluster


def _recipe(cells: _Cells, facts: Mapping[str, Any], cluster: Cluster) -> Recipe:
    name = cells.text("software", "")
    sharded = cells.real("zero_stage") >= 2
    if not name:
        name = facts.get("software", "fsdp" if sharded else "megatron-core")
        if sharded and "zero3" in facts:
            name = facts["zero3"]
        if cluster.device.name.startswith("A100") and "a100" in facts:
            name = facts["a100"]
        if cells.text("compiled", "").lower() == "yes" and "compiled" in facts:
            name = facts["compiled"]
    changes: dict[str, Any] = {}
    precision = _precision(cells.text("precision", ""))
    if precision:
        changes["precision"] = facts.get("fp8", "fp8") if precision == "fp8" else precision
    newer = cluster.device.name.startswith(("H", "B", "GB"))
    recipe = software(name)
    if recipe.attention == "flash3" and not newer:
        changes["attention"] = "flash2"
    for name in ("graphs", "blocking", "overlap_ep", "dispatch", "fused_experts", "low_attention"):
        if name in facts:
            changes[name] = facts[name]
    return dataclasses.replace(recipe, **changes)


def _precision(text: str) -> str:
    text = text.lower()
    if text.startswith("nvfp4"):
        return "nvfp4"
    if text.startswith(("mxfp8", "fp8-mx")):
        return "mxfp8"
    if text.startswith(("fp8", "float8")):
        return "fp8-cs" if text == "fp8-cs" else "fp8"
    return "fp16" if text.startswith("fp16") else "bf16" if text.startswith("bf16") else ""


def _layouts(cells: _Cells, model: Model, cluster: Cluster, batch: Batch, recipe: Recipe) -> Iterator[Layout]:
    dp, tp, pp, cp = _degrees(cells, cluster, batch)
    each = max(1, batch.sequences // dp)
    micro = [b for b in (1, 2, 4, 8, 16) if each % b == 0]
    if cells.real("micro_batch"):
        micro = [nearest_divisor(each, cells.number("micro_batch"))]
    virtual = [1]
    if pp > 1:
        virtual = [min(cells.number("virtual_stages", 1), max(1, (model.num_layers + 2) // pp))]
    if pp > 1 and recipe.interleaves and not cells.real("virtual_stages"):
        virtual = [v for v in (1, 2, 3, 4, 5, 6, 8) if v == 1 or _divides(model.num_layers, pp * v)]
    recompute = _recompute(cells.text("recompute", ""))
    zero = [int(cells.real("zero_stage"))] if cells.text("zero_stage", "") else [0, 1]
    ep = cells.number("ep", 1)
    along = cells.text("sequence_parallel", "")
    sp = tp > 1 and (along == "yes" or (along != "no" and recipe.overlap_tp))
    for b, v, (again, share), z in itertools.product(micro, virtual, recompute, zero):
        # Groups of micro-batches shorter than the pipeline are no interleaving.
        if v > 1 and not cells.real("virtual_stages") and each // b % pp:
            continue
        layout = Layout(
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep if (dp * cp * tp) % ep == 0 else nearest_divisor(dp * cp, ep),
            sp=sp,
            virtual=v,
            zero=z,
            micro_batch=b,
            recompute=again,
            recompute_share=share,
            recipe=recipe,
        )
        check(layout, model, batch, num_devices=cluster.num_devices)
        yield layout


def _degrees(cells: _Cells, cluster: Cluster, batch: Batch) -> tuple[int, int, int, int]:
    """dp, tp, pp and cp; dp is what the others leave, whatever the row prints for it."""
    tp, pp, cp = (cells.number(name, 1) for name in ("tp", "pp", "cp"))
    used = tp * pp * cp
    if cluster.num_devices % used:
        raise LayoutError(
            f"tp {tp} x pp {pp} x cp {cp} = {used} does not divide {cluster.num_devices} cards",
            hint="correct the row's degrees",
        )
    dp = cluster.num_devices // used
    if dp > batch.sequences:
        # Fewer sequences than replicas: the cards that are left share the sequences.
        dp = math.gcd(dp, batch.sequences)
        cp = cluster.num_devices // (tp * pp * dp)
    return dp, tp, pp, cp


def _divides(layers: int, chunks: int) -> bool:
    return layers % chunks == 0 or (layers + 2) % chunks == 0


def _recompute(text: str) -> list[tuple[Any, float]]:
    """What may have been recomputed, and in which share of the layers."""
    text = text.lower()
    if not text:
        return [("none", 1.0), ("selective", 1.0), *(("full", share) for share in (0.25, 0.5, 0.75, 1.0))]
    if text in ("selective-layer", "selective-op"):
        # torchtitan recomputes every other layer, or every other product with all that only moves bytes.
        return [("full", 0.5)]
    return [("selective" if text.startswith("selective") else "full" if text == "full" else "none", 1.0)]


def _sequences(cells: _Cells, cluster: Cluster) -> int:
    """The global batch; where a row has none, one micro-batch a replica."""
    used = cells.number("tp", 1) * cells.number("pp", 1) * cells.number("cp", 1)
    replicas = max(1, cluster.num_devices // used)
    return cells.number("global_batch", replicas * cells.number("micro_batch", 1))


def _memory_unit(cells: _Cells) -> float:
    # Megatron and DeepSpeed rows print what nvidia-smi says, in units of 2**30.
    return 2**30 if cells.text("source").startswith(("bigscience", "nanotron")) else 1e9


def _seconds(cells: _Cells, model: Model, batch: Batch, cluster: Cluster, layout: Layout) -> float:
    if cells.real("step_seconds"):
        return cells.real("step_seconds")
    if cells.real("tokens_per_s_per_gpu"):
        return batch.tokens / (cluster.num_devices * cells.real("tokens_per_s_per_gpu"))
    rate = cells.real("tflops_per_gpu") * 1e12
    if not rate:
        raise LayoutError(
            "the row has no result",
            hint="fill in step_seconds, tokens_per_s_per_gpu or tflops_per_gpu",
        )
    counted = flops.Convention(
        name="row",
        halved=cells.text("attn_causal_halved", "no") == "yes",
        embedding=False,
        recompute=cells.text("flops_basis", "model") == "hardware",
        source="the row's columns",
    )
    work = flops.flops_per_token(model, batch.seq, counted, recompute=layout.recompute) * batch.tokens
    return work / (cluster.num_devices * rate)
