"""Byte formulas against the algorithms themselves: messages are really passed, data really summed.

A simulated rank holds NumPy vectors and hands copies to its peers through :class:`Network`, which
counts bytes and rounds. Each algorithm must first *be* the collective (right results), and only then
may its counted bytes speak for or against a formula.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tonnage.errors import LayoutError
from tonnage.ledger import OPS, algbw, bus_factor, busbw, num_steps, wire_nbytes

Data = NDArray[np.int64]
ITEM = np.dtype(np.int64).itemsize


class Network:
    """Counts what each rank sends, and the rounds in which messages must follow one another."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = defaultdict(int)
        self.rounds = 0

    def exchange(self, messages: dict[tuple[int, int], Data]) -> dict[tuple[int, int], Data]:
        """Deliver ``{(source, target): data}`` all at once; one round."""
        self.rounds += 1
        for (source, target), data in messages.items():
            assert source != target
            self.sent[source] += data.nbytes
        return {pair: data.copy() for pair, data in messages.items()}

    def mean_sent(self, num_ranks: int) -> float:
        return sum(self.sent.values()) / num_ranks


def ring_reduce_scatter(net: Network, inputs: list[Data]) -> list[Data]:
    n = len(inputs)
    parts = [np.split(each.copy(), n) for each in inputs]
    for step in range(n - 1):
        moved = net.exchange({(r, (r + 1) % n): parts[r][(r - step - 1) % n] for r in range(n)})
        for (source, target), data in moved.items():
            parts[target][(source - step - 1) % n] += data
    return [parts[r][r] for r in range(n)]


def direct_reduce_scatter(net: Network, inputs: list[Data]) -> list[Data]:
    n = len(inputs)
    parts = [np.split(each, n) for each in inputs]
    moved = net.exchange({(a, b): parts[a][b] for a in range(n) for b in range(n) if a != b})
    return [parts[r][r] + sum(data for (_, b), data in moved.items() if b == r) for r in range(n)]


def ring_all_gather(net: Network, shards: list[Data]) -> list[Data]:
    n = len(shards)
    held: list[dict[int, Data]] = [{r: shards[r]} for r in range(n)]
    for step in range(n - 1):
        moved = net.exchange({(r, (r + 1) % n): held[r][(r - step) % n] for r in range(n)})
        for (source, target), data in moved.items():
            held[target][(source - step) % n] = data
    return [np.concatenate([each[i] for i in range(n)]) for each in held]


def direct_all_gather(net: Network, shards: list[Data]) -> list[Data]:
    n = len(shards)
    moved = net.exchange({(a, b): shards[a] for a in range(n) for b in range(n) if a != b})
    return [np.concatenate([shards[a] if a == r else moved[a, r] for a in range(n)]) for r in range(n)]


def direct_all_to_all(net: Network, inputs: list[Data]) -> list[Data]:
    n = len(inputs)
    parts = [np.split(each, n) for each in inputs]
    moved = net.exchange({(a, b): parts[a][b] for a in range(n) for b in range(n) if a != b})
    return [np.concatenate([parts[r][r] if a == r else moved[a, r] for a in range(n)]) for r in range(n)]


def tree_broadcast(net: Network, n: int, root_data: Data) -> list[Data]:
    """Binomial tree: in each round, every rank that has the data hands it to one that has not."""
    held = {0: root_data}
    while len(held) < n:
        have = len(held)
        moved = net.exchange({(r, r + have): held[r] for r in range(have) if r + have < n})
        held |= {target: data for (_, target), data in moved.items()}
    return [held[r] for r in range(n)]


def chain_broadcast(net: Network, n: int, root_data: Data) -> list[Data]:
    held = [root_data]
    for r in range(n - 1):
        held.append(net.exchange({(r, r + 1): held[r]})[r, r + 1])
    return held


def tree_reduce(net: Network, inputs: list[Data]) -> Data:
    """The binomial tree backwards: in each round, the upper half of the ranks that are left sends."""
    held = {r: each.copy() for r, each in enumerate(inputs)}
    while len(held) > 1:
        keep = 2 ** (math.ceil(math.log2(len(held))) - 1)
        moved = net.exchange({(r, r - keep): held.pop(r) for r in range(keep, len(held))})
        for (_, target), data in moved.items():
            held[target] += data
    return held[0]


def all_reduce(net: Network, inputs: list[Data], algorithm: str) -> list[Data]:
    if algorithm == "ring":
        return ring_all_gather(net, ring_reduce_scatter(net, inputs))
    if algorithm == "direct":
        return direct_all_gather(net, direct_reduce_scatter(net, inputs))
    return tree_broadcast(net, len(inputs), tree_reduce(net, inputs))


def make_inputs(n: int, items_a_part: int) -> list[Data]:
    draw = np.random.default_rng(n * 1000 + items_a_part)
    return [draw.integers(-1000, 1000, n * items_a_part) for _ in range(n)]


groups = st.integers(1, 17)
part_sizes = st.integers(1, 9)


@given(groups, part_sizes, st.sampled_from(["ring", "direct", "tree"]))
def test_all_reduce_sends_what_its_formula_says(n: int, items: int, algorithm: str) -> None:
    net, inputs = Network(), make_inputs(n, items)
    for result in all_reduce(net, inputs, algorithm):
        assert np.array_equal(result, np.sum(inputs, axis=0))
    assert net.mean_sent(n) == pytest.approx(wire_nbytes("all-reduce", n * items * ITEM, n))
    assert net.rounds == num_steps("all-reduce", n, algorithm) or (n == 1 and algorithm == "direct")


