"""Options of ``tonnage plan``, and the planner's values that they stand for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tonnage.plan import Batch, Cluster, Layout, Model, Recipe

DEGREES = ("dp", "tp", "pp", "cp", "ep")

LONGEST = 8192
"""Tokens of a sequence where nobody says: the model's longest, up to this."""


def whole(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**15:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def amount(text: str) -> float:
    """A number above 0, or a percentage."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What runs where."""
    group = parser.add_argument_group("what runs where")
    group.add_argument("--cluster", metavar="CLUSTER", help="h100x512, 4x8xA100, or a cluster.toml")
    group.add_argument("--nic", "--net", metavar="RATE", help="between hosts, a card: 400 (Gbit/s) or 50GB/s")
    group.add_argument(
        "--global-batch", type=whole, metavar="N", help="sequences a step (512, or what divides)"
    )
    group.add_argument(
        "--seq", type=whole, metavar="N", help=f"tokens a sequence (the model's, up to {LONGEST})"
    )


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """How the run is laid out."""
    group = parser.add_argument_group("layout; dp takes the cards that are left")
    for name in DEGREES:
        group.add_argument(f"--{name}", type=whole, metavar="N", help=f"degree of {name}")
    group.add_argument(
        "--virtual", type=whole, default=1, metavar="N", help="chunks of layers a stage holds (1)"
    )
    group.add_argument("--stages", metavar="A,B,…", help="layers of each chunk, where they are uneven")
    group.add_argument("--micro-batch", type=whole, default=1, metavar="N", help="sequences of one pass (1)")
    group.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="what is sharded (1); 3 is FSDP")
    group.add_argument("--shard", type=whole, metavar="N", help="ranks of a shard, for HSDP (all)")
    group.add_argument("--no-sp", action="store_true", help="tensor without sequence parallel")
    group.add_argument("--recompute", choices=("none", "selective", "full"), default="none", help="(none)")


def add_software_options(parser: argparse.ArgumentParser) -> None:
    """What the software does."""
    group = parser.add_argument_group("software")
    group.add_argument("--software", metavar="NAME", help="generation (megatron-core)")
    group.add_argument("--precision", metavar="P", help="bf16, fp16, fp8, fp8-cs, mxfp8, nvfp4")
    group.add_argument("--attention", metavar="A", help="eager, flash1, flash2, flash3")
    group.add_argument("--context", metavar="C", help="ring, ulysses, or auto: what sends less (auto)")
    group.add_argument("--optimizer", metavar="O", help="adam, adam-8bit, adam-paged, sgd, muon")
    group.add_argument("--grad-bytes", type=whole, metavar="N", help="bytes of a gradient element (4)")
    group.add_argument("--compress", metavar="C", help="gradients sent as bf16, fp16, int8, int4")
    group.add_argument("--keep", type=amount, metavar="X", help="share of the gradients that is sent")
    group.add_argument("--trainable", type=amount, metavar="X", help="share of the parameters that trains")
    group.add_argument("--lora", type=whole, metavar="R", help="adapters of rank R; all else is frozen")
    group.add_argument("--local-steps", type=whole, metavar="H", help="reduce every H steps only")


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The cluster that is named, with the NIC that is named."""
    from tonnage.plan import load_cluster, nic_rate

    cluster = load_cluster(args.cluster)
    return cluster.with_nic(nic_rate(args.nic)) if args.nic else cluster


def sequence_of(args: argparse.Namespace, model: Model) -> int:
    """Tokens of a sequence."""
    return int(args.seq or min(model.max_seq or LONGEST // 2, LONGEST))


def batch_of(args: argparse.Namespace, model: Model, cluster: Cluster) -> Batch:
    """The batch that is named, or about 512 sequences that the replicas can share out."""
    from tonnage.plan import Batch

    used = (args.tp or 1) * (args.pp or 1) * (args.cp or 1)
    each = (args.dp or max(1, cluster.num_devices // used)) * args.micro_batch
    return Batch(sequences=args.global_batch or max(each, 512 // each * each), seq=sequence_of(args, model))


def recipe_of(args: argparse.Namespace, model: Model) -> Recipe:
    """The software's recipe, changed by what is named."""
    from tonnage.errors import UsageError
    from tonnage.plan import software

    named = {
        "precision": args.precision,
        "attention": args.attention,
        "context": args.context,
        "optimizer": args.optimizer,
        "grad_nbytes": args.grad_bytes,
        "compress": args.compress,
        "keep": args.keep,
        "trainable": args.trainable,
        "local_steps": args.local_steps,
    }
    changes: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    if args.software is None:
        # Gradients are added up and sent in fp32 unless somebody says otherwise, or names a software.
        changes.setdefault("grad_nbytes", 4)
    if args.optimizer == "adam-paged":
        # What is paged out to the host includes the master copy.
        changes["master"] = False
    if args.lora:
        if args.trainable:
            raise UsageError("--lora and --trainable say the same", hint="give one of them")
        changes["trainable"] = adapter_share(model, args.lora)
    return software(args.software or "megatron-core", **changes)


def adapter_share(model: Model, rank: int) -> float:
    """Share of the parameters in adapters of this rank on every matrix outside the routed experts."""
    adapters = sum(
        count * rank * (m.fan_in + m.fan_out)
        for layer, count in model.layers
        for m in layer.matrices
        if m.part in ("attention", "mlp", "shared")
    )
    return min(1.0, adapters / model.params)


def layout_of(args: argparse.Namespace, cluster: Cluster, recipe: Recipe) -> Layout:
    """The layout that is named; data parallelism takes the cards that are left."""
    from tonnage.errors import LayoutError
    from tonnage.plan import Layout, nearest_divisor

    tp, pp, cp = args.tp or 1, args.pp or 1, args.cp or 1
    used = tp * pp * cp
    if args.dp is None and cluster.num_devices % used:
        raise LayoutError(
            f"tp {tp} x pp {pp} x cp {cp} = {used} does not divide {cluster.num_devices} cards",
            hint=f"use degrees that multiply to {nearest_divisor(cluster.num_devices, used)}",
        )
    dp = cluster.num_devices // used if args.dp is None else args.dp
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=args.ep or 1,
        sp=tp > 1 and not args.no_sp,
        virtual=args.virtual,
        zero=args.zero if args.zero is not None else int(dp * cp > 1),
        shard=args.shard or 0,
        micro_batch=args.micro_batch,
        recompute=args.recompute,
        stages=_stages(args.stages),
        recipe=recipe,
    )


def _stages(text: str | None) -> tuple[int, ...]:
    from tonnage.errors import UsageError

    parts = text.split(",") if text else []
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise UsageError(f"--stages {text!r} are no numbers", hint="write --stages 5,6,6,5")
    return tuple(int(part) for part in parts)
