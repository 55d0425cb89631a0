"""Predictions, searches and accuracy as JSON: one document with a version, no NaN in it."""

from __future__ import annotations

import dataclasses
from typing import Any

from tonnage.plan.accuracy import Accuracy
from tonnage.plan.predict import Prediction
from tonnage.plan.search import Found, Offer

SCHEMA = "tonnage.plan/1"


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """A prediction with all its figures in base units."""
    p = prediction
    recipe = dataclasses.asdict(p.layout.recipe)
    layout = {
        field.name: getattr(p.layout, field.name)
        for field in dataclasses.fields(p.layout)
        if field.name != "recipe"
    }
    return {
        "schema": SCHEMA,
        "model": {"name": p.model.name, "params": p.model.params, "active_params": p.model.active_params},
        "cluster": {
            "name": p.cluster.name,
            "device": p.cluster.device.name,
            "num_devices": p.cluster.num_devices,
            "nic_rate": p.cluster.nic.rate,
            "scaleup_rate": p.cluster.scaleup.rate,
        },
        "layout": {**layout, "stages": list(p.layout.stages)},
        "recipe": recipe,
        "batch": {"sequences": p.batch.sequences, "seq": p.batch.seq, "tokens": p.batch.tokens},
        "step_seconds": p.seconds,
        "parts": p.parts,
        "tokens_per_second_per_device": p.tokens_per_second_per_device,
        "mfu": p.mfu,
        "mfu_convention": p.convention,
        "peak_flops": p.peak,
        "memory_nbytes": {**p.memory, "total": p.memory_total},
        "memory_stage": p.memory_stage,
        "fits": p.fits,
        "movements": [
            {
                "rank": row["rank"],
                "kind": row["kind"],
                "op": row["op"],
                "group": row["group"],
                "group_size": row["group_size"],
                "link": row["link"],
                "calls": row["calls"],
                "nbytes": row["nbytes"],
                "wire_nbytes": row["wire_nbytes"],
                "seconds": row["stop"] - row["start"],
                "exposed": row["exposed"],
                "label": row["label"],
            }
            for row in p.ledger.movements
        ],
    }


def search_json(found: Found) -> dict[str, Any]:
    """A search's layouts, best first, with what the first gains over the second."""
    return {
        "schema": SCHEMA,
        "considered": found.considered,
        "dropped": found.dropped,
        "too_large": found.too_large,
        "best": [prediction_json(each) for each in found.best],
        "why": [dataclasses.asdict(each) for each in found.why],
    }


def offers_json(offers: list[Offer]) -> dict[str, Any]:
    """Clusters that meet a deadline, cheapest first."""
    return {
        "schema": SCHEMA,
        "offers": [
            {
                "cluster": each.prediction.cluster.name,
                "days": each.days,
                "device_hours": each.device_hours,
                "cost": each.cost or None,
                "prediction": prediction_json(each.prediction),
            }
            for each in offers
        ],
    }


def accuracy_json(accuracy: Accuracy) -> dict[str, Any]:
    """Errors by source, and of every run."""
    return {
        "schema": SCHEMA,
        "held_out": dataclasses.asdict(accuracy.held_out),
        "sources": [dataclasses.asdict(each) for each in accuracy.sources],
        "refused": [
            {"row": row, "source": source, "reason": reason} for row, source, reason in accuracy.refused
        ],
        "runs": [
            {
                "row": each.run.row,
                "source": each.run.source,
                "run": each.run.label,
                "tuned": each.run.tuned,
                "measured": each.run.seconds,
                "predicted": each.seconds,
                "baseline": each.baseline,
                "memory_measured": each.run.memory or None,
                "memory_predicted": each.memory,
            }
            for each in accuracy.judged
        ],
    }
