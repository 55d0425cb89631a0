"""Predictions a second, and seconds of two searches, on one core.

llm-analysis is asked too where it is installed (``pip install llm-analysis``). Calculon has no package;
its figure in the documentation was measured from its repository.

    OMP_NUM_THREADS=1 python benchmarks/plan_speed.py [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from tonnage.plan import Batch, Layout, device_cluster, legal_layouts, load_model, predict, search, software
from tonnage.plan.grid import grid_of
from tonnage.plan.memory import worst_memory
from tonnage.plan.steptime import step_time


def best_of(repeat: int, call: Callable[[], Any]) -> float:
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def vectorised() -> dict[str, float]:
    """Time, memory and legality of every layout of 70B on 512 cards, through the grid."""
    model, cluster = load_model("llama3-70b"), device_cluster("h100", 512)
    batch, recipe = Batch(sequences=512, seq=8192), software("megatron-core")

    def everything() -> int:
        layouts = list(legal_layouts(model, cluster, batch, recipe))
        grid = grid_of(layouts, model, batch)
        step_time(model, grid, cluster)
        worst_memory(model, grid, cluster)
        return len(layouts)

    count = everything()
    seconds = best_of(3, everything)
    return {"layouts": count, "seconds": seconds, "per_second": count / seconds}


def single() -> float:
    """Predictions a second one at a time, each with its simulation and ledger."""
    model, cluster = load_model("llama3-70b"), device_cluster("h100", 512)
    layout = Layout(dp=16, tp=8, pp=4, sp=True, zero=1, recipe=software("megatron-core"))
    batch = Batch(sequences=512, seq=8192)
    return 20 / best_of(3, lambda: [predict(model, cluster, layout, batch) for _ in range(20)])


def searched(name: str, cards: int, sequences: int) -> dict[str, float]:
    model, cluster = load_model(name), device_cluster("h100", cards)
    batch = Batch(sequences=sequences, seq=8192)
    start = time.perf_counter()
    found = search(model, cluster, batch, recipe=software("megatron-core"))
    return {
        "seconds": time.perf_counter() - start,
        "considered": found.considered,
        "step_seconds": found.best[0].seconds,
    }


def llm_analysis() -> float | None:
    """Its predictions a second in this process, for the model that it ships; nothing where it isn't installed."""
    if importlib.util.find_spec("llm_analysis") is None:
        return None
    from llm_analysis.analysis import LLMAnalysis
    from llm_analysis.config import (
        ParallelismConfig,
        get_dtype_config_by_name,
        get_gpu_config_by_name,
        get_model_config_by_name,
    )

    logging.disable(logging.WARNING)  # it logs each question; we time its answers
    analysis = LLMAnalysis(
        get_model_config_by_name("facebook_opt-125m"),
        get_gpu_config_by_name("a100-sxm-80gb"),
        get_dtype_config_by_name("w16a16e16"),
        ParallelismConfig(tp_size=1, pp_size=1, dp_size=8),
    )
    return 50 / best_of(3, lambda: [analysis.training(batch_size_per_gpu=1, seq_len=512) for _ in range(50)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {
        "vectorised": vectorised(),
        "single_per_second": single(),
        "search_70b_on_512": searched("llama3-70b", 512, 512),
        "search_405b_on_16384": searched("llama3.1-405b", 16384, 2048),
        "llm_analysis_per_second": llm_analysis(),
    }
    if args.json:
        print(json.dumps(found))
        return
    grid = found["vectorised"]
    print(
        f"vectorised: {grid['per_second']:,.0f} predictions/s ({grid['layouts']:,} layouts in {grid['seconds']:.3f} s)"
    )
    print(f"one at a time, with simulation and ledger: {found['single_per_second']:,.0f} predictions/s")
    for name in ("search_70b_on_512", "search_405b_on_16384"):
        each = found[name]
        print(
            f"{name}: {each['seconds']:.2f} s, {each['considered']:,} layouts, best {each['step_seconds']:.2f} s a step"
        )
    peer = found["llm_analysis_per_second"]
    print(f"llm-analysis: {peer:,.0f} predictions/s" if peer else "llm-analysis: not installed, not compared")


if __name__ == "__main__":
    main()
