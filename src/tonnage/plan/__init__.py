"""Predicts the bytes, time and memory of a training run before anyone buys the cluster."""

from tonnage.plan.accuracy import Accuracy, Judged, SourceAccuracy, measure
from tonnage.plan.cluster import (
    Cluster,
    Device,
    Link,
    device_cluster,
    device_names,
    load_cluster,
    read_cluster,
)
from tonnage.plan.cut import Cut, Gradients, Timing, best_cut, capped_cut, cut_timing, greedy_cut
from tonnage.plan.document import accuracy_json, offers_json, prediction_json, search_json
from tonnage.plan.explain import (
    ACCURACY_COLUMNS,
    accuracy_markdown,
    accuracy_rows,
    headline,
    layout_text,
    ledger_table,
    measured_lines,
    memory_rows,
    part_rows,
    working,
)
from tonnage.plan.fitting import changes_text, nearest_fit
from tonnage.plan.flops import CONVENTIONS, Convention, convention, convert_mfu, flops_per_token
from tonnage.plan.job import measure_here
from tonnage.plan.layout import Batch, Layout, Recipe, nearest_divisor
from tonnage.plan.load import load_model, presets
from tonnage.plan.model import Layer, Matrix, Model
from tonnage.plan.overlap import text_timeline
from tonnage.plan.page import plan_page
from tonnage.plan.predict import Prediction, predict
from tonnage.plan.probe import SIZES, Measured, Sample, fit_line, measured_table, to_toml
from tonnage.plan.runs import Run, read_rows
from tonnage.plan.scaling import (
    DEFAULT_RANKS,
    SCALING_COLUMNS,
    SCHEDULES,
    Scaled,
    ScaledStep,
    Wire,
    early_cut,
    early_cycle,
    gradient_profile,
    level_line,
    scale,
    scaling_json,
    scaling_rows,
    wire,
)
from tonnage.plan.search import Found, Offer, cheapest_cluster, legal_layouts, search, sizes_of, slowest_nic
from tonnage.plan.software import SOFTWARE, software
from tonnage.plan.whatif import Scenario, change, nic_rate
from tonnage.plan.words import Language, say

__all__ = [
    "ACCURACY_COLUMNS",
    "CONVENTIONS",
    "DEFAULT_RANKS",
    "SCALING_COLUMNS",
    "SCHEDULES",
    "SIZES",
    "SOFTWARE",
    "Accuracy",
    "Batch",
    "Cluster",
    "Convention",
    "Cut",
    "Device",
    "Found",
    "Gradients",
    "Judged",
    "Language",
    "Layer",
    "Layout",
    "Link",
    "Matrix",
    "Measured",
    "Model",
    "Offer",
    "Prediction",
    "Recipe",
    "Run",
    "Sample",
    "Scaled",
    "ScaledStep",
    "Scenario",
    "SourceAccuracy",
    "Timing",
    "Wire",
    "accuracy_json",
    "accuracy_markdown",
    "accuracy_rows",
    "best_cut",
    "capped_cut",
    "change",
    "changes_text",
    "cheapest_cluster",
    "convention",
    "convert_mfu",
    "cut_timing",
    "device_cluster",
    "device_names",
    "early_cut",
    "early_cycle",
    "fit_line",
    "flops_per_token",
    "gradient_profile",
    "greedy_cut",
    "headline",
    "layout_text",
    "ledger_table",
    "legal_layouts",
    "level_line",
    "load_cluster",
    "load_model",
    "measure",
    "measure_here",
    "measured_lines",
    "measured_table",
    "memory_rows",
    "nearest_divisor",
    "nearest_fit",
    "nic_rate",
    "offers_json",
    "part_rows",
    "plan_page",
    "predict",
    "prediction_json",
    "presets",
    "read_cluster",
    "read_rows",
    "say",
    "scale",
    "scaling_json",
    "scaling_rows",
    "search",
    "search_json",
    "sizes_of",
    "slowest_nic",
    "software",
    "text_timeline",
    "to_toml",
    "wire",
    "working",
]
