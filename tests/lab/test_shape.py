from __future__ import annotations

import ipaddress
import re

from hypothesis import given
from hypothesis import strategies as st

from tonnage.lab import shape

rates = st.floats(min_value=125.0, max_value=125e9)


@given(rates)
def test_a_bucket_holds_one_offload_packet_with_headers_and_two_milliseconds_of_credit(rate: float) -> None:
    segments = -(-65536 // (shape.MTU - 40))
    assert shape.burst_nbytes(rate) >= 65536 + segments * 54
    assert shape.burst_nbytes(rate) >= int(rate * 0.002)


@given(rates)
def test_tc_is_told_the_rate_in_whole_bits(rate: float) -> None:
    told = re.search(r"rate (\d+)bit ", shape.bucket("eth0", rate))
    assert told is not None
    assert abs(int(told[1]) / 8 - rate) <= 1 / 16 + rate * 1e-15


def test_every_host_has_an_address_of_its_own_in_one_network() -> None:
    network = ipaddress.ip_network("10.77.0.0/24")
    addresses = {ipaddress.ip_address(shape.address(rank)) for rank in range(shape.MAX_HOSTS)}
    assert len(addresses) == shape.MAX_HOSTS
    assert addresses <= set(network.hosts())


def test_the_link_and_both_directions_are_named_the_same_by_switch_and_host() -> None:
    lines = shape.switch_lines(["/ns/a", "/ns/b"])
    assert any("p1 " in line and "peer name eth0" in line and "netns /ns/b" in line for line in lines)
    assert shape.port_line(1, up=False) == "link set p1 down"
