"""The machine: a card, how many, and the links between them by level.

Cards stand in *scale-up domains* (NVLink), domains reach each other through one NIC a card, and
beyond a *pod* the network may be oversubscribed (spine). A level has a latency, a rate and the share
of that rate that collectives reach.

The constants of this module hold for all clusters alike; a TOML file of ``tonnage probe`` replaces
them by measured ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tonnage.errors import LayoutError, UnitError
from tonnage.units import format_bandwidth, parse_rate

USABLE = 0.989 * 2**30 / 1e9
"""Bytes that PyTorch finds on a card for each that its maker names: a card of "80 GB" has 80 GiB, of which the
driver keeps 1 % (79.1 GiB in PyTorch's out-of-memory messages on A100 and H100, 95.04 of 96 in torchtitan's
logs)."""

UNMEASURED_MATMUL = 0.8
"""Share of the peak that the best matrix product reaches where nobody measured: between H100 (80 %)
and B200 (78 %) of stas00/ml-engineering's table."""

UNMEASURED_SUSTAINED = 0.93
"""Share of the best product that a card keeps up with random numbers, where nobody measured: the mean
of A100 (0.95), H100 (0.90) and B200 (0.93); see ``data/devices.toml``."""

NVLINK_EFFICIENCY = 0.77
"""Bus bandwidth of NCCL's large all-reduce over the line rate: about 230 of 300 GB/s on eight A100,
360 of 450 on eight H100 (nccl-tests figures as collected in stas00/ml-engineering network/README.md)."""

NIC_EFFICIENCY = 0.85
"""The same between hosts: about 21 of 25 GB/s a card over InfiniBand HDR (same table)."""

NVLINK_LATENCY = 8e-6
"""Seconds before the first byte of a collective in a domain: launch and handshake of a small NCCL
call, 10-20 µs on eight cards as nccl-tests prints it."""

NIC_LATENCY = 20e-6
"""The same with the network: 20-40 µs as nccl-tests prints it for two hosts."""

HOP_LATENCY = 1.0e-6
"""Seconds a further step in the domain (nccl-tests, growth with the number of ranks)."""

NIC_HOP_LATENCY = 4e-6
"""Seconds a further step between hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One level in one direction.

    Attributes:
        rate: bytes per second of the line, per card.
        efficiency: share of it that a large collective reaches.
        latency: seconds of a collective that moves next to nothing.
        hop: seconds that each further step adds.
    """

    rate: float
    efficiency: float = 1.0
    latency: float = 0.0
    hop: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a large collective reaches."""
        return self.rate * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A card.

    Attributes:
        name: as in the table of presets.
        flops: peak FLOP/s by format (``bf16``, ``fp8``, ``fp4``), dense.
        matmul: FLOP/s of the best measured bf16 matrix product.
        sustained: FLOP/s of large products of random numbers by format.
        mma: share of the peak that instructions of the A100's generation reach.
        exps: exponentials a FLOP of matrix products, over H100's.
        memory: bytes.
        hbm: bytes per second of its memory.
        sms: processors that share the tiles of a matrix product.
        source: where the figures stand.
        weak: which of them are from memory or in dispute.
    """

    name: str
    flops: dict[str, float] = field(hash=False)
    matmul: float
    sustained: dict[str, float] = field(hash=False)
    memory: float
    hbm: float
    sms: int
    mma: float = 1.0
    exps: float = 1.0
    source: str = ""
    weak: str = ""

    def peak(self, precision: str) -> float:
        """Peak FLOP/s of the matrix products in this precision.

        Raises:
            LayoutError: the card has no such format.
        """
        fmt = _FORMATS.get(precision, precision)
        if fmt not in self.flops:
            raise LayoutError(
                f"{self.name} has no {precision} matrix units",
                hint=f"use {' or '.join(sorted(self.flops))}",
            )
        return self.flops[fmt]

    def rate(self, precision: str) -> float:
        """FLOP/s that large matrix products of random numbers reach in this precision.

        Raises:
            LayoutError: the card has no such format.
        """
        peak = self.peak(precision)
        if precision in self.sustained:
            return self.sustained[precision]
        fmt = _FORMATS.get(precision, precision)
        # Unmeasured formats reach the share of the peak that bf16 does.
        return self.sustained.get(fmt, peak * self.sustained["bf16"] / self.flops["bf16"])


