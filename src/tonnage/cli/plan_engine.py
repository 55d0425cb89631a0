"""``tonnage plan MODEL --engine``: how the engine's schedules scale, beside torch DDP's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonnage.plan import Batch, Cluster, Gradients, Layout, Model, Scaled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the question's options."""
    group = parser.add_argument_group("scaling of data-parallel training")
    group.add_argument(
        "--engine", action="store_true", help="efficiency of the engine's schedules and of DDP, by ranks"
    )
    group.add_argument(
        "--ranks", type=_ranks, metavar="A,B,…", help="with --engine: data-parallel ranks (8,16,…,16384)"
    )


def run(args: argparse.Namespace, model: Model, cluster: Cluster, layout: Layout, batch: Batch) -> int:
    """Print the efficiencies; each rank's batch stays as it is in ``layout``."""
    from tonnage.plan import DEFAULT_RANKS, gradient_profile, scale, wire

    recipe = layout.recipe
    profile = gradient_profile(model, layout, cluster, batch)
    sent = wire(recipe.compress, grad_nbytes=recipe.grad_nbytes, cluster=cluster)
    found = [
        scale(
            profile,
            cluster,
            ranks,
            stride=layout.tp,
            rails=recipe.rails,
            passes=layout.num_micro_batches(batch),
            sent=sent,
        )
        for ranks in args.ranks or DEFAULT_RANKS
    ]
    _show(args, model, cluster, layout, profile, found)
    return 0


def _show(
    args: argparse.Namespace,
    model: Model,
    cluster: Cluster,
    layout: Layout,
    profile: Gradients,
    found: list[Scaled],
) -> None:
    from tonnage.plan import SCALING_COLUMNS, scaling_json, scaling_rows
    from tonnage.units import format_bandwidth, format_size, format_time

    if args.json:
        names = {"schema": "tonnage.plan/1", "model": model.name, "cluster": cluster.name}
        sent = {"tp": layout.tp, "compress": layout.recipe.compress, "nic_rate": cluster.nic.rate}
        print(json.dumps({**names, **sent, **scaling_json(profile, found)}, allow_nan=False))
        return
    title = (
        f"{model.name} on {cluster.device.name}, NIC {format_bandwidth(cluster.nic.rate)} a card: "
        f"{format_size(sum(profile.sizes))} of gradients, backward pass {format_time(max(profile.ready))}"
    )
    rows = scaling_rows(found)
    if args.markdown:
        _write(Path(args.markdown), [SCALING_COLUMNS, ("---:",) * len(SCALING_COLUMNS), *rows])
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in SCALING_COLUMNS:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table, highlight=False)


def _write(path: Path, rows: list[tuple[str, ...]]) -> None:
    from tonnage.errors import UsageError

    try:
        path.write_text("".join(f"| {' | '.join(row)} |\n" for row in rows), "utf-8")
    except OSError as error:
        raise UsageError(f"can't write the table: {error.strerror}", where=str(path)) from error


def _ranks(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers of ranks: write 8,64,512")
    return tuple(int(part) for part in parts)
