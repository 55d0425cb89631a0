"""What ``ip`` and ``tc`` are told: one switch, a cable to each host, a token bucket at both its ends.

A host's cable is a veth pair: ``eth0`` in the host, ``p<rank>`` on a bridge in the switch. The bucket
on ``eth0`` paces what the host sends, the one on ``p<rank>`` what it receives, so that a host has its
rate in each direction at once, as on full-duplex Ethernet.

A bucket (tc-tbf(8)) is a rate, a burst and a queue:

* ``burst`` is the credit that an idle link saves up. It has to hold one packet of segmentation
  offload, 64 KiB and the headers of its 45 segments, or the kernel cuts every such packet up; and
  about 2 ms of the rate, because the timer that refills the bucket can come that late.
* ``latency`` bounds the queue: what would wait longer than 50 ms is dropped, as in a switch.

Everything here is a function from values to text; ``hosts`` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence

MTU = 1500
QUEUE_SECONDS = 0.05
MAX_HOSTS = 250
"""Host addresses in one /24, less the network, the broadcast and a few to spare."""

_OFFLOAD_NBYTES = 72 * 1024
_CREDIT_SECONDS = 0.002


def address(rank: int) -> str:
    """IPv4 address of a host. Any network would do: nothing outside the lab sees it."""
    return f"10.77.0.{rank + 1}"


def burst_nbytes(rate: float) -> int:
    """Credit of a bucket of ``rate`` bytes per second."""
    return max(_OFFLOAD_NBYTES, round(rate * _CREDIT_SECONDS))


def bucket(device: str, rate: float) -> str:
    """The ``tc`` line that makes or changes the token bucket of ``device``."""
    return (
        f"qdisc replace dev {device} root tbf rate {round(rate * 8)}bit"
        f" burst {burst_nbytes(rate)} latency {QUEUE_SECONDS * 1000:.0f}ms"
    )


def no_bucket(device: str) -> Sequence[str]:
    """The ``tc`` lines that take a bucket off, whether there is one or not."""
    # `del` fails where there is none; a replaced one can always be deleted.
    return (bucket(device, 1e9), f"qdisc del dev {device} root")


def switch_lines(host_namespaces: Sequence[str]) -> list[str]:
    """The ``ip`` lines, for the switch, that make the bridge and one cable to each namespace."""
    # IPv6 and multicast chatter would be counted among the bytes of the ranks.
    lines = ["link add br0 type bridge mcast_snooping 0", "link set br0 addrgenmode none", "link set br0 up"]
    for rank, namespace in enumerate(host_namespaces):
        lines += [
            f"link add p{rank} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {namespace}",
            f"link set p{rank} addrgenmode none",
            f"link set p{rank} master br0 up",
        ]
    return lines


def host_lines(rank: int) -> list[str]:
    """The ``ip`` lines, for a host, that give it its address."""
    return [
        "link set lo up",
        "link set eth0 addrgenmode none",
        f"addr add {address(rank)}/24 dev eth0",
        "link set eth0 up",
    ]


def port_line(rank: int, *, up: bool) -> str:
    """The ``ip`` line, for the switch, that plugs a host's cable in or pulls it out."""
    return f"link set p{rank} {'up' if up else 'down'}"
