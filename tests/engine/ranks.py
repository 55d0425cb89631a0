"""One rank of a test: runs the cases that the test names, one after another, in one process group.

Importing torch costs seconds on two cores, so ranks live as long as the test session.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

_parent: Connection | None = None


def tell(value: Any) -> None:
    """Hand ``value`` to the test while the case goes on."""
    assert _parent is not None
    _parent.send(("told", value))


def main(rank: int, world_size: int, fd: int) -> None:
    """Serve cases until the test closes its end."""
    global _parent
    _parent = Connection(fd)
    faulthandler.enable()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    if rank == 0:  # a port that the kernel chose is nobody else's
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, limit, wait_for_workers=False)
        _parent.send(("told", store.port))
    else:
        store = dist.TCPStore("127.0.0.1", _parent.recv(), world_size, False, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    importlib.import_module("tonnage.engine")
    warnings.simplefilter("error")
    while True:
        try:
            module, function, arguments = _parent.recv()
        except EOFError:
            break
        _parent.send(_answer(module, function, arguments))
    dist.destroy_process_group()


def _answer(module: str, function: str, arguments: dict[str, Any]) -> tuple[str, Any]:
    try:
        return "result", getattr(importlib.import_module(module), function)(**arguments)
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        return "error", error