_FORMATS = {"fp16": "bf16", "mxfp8": "fp8", "fp8-cs": "fp8", "nvfp4": "fp4"}


MOST = 10_000_000
"""Most cards that are believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal cards and the links between them.

    Attributes:
        device: the card.
        num_devices: how many.
        domain: cards in one scale-up domain.
        scaleup: the link inside a domain; its level prints as ``scaleup_level``.
        nic: the link between domains, per card.
        pod: cards that reach each other at the full NIC rate; 0 when all do.
        oversubscription: how much narrower the spine beyond a pod is, 1 for a full fat tree.
        scaleup_level: ``nvlink`` or ``pcie``.
        price: money for a card's hour; 0 when unknown.
        name: for tables.
    """

    device: Device
    num_devices: int
    domain: int
    scaleup: Link
    nic: Link
    pod: int = 0
    oversubscription: float = 1.0
    scaleup_level: str = "nvlink"
    price: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.domain < 1:
            raise LayoutError(
                f"a cluster of {self.num_devices} cards in domains of {self.domain}",
                hint="use 1 card or more in domains of 1 or more",
            )
        if self.num_devices > MOST:
            raise LayoutError(f"a cluster of {self.num_devices:,} cards", hint=f"use at most {MOST:,}")
        if not 1 <= self.oversubscription < math.inf:
            raise LayoutError(
                f"an oversubscription of {self.oversubscription}",
                hint="use how many times narrower the spine is: 1 or more",
            )
        if not (0 <= self.price < math.inf and self.pod >= 0):
            raise LayoutError(
                f"a price of {self.price} and pods of {self.pod} cards", hint="use 0 or more of both"
            )
        for level, link in ((self.scaleup_level, self.scaleup), ("nic", self.nic)):
            if not (0 < link.rate < math.inf and 0 < link.efficiency < math.inf):
                raise LayoutError(
                    f"the {level} link has {format_bandwidth(link.rate)} at {link.efficiency:.0%}",
                    hint="a link needs a rate and an efficiency above zero",
                )
            if not (0 <= link.latency < math.inf and 0 <= link.hop < math.inf):
                raise LayoutError(
                    f"the {level} link has a latency of {link.latency} s and {link.hop} s a hop",
                    hint="write seconds, 0 or more",
                )

    @property
    def spine(self) -> Link:
        """The link between pods."""
        return dataclasses.replace(self.nic, rate=self.nic.rate / self.oversubscription)

    def with_nic(self, rate: float) -> Cluster:
        """The same cluster with another NIC rate, bytes per second a card."""
        return dataclasses.replace(self, nic=dataclasses.replace(self.nic, rate=rate))

    def with_devices(self, num_devices: int) -> Cluster:
        """The same cluster with another number of cards."""
        return dataclasses.replace(
            self, num_devices=num_devices, name=f"{self.device.name.lower()}x{num_devices}"
        )


_ALIASES = {
    "h100": "H100-SXM",
    "h100-sxm": "H100-SXM",
    "h100-80gb": "H100-SXM",
    "h800": "H100-SXM",
    "a100": "A100-80GB",
    "a800": "A100-80GB",
    "v100": "V100-32GB",
    "4090": "RTX-4090",
    "910b": "Ascend-910B",
}


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("tonnage.plan").joinpath("data/devices.toml").read_text("utf-8")
    return tomllib.loads(text)


def device_names() -> list[str]:
    """The cards of the table of presets."""
    return list(_table())


