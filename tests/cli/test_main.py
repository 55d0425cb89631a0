"""The command's frame: light help, exit statuses, errors as text or JSON."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tonnage import __version__, cli
from tonnage.errors import LedgerError, UsageError

HEAVY = ("polars", "rich", "torch", "numpy")


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False
    )


def command(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    """Put one command in the place of all, whose run() is ``run``."""
    module = ModuleType("tonnage.cli.only")

    def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        parser = subparsers.add_parser("only")
        parser.add_argument("--json", action="store_true")
        parser.set_defaults(run=run)

    module.__dict__["add_parser"] = add_parser
    monkeypatch.setattr(cli, "_COMMANDS", ("only",))
    monkeypatch.setitem(sys.modules, "tonnage.cli.only", module)


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["report", "--help"], ["compare", "--help"]])
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    done = python(
        "import sys\nfrom tonnage.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as end: assert end.code == 0\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)",
        *args,
    )
    assert done.stderr.strip() == "[]"
    assert done.stdout


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tonnage", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"tonnage {__version__}\n"


def test_help_lists_the_commands_and_each_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = capsys.readouterr().out
    for name in ("report", "compare"):
        assert name in listed
        with pytest.raises(SystemExit) as end:
            cli.main([name, "--help"])
        assert end.value.code == 0
        assert f"example: tonnage {name} " in capsys.readouterr().out


@pytest.mark.parametrize("args", [[], ["no-such-command"], ["report"], ["compare", "one"]])
def test_wrong_use_is_status_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    assert end.value.code == 2
    assert "usage: tonnage" in capsys.readouterr().err


def test_an_absent_command_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_COMMANDS", ("not_built_yet", "report"))
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "report" in capsys.readouterr().out


def test_a_command_that_is_there_but_broken_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    monkeypatch.setattr(cli, "_COMMANDS", ("broken",))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        cli.main(["--help"])


@pytest.mark.parametrize(("kind", "status"), [(LedgerError, 1), (UsageError, 2)])
def test_errors_are_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: type[LedgerError | UsageError],
    status: int,
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise kind("it is torn", where="a.ledger", hint="mend it")

    command(monkeypatch, run)
    assert cli.main(["only"]) == status
    assert capsys.readouterr().err == "error: it is torn\nwhere: a.ledger\ndo:    mend it\n"
    assert cli.main(["only", "--json"]) == status
    assert json.loads(capsys.readouterr().out) == {
        "error": {"code": kind.__name__, "what": "it is torn", "where": "a.ledger", "hint": "mend it"}
    }


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command(monkeypatch, run)
    assert cli.main(["only"]) == 130


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    code = (
        "import sys\nfrom types import ModuleType\nfrom tonnage import cli\n"
        "def run(args):\n    for _ in range(100000): print('x' * 100)\n    return 0\n"
        "module = ModuleType('tonnage.cli.only')\n"
        "module.add_parser = lambda subparsers: subparsers.add_parser('only').set_defaults(run=run)\n"
        "sys.modules['tonnage.cli.only'] = module\ncli._COMMANDS = ('only',)\nsys.exit(cli.main(['only']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        complaint = process.stderr.read()
        assert process.wait(timeout=60) == 141
    assert complaint == b""


def test_signs_that_the_terminal_lacks_are_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tonnage", "report", "ü→.ledger"],
        capture_output=True,
        timeout=60,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
    )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
