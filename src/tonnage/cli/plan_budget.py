"""``tonnage plan MODEL --tokens N --days D``: the cheapest cluster for a deadline."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from tonnage.cli.plan_options import recipe_of, sequence_of
from tonnage.cli.plan_show import show_offers
from tonnage.cli.terminal import console, progress

if TYPE_CHECKING:
    from tonnage.plan import Cluster, Model

SEQUENCES = 1024
"""Sequences a step where nobody says: enough for a thousand replicas."""


def run(args: argparse.Namespace, model: Model) -> int:
    """Search each size of each card, and list those that are in time."""
    from tonnage.errors import UsageError
    from tonnage.plan import Batch, cheapest_cluster, offers_json

    if not args.tokens:
        raise UsageError("how many tokens in that time?", hint="add --tokens 2e12")
    clusters = _clusters(args)
    batch = Batch(sequences=args.global_batch or SEQUENCES, seq=sequence_of(args, model))
    recipe = recipe_of(args, model)
    with progress("clusters", shown=not args.json) as told:
        offers = cheapest_cluster(
            model, clusters, batch, tokens=args.tokens, days=args.days, recipe=recipe, progress=told
        )
    if args.json:
        print(json.dumps(offers_json(offers), allow_nan=False))
    else:
        show_offers(console(), offers[: args.top], args.lang)
    return 0


def _clusters(args: argparse.Namespace) -> list[Cluster]:
    """The cluster that was named, or each card that was, in every size and with its price."""
    from tonnage.errors import UsageError
    from tonnage.plan import device_cluster, load_cluster, nic_rate, sizes_of

    if args.cluster and args.cards:
        raise UsageError("--cluster and --cards say the same", hint="give one of them")
    prices = dict(_price(each) for each in args.price)
    if args.cluster:
        found = {args.cluster.lower(): load_cluster(args.cluster)}
    else:
        names = [name.strip() for name in (args.cards or "h100,h200,b200").split(",")]
        found = {name.lower(): device_cluster(name, 1) for name in names}
    unknown = [name for name in prices if name not in found]
    if unknown:
        raise UsageError(
            f"--price names {unknown[0]!r}, which is not asked about", hint=f"use {', '.join(found)}"
        )
    clusters = []
    for name, cluster in found.items():
        priced = dataclasses.replace(cluster, price=prices.get(name, cluster.price))
        if args.nic:
            priced = priced.with_nic(nic_rate(args.nic))
        clusters += [priced] if args.cluster else sizes_of(priced, most=args.most)
    return clusters


def _price(text: str) -> tuple[str, float]:
    from tonnage.errors import UsageError

    name, _, value = text.partition("=")
    try:
        price = float(value)
    except ValueError:
        price = -1.0
    if not 0 < price < float("inf"):
        raise UsageError(f"--price {text!r} is no price", hint="write --price h100=2.5")
    return name.strip().lower(), price
