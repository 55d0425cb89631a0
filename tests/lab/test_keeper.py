from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tonnage.lab import Hosts, Lab, Loopback, probe

# Opens hosts with a rank, and a grandchild in a session of its own that has forgotten its environment.
OWNER = """
import json, os, subprocess, sys, threading
from tonnage.lab import Lab, Loopback
hosts = {make}
rank = hosts.popen(0, ["sh", "-c", "{forget} setsid sleep 600 & echo $!; exec sleep 600"], stdout=subprocess.PIPE)
grandchild = int(rank.stdout.readline())
keeper = hosts._keeper
print(json.dumps(dict(
    pids=[rank.pid, grandchild, keeper._process.pid], namespaces=sorted(keeper._inodes)
)), flush=True)
{then}
"""

MAKE = {"root": "Lab(2, 1e7, way='root')", "user": "Lab(2, 1e7, way='user')", "loopback": "Loopback(2)"}


@pytest.fixture(params=list(MAKE))
def kind(request: pytest.FixtureRequest) -> str:
    if request.param != "loopback" and (reason := probe(request.param)):
        pytest.skip(reason)
    return str(request.param)


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_owner_leaves_no_process_and_no_namespace(kind: str, number: signal.Signals) -> None:
    with owner(kind, then="with hosts: threading.Event().wait()") as process:
        left = Left(process)
        process.send_signal(number)
        assert process.wait(20) != 0
        left.assert_nothing()


@pytest.mark.root
def test_a_signal_to_the_owners_whole_group_leaves_nothing_either(kind: str) -> None:
    with owner(kind, then="threading.Event().wait()") as process:
        left = Left(process)
        os.killpg(process.pid, signal.SIGKILL)
        left.assert_nothing()


@pytest.mark.root
def test_a_forked_child_of_the_owner_does_not_keep_a_dead_lab_open(kind: str) -> None:
    # The child inherits the owner's end of the keeper's pipe, so that never closes.
    then = """
    child = os.fork()
    if child:
        print(child, flush=True)
    threading.Event().wait()
    """
    with owner(kind, then=textwrap.dedent(then)) as process:
        left = Left(process)
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            left.assert_nothing()
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.root
def test_closing_ends_ranks_even_where_the_keeper_was_killed(kind: str) -> None:
    then = "sys.stdin.readline(); os.kill(keeper._process.pid, 9); keeper._process.wait(); hosts.close()"
    with owner(kind, then=then) as process:
        left = Left(process)
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.wait(20) == 0
        left.assert_nothing()


@pytest.mark.root
def test_a_lab_inside_a_lab_ends_with_the_outer_one(kind: str) -> None:
    hosts: Hosts = Loopback(1) if kind == "loopback" else Lab(1, way="root" if kind == "root" else "user")
    script = OWNER.format(make=MAKE[kind], forget="", then="threading.Event().wait()")
    with hosts:
        left = Left(hosts.popen(0, [sys.executable, "-c", script], stdout=subprocess.PIPE))
    left.assert_nothing()


class Left:
    """What an owner has made, from what it prints; and whether all of it has gone."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        made: Mapping[str, list[int]] = json.loads(process.stdout.readline())
        self.namespaces = set(made["namespaces"])
        self.pidfds = [os.pidfd_open(pid) for pid in made["pids"]]
        self.stdout = process.stdout

    def assert_nothing(self) -> None:
        for pidfd in self.pidfds:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            assert poll.poll(20_000), "a process is still there"
            os.close(pidfd)
        # A namespace without a process, a file or a name is gone; the lab's never have names.
        assert not self.namespaces & {inode for entry in Path("/proc").iterdir() for inode in networks(entry)}
        self.stdout.close()


def networks(process: Path) -> list[int]:
    """Network namespaces that a process is in."""
    try:
        return [(process / "ns/net").stat().st_ino]
    except OSError:
        return []


def owner(kind: str, *, then: str) -> subprocess.Popen[str]:
    # Without namespaces, the environment is all that a process can be known by.
    forget = "" if kind == "loopback" else "env -i"
    script = OWNER.format(make=MAKE[kind], forget=forget, then=then)
    command = [sys.executable, "-c", script]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
