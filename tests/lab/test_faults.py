from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tonnage.errors import LinkError
from tonnage.lab import Hosts, Lab, Loopback, Way, kill, resume, stop

# Rank 0 sends without end. Rank 1 tells when bytes begin to come, stop for 0.4 s, or end.
STREAM = """
import os, socket
hosts, chunk = os.environ["TONNAGE_HOSTS"].split(","), bytes(1 << 14)
if os.environ["RANK"] == "0":
    connection = socket.create_connection((hosts[1], 5000))
    while True:
        connection.sendall(chunk)
server = socket.create_server((hosts[1], 5000))
print("listening", flush=True)
connection = server.accept()[0]
connection.settimeout(0.4)
said = None
while said != "end":
    try:
        say = "bytes" if connection.recv(1 << 20) else "end"
    except TimeoutError:
        say = "silence"
    if say != said:
        print(say, flush=True)
    said = say
"""


@contextmanager
def stream(hosts: Hosts) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """The sender, and what the receiver tells; bytes are flowing at the start."""
    command = [sys.executable, "-I", "-S", "-c", STREAM]
    with hosts.popen(1, command, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        told = (line.strip() for line in receiver.stdout)
        assert next(told) == "listening"
        sender = hosts.popen(0, command)
        try:
            assert next(told) == "bytes"
            yield sender, told
        finally:
            sender.kill()
            receiver.kill()


@pytest.mark.root
@pytest.mark.timeout(60)
def test_a_cut_cable_carries_nothing_until_it_is_mended(way: Way) -> None:
    with Lab(2, 12.5e6, way=way) as lab, stream(lab) as (sender, told):
        lab.cut(1)
        before = lab.wire_nbytes(1)
        assert next(told) == "silence"
        assert lab.wire_nbytes(1)[1] == before[1]
        lab.mend(1)
        assert next(told) == "bytes"
        # And the sender's end of the network as well.
        lab.cut(0)
        assert next(told) == "silence"
        lab.mend(0)
        assert next(told) == "bytes"
        assert sender.poll() is None


@pytest.mark.root
@pytest.mark.timeout(60)
def test_a_stopped_rank_sends_nothing_until_it_is_resumed(way: Way) -> None:
    with Lab(2, 12.5e6, way=way) as lab, stream(lab) as (sender, told):
        stop(sender.pid)
        assert next(told) == "silence"
        resume(sender.pid)
        assert next(told) == "bytes"
        kill(sender.pid)
        assert next(told) == "end"
        assert sender.wait() == -9


@pytest.mark.timeout(60)
def test_ranks_on_plain_loopback_stop_and_die_too() -> None:
    with Loopback(2) as hosts, stream(hosts) as (sender, told):
        stop(sender.pid)
        assert next(told) == "silence"
        kill(sender.pid)
        assert next(told) == "end"


def test_a_rank_freezes_and_dies_with_its_workers() -> None:
    with Loopback(1) as hosts:
        with hosts.popen(0, ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None
            worker = os.pidfd_open(int(rank.stdout.readline()))
            kill(rank.pid)
            # Both hold the pipe, so its end means that both are gone.
            assert rank.stdout.read() == ""
            os.close(worker)


def test_a_process_that_is_no_rank_is_left_alone() -> None:
    with Loopback(1) as hosts:
        gone = hosts.popen(0, ["true"])
        gone.wait()
        for pid in (gone.pid, 0, 1, -1, os.getpgrp()):
            with pytest.raises(LinkError):
                kill(pid)
