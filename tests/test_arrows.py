"""The arrows between the parts, as docs/design.md draws them, read from every import of the package."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tonnage

ROOT = Path(tonnage.__file__).parent

LEAVES = {"errors", "units"}
ARROWS: dict[str, set[str]] = {
    "ledger": set(),
    "plan": {"ledger"},
    "store": {"ledger"},
    "lab": {"ledger"},
    "engine": {"ledger", "plan"},
    "trace": {"ledger", "plan"},
    "doctor": {"ledger", "plan", "trace"},
    "prepare": {"ledger", "store"},
    "move": {"ledger", "store"},
    "report": {"ledger"},
    "watch": {"ledger"},
    "demo": {"ledger", "engine", "lab"},
}
ARROWS["cli"] = set(ARROWS)
# The root names a few things that load when first touched; who imports them goes to their home.
ARROWS["tonnage"] = {"engine", "ledger"}
ARROWS["__main__"] = {"cli"}
HEAVY = ("torch", "polars", "numpy", "rich", "ray", "pyarrow", "transformers", "asyncio", "http.server")


@dataclass(frozen=True, slots=True)
class Import:
    """One import: ``source`` imports ``target``, both dotted module names."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def module_files(root: Path) -> dict[str, Path]:
    """Each module of the package below ``root``, by dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> list[Import]:
    """Every import of one of the package's modules: in functions and under TYPE_CHECKING, too."""
    modules = module_files(root)
    return [
        Import(name, target, line)
        for name, path in modules.items()
        for target, line in _targets(name, path, modules)
        if target.split(".")[0] == root.name
    ]


def _targets(name: str, path: Path, modules: dict[str, Path]) -> Iterator[tuple[str, int]]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield _home(base, alias.name, modules), node.lineno
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            if called in ("import_module", "__import__", "require") and isinstance(first, ast.Constant):
                yield str(first.value), node.lineno


def _home(base: str, imported: str, modules: dict[str, Path]) -> str:
    # A door may offer a function that is named as its module: whoever is outside gets the function.
    if f"{base}.{imported}" in modules and imported not in _offered(base, modules):
        return f"{base}.{imported}"
    # `from tonnage import Ledger` goes to the ledger; the version alone is the root's own.
    return tonnage._HOMES.get(imported, base) if base == "tonnage" else base


def _offered(base: str, modules: dict[str, Path]) -> set[str]:
    """The names that the door ``base`` imports from its modules."""
    if modules[base].name != "__init__.py":
        return set()
    body = ast.parse(modules[base].read_text(encoding="utf-8")).body
    return {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}


def part_of(module: str) -> str:
    package, _, rest = module.partition(".")
    return rest.split(".")[0] if rest else package


def forbidden(found: list[Import]) -> list[str]:
    """The imports that go where no arrow leads, or past a part's door."""
    wrong = []
    for each in found:
        source, target = part_of(each.source), part_of(each.target)
        if source == target or target in LEAVES or each.target == "tonnage":
            continue
        if target not in ARROWS.get(source, set()):
            wrong.append(f"{each}: no arrow from {source} to {target}")
        # Behind its door a part may change at will.
        elif each.target.count(".") > 1:
            wrong.append(f"{each}: past the door of {target}")
    return wrong


def circle(found: list[Import]) -> list[str]:
    """Modules that import one another in a circle; none if there is none."""
    graph: dict[str, set[str]] = {}
    for each in found:
        graph.setdefault(each.source, set()).add(each.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def write_package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "tonnage" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "tonnage"


def test_every_import_follows_an_arrow_and_goes_through_the_door() -> None:
    found = imports(ROOT)
    assert len(found) > 20
    assert forbidden(found) == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circle(imports(ROOT)) == []


def test_nothing_but_parts_and_leaves_lies_in_the_package() -> None:
    beside = {path.stem for path in ROOT.iterdir() if path.name not in ("__pycache__", "py.typed")}
    assert beside - set(ARROWS) - LEAVES == {"__init__"}


@pytest.mark.parametrize(
    "text",
    [
        "import tonnage.plan",
        "from tonnage import plan",
        "from tonnage.plan import Model",
        "def late():\n    from tonnage.plan import Model",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tonnage.plan import Model",
        "from .. import plan",
        "from ..plan import Model",
        "import importlib\nimportlib.import_module('tonnage.plan')",
        "from tonnage import DataParallel",
        "from tonnage.cli import main",
    ],
)
def test_a_forbidden_arrow_is_found_however_it_is_written(tmp_path: Path, text: str) -> None:
    root = write_package(
        tmp_path,
        {"__init__.py": "", "ledger/__init__.py": "", "ledger/table.py": text, "plan/__init__.py": ""},
    )
    [wrong] = forbidden(imports(root))
    assert wrong.startswith("tonnage.ledger.table:")


def test_an_import_past_a_door_is_found(tmp_path: Path) -> None:
    root = write_package(
        tmp_path,
        {
            "__init__.py": "",
            "ledger/__init__.py": "",
            "ledger/table.py": "",
            "plan/__init__.py": "from tonnage.ledger import Ledger",
            "plan/model.py": "from tonnage.ledger.table import Ledger",
        },
    )
    [wrong] = forbidden(imports(root))
    assert "past the door of ledger" in wrong
    assert "tonnage.plan.model:1" in wrong


def test_a_circle_is_found(tmp_path: Path) -> None:
    files = {"plan/a.py": "from tonnage.plan import b", "plan/b.py": "def f():\n    from .a import x"}
    root = write_package(tmp_path, {"__init__.py": "", "plan/__init__.py": "", **files})
    assert set(circle(imports(root))) == {"tonnage.plan.a", "tonnage.plan.b"}


PARTS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


@pytest.mark.parametrize("part", PARTS)
def test_every_name_that_a_door_promises_is_there(part: str) -> None:
    door = importlib.import_module(f"tonnage.{part}")
    # The door of the command line is main, named in pyproject.
    for name in getattr(door, "__all__", ["main"]):
        assert hasattr(door, name), f"tonnage.{part}.__all__ names {name}, which is not there"


def test_every_name_that_the_root_promises_is_there() -> None:
    for name in tonnage.__all__:
        assert hasattr(tonnage, name)


def loaded_by(statement: str) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after ``statement``."""
    script = f"import sys\n{statement}\nprint(*({HEAVY} & sys.modules.keys()))".replace(
        str(HEAVY), str(set(HEAVY))
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_and_its_command_load_nothing_heavy() -> None:
    assert loaded_by("import torch") >= {"torch"}, "this test would see nothing"
    for module in ("tonnage", "tonnage.errors", "tonnage.units", "tonnage.cli"):
        assert loaded_by(f"import {module}") == set(), module


@pytest.mark.parametrize("part", [part for part in PARTS if part not in ("engine", "cli")])
def test_a_part_loads_without_torch(part: str) -> None:
    assert "torch" not in loaded_by(f"import tonnage.{part}")


def test_importing_the_package_is_instant() -> None:
    """It takes a few milliseconds; a heavy import would take hundreds."""
    script = "import time; start = time.perf_counter(); import tonnage; print(time.perf_counter() - start)"
    runs = [
        float(
            subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(5)
    ]
    assert min(runs) < 0.1