def device_cluster(name: str, num_devices: int, *, domain: int | None = None) -> Cluster:
    """A cluster of preset cards with the links that usually come with them.

    Args:
        name: a card's name or a short form (``h100``).
        num_devices: how many cards.
        domain: cards in a scale-up domain, if not the card's usual number.

    Raises:
        LayoutError: no such card; the nearest are named.
    """
    known = {each.lower(): each for each in _table()}
    key = name.strip().lower()
    found = _ALIASES.get(key) or known.get(key)
    if found is None:
        near = difflib.get_close_matches(key, [*known, *_ALIASES], n=2, cutoff=0.5)
        raise LayoutError(
            f"no card preset {name!r}",
            hint=f"did you mean {' or '.join(near)}?" if near else f"cards: {', '.join(known)}",
        )
    row = _table()[found]
    return Cluster(
        device=_device(found, {**row, "memory": row["memory"] * USABLE}),
        num_devices=num_devices,
        domain=domain or row["domain"],
        scaleup=Link(
            rate=row["nvlink"],
            efficiency=NVLINK_EFFICIENCY,
            latency=NVLINK_LATENCY,
            hop=HOP_LATENCY,
        ),
        nic=Link(rate=row["nic"], efficiency=NIC_EFFICIENCY, latency=NIC_LATENCY, hop=NIC_HOP_LATENCY),
        scaleup_level=row.get("scaleup", "nvlink"),
        name=f"{found.lower()}x{num_devices}",
    )


def _device(name: str, row: dict[str, Any]) -> Device:
    flops = {key: float(value) for key, value in row["flops"].items()}
    if "bf16" not in flops:
        raise LayoutError(
            f"the card {name} has no bf16 peak",
            where=str(row.get("source", "")),
            hint="write flops = { bf16 = … }",
        )
    matmul = float(row.get("matmul", UNMEASURED_MATMUL * flops["bf16"]))
    return Device(
        name=name,
        flops=flops,
        matmul=matmul,
        sustained={"bf16": UNMEASURED_SUSTAINED * matmul, **row.get("sustained", {})},
        mma=float(row.get("mma", 1.0)),
        exps=float(row.get("exps", 1.0)),
        memory=float(row["memory"]),
        hbm=float(row["hbm"]),
        sms=int(row["sms"]),
        source=row.get("source", ""),
        weak=row.get("weak", ""),
    )


_BY_HOSTS = re.compile(r"(?P<hosts>\d+)x(?P<per>\d+)x(?P<card>[a-z].*)", re.IGNORECASE)
_BY_CARDS = re.compile(r"(?P<card>[a-z0-9][a-z0-9.-]*?)x(?P<count>\d+)", re.IGNORECASE)


def load_cluster(source: str | Path | Cluster) -> Cluster:
    """The cluster that ``source`` names.

    ``h100x512`` is 512 cards, ``4x8xA100`` four hosts of eight, and a path ends in ``.toml``.

    Raises:
        LayoutError: it names no card, no number, or a file that can't be read.
    """
    if isinstance(source, Cluster):
        return source
    text = str(source)
    if text.endswith(".toml") or Path(text).is_file():
        return read_cluster(Path(text))
    if match := _BY_HOSTS.fullmatch(text):
        hosts, per = int(match["hosts"]), int(match["per"])
        return device_cluster(match["card"], hosts * per, domain=per)
    if match := _BY_CARDS.fullmatch(text):
        return device_cluster(match["card"], int(match["count"]))
    raise LayoutError(f"{text!r} is no cluster", hint="write h100x512, 4x8xA100, or a path to a cluster.toml")


