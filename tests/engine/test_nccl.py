from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def test_the_transport_for_cards_finds_the_collectives_of_this_torch() -> None:
    # No card is needed for that, and a renamed function would otherwise be noticed on a cluster.
    from tonnage.engine.transport import NcclTransport, nccl

    assert callable(nccl._reduce_scatter)
    assert callable(nccl._all_gather)
    methods = {"start_reduce_scatter", "start_all_gather", "start_all_reduce", "wait_received", "wait_sent"}
    assert all(callable(getattr(NcclTransport, name)) for name in methods)