@given(groups, part_sizes)
def test_every_rank_of_a_ring_sends_the_same(n: int, items: int) -> None:
    net = Network()
    all_reduce(net, make_inputs(n, items), "ring")
    assert len({net.sent[r] for r in range(n)}) == 1


@given(groups, part_sizes, st.sampled_from([ring_reduce_scatter, direct_reduce_scatter]))
def test_reduce_scatter_sends_what_its_formula_says(
    n: int, items: int, algorithm: Callable[[Network, list[Data]], list[Data]]
) -> None:
    net, inputs = Network(), make_inputs(n, items)
    results = algorithm(net, inputs)
    assert np.array_equal(np.concatenate(results), np.sum(inputs, axis=0))
    assert all(
        net.sent[r] == pytest.approx(wire_nbytes("reduce-scatter", n * items * ITEM, n)) for r in range(n)
    )


@given(groups, part_sizes, st.sampled_from([ring_all_gather, direct_all_gather]))
def test_all_gather_sends_what_its_formula_says(
    n: int, items: int, algorithm: Callable[[Network, list[Data]], list[Data]]
) -> None:
    net, shards = Network(), [each[:items] for each in make_inputs(n, items)]
    for result in algorithm(net, shards):
        assert np.array_equal(result, np.concatenate(shards))
    assert all(net.sent[r] == pytest.approx(wire_nbytes("all-gather", n * items * ITEM, n)) for r in range(n))


@given(groups, part_sizes)
def test_all_to_all_sends_what_its_formula_says(n: int, items: int) -> None:
    net, inputs = Network(), make_inputs(n, items)
    for rank, result in enumerate(direct_all_to_all(net, inputs)):
        assert np.array_equal(result, np.concatenate([np.split(each, n)[rank] for each in inputs]))
    assert all(net.sent[r] == pytest.approx(wire_nbytes("all-to-all", n * items * ITEM, n)) for r in range(n))


@given(groups, part_sizes, st.sampled_from([tree_broadcast, chain_broadcast]))
def test_broadcast_sends_what_its_formula_says(
    n: int, items: int, algorithm: Callable[[Network, int, Data], list[Data]]
) -> None:
    net, data = Network(), np.arange(items)
    assert all(np.array_equal(result, data) for result in algorithm(net, n, data))
    assert net.mean_sent(n) == pytest.approx(wire_nbytes("broadcast", items * ITEM, n))
    assert net.rounds == num_steps("broadcast", n, "tree" if algorithm is tree_broadcast else "ring")


@given(groups, part_sizes)
def test_reduce_sends_what_its_formula_says(n: int, items: int) -> None:
    net, inputs = Network(), make_inputs(n, items)
    assert np.array_equal(tree_reduce(net, inputs), np.sum(inputs, axis=0))
    assert net.mean_sent(n) == pytest.approx(wire_nbytes("reduce", n * items * ITEM, n))


@given(st.integers(2, 10_000), st.integers(1, 2**45))
def test_all_reduce_sends_less_than_twice_the_payload(n: int, nbytes: int) -> None:
    assert nbytes <= wire_nbytes("all-reduce", nbytes, n) < 2 * nbytes


@given(st.integers(1, 10_000), st.integers(0, 2**45))
def test_all_reduce_is_reduce_scatter_then_all_gather(n: int, nbytes: int) -> None:
    parts = wire_nbytes("reduce-scatter", nbytes, n) + wire_nbytes("all-gather", nbytes, n)
    assert wire_nbytes("all-reduce", nbytes, n) == pytest.approx(parts)


@pytest.mark.parametrize(
    "op", ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "send"]
)
def test_one_rank_alone_sends_nothing(op: str) -> None:
    assert wire_nbytes(op, 10**9, 1) == 0
    assert num_steps(op, 1) == 0


def test_a_write_to_a_store_needs_no_second_rank() -> None:
    assert wire_nbytes("write", 1000, 1) == wire_nbytes("write", 1000, 8) == 1000
    assert wire_nbytes("read", 1000, 1) == wire_nbytes("recv", 1000, 2) == 0


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all-reduce", 2 * 7 / 8),
        ("reduce-scatter", 7 / 8),
        ("all-gather", 7 / 8),
        ("all-to-all", 7 / 8),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(op: str, factor: float) -> None:
    """Source: nccl-tests, doc/PERFORMANCE.md."""
    assert bus_factor(op, 8) == factor


def test_a_ring_that_fills_its_links_has_their_rate_as_bus_bandwidth() -> None:
    link, nbytes, n = 25e9, 10**9, 8
    seconds = wire_nbytes("all-reduce", nbytes, n) / link
    assert busbw("all-reduce", nbytes, seconds, n) == pytest.approx(link)
    assert algbw(nbytes, seconds) == pytest.approx(link * 8 / 14)


def test_without_a_time_there_is_no_bandwidth() -> None:
    for seconds in (0.0, -1.0, math.nan):
        assert math.isnan(algbw(100, seconds))
        assert math.isnan(busbw("all-reduce", 100, seconds, 4))


@pytest.mark.parametrize("n", [1, 4])
def test_an_op_without_a_formula_is_refused_in_any_group(n: int) -> None:
    assert "kernel" in OPS
    for op in ("kernel", "nonsense"):
        for formula in (lambda op, n: wire_nbytes(op, 100, n), bus_factor, num_steps):
            with pytest.raises(LayoutError, match=op):
                formula(op, n)


@pytest.mark.parametrize("n", [0, -3])
def test_an_empty_group_is_refused(n: int) -> None:
    for formula in (lambda op, n: wire_nbytes(op, 100, n), bus_factor, num_steps):
        with pytest.raises(LayoutError, match="groups of 1 or more"):
            formula("all-reduce", n)