def read_cluster(path: Path) -> Cluster:
    """A cluster from a TOML file: a preset card, changed where the file says so.

    Raises:
        LayoutError: the file can't be read, or a key or value in it has no meaning.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise LayoutError(
            f"can't read the cluster: {error.strerror}", where=str(path), hint="write one by tonnage probe"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LayoutError(f"the cluster file is no TOML: {error}", where=str(path)) from error
    return cluster_from_table(data, where=str(path))


_TOP = {"card", "num_devices", "domain", "pod", "oversubscription", "price", "scaleup_level", "name"}
_CARD = {"name", "flops", "matmul", "sustained", "mma", "exps", "memory", "hbm", "sms"}
_LINK = {"rate", "efficiency", "latency", "hop"}


def cluster_from_table(data: dict[str, Any], *, where: str) -> Cluster:
    """A cluster from parsed TOML; ``where`` is named in errors."""
    _known(data, _TOP | {"device", "scaleup", "nic", "fit", "schema"}, where)
    _typed(data, where)
    card = data.get("card")
    extra = data.get("device", {})
    if card is None and not {"flops", "memory", "hbm", "sms"} <= set(extra):
        raise LayoutError(
            "the cluster file names no card",
            where=where,
            hint='write card = "h100", or a [device] table with flops, memory, hbm and sms',
        )
    count = data.get("num_devices", 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise LayoutError(f"num_devices is {count!r}", where=where, hint="write num_devices = 8, or more")
    base = device_cluster(str(card) if card is not None else "h100", count)
    _known(extra, _CARD, where)
    device = (
        base.device
        if card is not None
        else _device(str(extra.get("name", "custom")), {**extra, "source": where})
    )
    if card is not None and extra:
        _refuse_sparse(base.device, extra.get("flops", {}), where)
        changed: dict[str, Any] = {
            key: {**getattr(device, key), **value} if key in ("flops", "sustained") else value
            for key, value in extra.items()
        }
        device = dataclasses.replace(device, **changed)
    top: dict[str, Any] = {key: data[key] for key in _TOP - {"card"} if key in data}
    for level, link in (("scaleup", base.scaleup), ("nic", base.nic)):
        table: dict[str, Any] = dict(data.get(level, {}))
        _known(table, _LINK, where)
        if "rate" in table:
            table["rate"] = _rate(table["rate"], where)
        top[level] = dataclasses.replace(link, **table)
    return dataclasses.replace(base, device=device, **top)


_WHOLE = {"domain", "pod", "sms"}
_TEXT = {"name", "scaleup_level"}
_TABLES = {"device", "scaleup", "nic", "flops", "sustained", "fit"}


def _typed(table: dict[str, Any], where: str) -> None:
    """Refuse a value of another kind than its key needs."""
    for key, value in table.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key == "fit":
            continue
        if key in _TABLES:
            good, wanted = isinstance(value, dict), f"a table, [{key}]"
            if isinstance(value, dict):
                _typed(value, where)
        elif key in _TEXT:
            good, wanted = isinstance(value, str), "text"
        elif key in _WHOLE:
            good, wanted = (
                number and math.isfinite(value) and value == int(value) and value >= (key != "pod"),
                "a whole number of 1 or more",
            )
        elif key in ("num_devices", "card", "rate", "schema"):
            continue
        elif key in ("latency", "hop", "price"):
            good, wanted = number and 0 <= value < math.inf, "a number of 0 or more"
        else:
            good, wanted = number and 0 < value < math.inf, "a number above 0"
        if not good:
            raise LayoutError(f"the cluster file has {key} = {value!r}", where=where, hint=f"write {wanted}")


def _refuse_sparse(known: Device, flops: dict[str, Any], where: str) -> None:
    """Peaks with 2:4 sparsity are twice what training can use, and halve every utilisation."""
    for fmt, value in flops.items():
        dense = known.flops.get(fmt)
        if dense and isinstance(value, int | float) and abs(value / dense - 2) < 0.01:
            raise LayoutError(
                f"{value / 1e12:.0f} TFLOP/s is the {fmt} peak of {known.name} with 2:4 sparsity",
                where=where,
                hint=f"training is dense: write {dense / 1e12:.0f}e12, or leave it out",
            )


def _rate(value: object, where: str) -> float:
    if isinstance(value, str):
        try:
            return parse_rate(value)
        except UnitError as error:
            raise LayoutError(error.what, where=where, hint=error.hint) from error
    if isinstance(value, int | float) and value > 0:
        return float(value)
    raise LayoutError(f"a link rate of {value!r}", where=where, hint='write rate = "400gbit"')


def _known(table: dict[str, Any], allowed: set[str], where: str) -> None:
    for key in table:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            raise LayoutError(
                f"the cluster file has an unknown key {key!r}",
                where=where,
                hint=f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(allowed))}",
            )
