"""Tonnage weighs every byte that large-model training moves.

The package root is light: names load when first touched, so that ``import tonnage`` needs neither
torch nor Polars.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tonnage.engine import DataParallel as DataParallel
    from tonnage.engine import GradScaler as GradScaler
    from tonnage.engine import LocalSteps as LocalSteps
    from tonnage.engine import init_process_group as init_process_group
    from tonnage.engine import load_checkpoint as load_checkpoint
    from tonnage.engine import save_checkpoint as save_checkpoint
    from tonnage.errors import TonnageError as TonnageError
    from tonnage.ledger import Ledger as Ledger

_HOMES = {
    "DataParallel": "tonnage.engine",
    "GradScaler": "tonnage.engine",
    "Ledger": "tonnage.ledger",
    "LocalSteps": "tonnage.engine",
    "TonnageError": "tonnage.errors",
    "init_process_group": "tonnage.engine",
    "load_checkpoint": "tonnage.engine",
    "save_checkpoint": "tonnage.engine",
}

__all__ = [
    "DataParallel",
    "GradScaler",
    "Ledger",
    "LocalSteps",
    "TonnageError",
    "__version__",
    "init_process_group",
    "load_checkpoint",
    "save_checkpoint",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tonnage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
