"""The solver: a fitted graph gives back what was measured, and later causes never make anything earlier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.trace.graph import Builder, Graph, Moment, Why, solve


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Moments at random times, and edges from earlier to later ones, some of which the times contradict."""
    times = sorted(draw(st.lists(st.integers(0, 10_000), min_size=2, max_size=24)))
    spans = draw(st.lists(st.integers(0, 400), min_size=len(times), max_size=len(times)))
    builder = Builder()
    builder.add(Moment.HOST, 0, np.arange(len(times)), np.array(times), np.array(spans))
    for _ in range(draw(st.integers(0, 40))):
        source = draw(st.integers(0, len(times) - 2))
        target = draw(st.integers(source + 1, len(times) - 1))
        builder.join(
            np.array([source]),
            np.array([target]),
            draw(st.sampled_from(list(Why))),
            from_end=draw(st.booleans()),
            lag=draw(st.integers(0, 300)),
        )
    return builder.graph()


@given(graphs())
def test_an_unchanged_graph_falls_as_measured(graph: Graph) -> None:
    assert solve(graph).tolist() == graph.at.tolist()


@given(graphs(), st.data())
def test_a_longer_activity_makes_nothing_earlier_and_nothing_later_than_its_length(
    graph: Graph, data: st.DataObject
) -> None:
    longer = data.draw(st.integers(0, len(graph) - 1))
    by = data.draw(st.integers(0, 500))
    span = graph.span.copy()
    span[longer] += by
    moved = solve(replace(graph, span=span)) - solve(graph)
    assert (moved >= 0).all()
    assert (moved <= by).all()


@given(graphs(), st.data())
def test_every_moment_waits_for_all_that_it_depends_on(graph: Graph, data: st.DataObject) -> None:
    span = np.array(data.draw(st.lists(st.integers(0, 400), min_size=len(graph), max_size=len(graph))))
    changed = replace(graph, span=span)
    times = solve(changed)
    reach = times[changed.source] + np.where(changed.from_end, span[changed.source], 0) + changed.lag
    assert (times[changed.target] >= reach).all()


def test_a_circle_is_told() -> None:
    builder = Builder()
    builder.add(Moment.HOST, 0, np.arange(2), np.array([5, 5]))
    builder.join(np.array([0, 1]), np.array([1, 0]), Why.ORDER)
    with pytest.raises(ValueError, match="circle"):
        builder.graph()
