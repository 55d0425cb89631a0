from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tonnage.errors import LinkError
from tonnage.lab import Hosts, Lab, Loopback, Way, measure_links, open_lab, probe

MBIT = 125_000.0
SOURCE = Path(__file__).parents[2] / "src"
NOBODY = 65534

# Rank 0 sends NBYTES to rank 1, once that says that it listens.
SEND = """
import os, socket
hosts, nbytes = os.environ["TONNAGE_HOSTS"].split(","), int(os.environ["NBYTES"])
if os.environ["RANK"] == "1":
    with socket.create_server((hosts[1], 5000)) as server:
        print("listening", flush=True)
        connection, got = server.accept()[0], 0
        while data := connection.recv(1 << 20):
            got += len(data)
    assert got == nbytes, got
else:
    with socket.create_connection((hosts[1], 5000)) as connection:
        connection.sendall(bytes(nbytes))
"""


def send(hosts: Hosts, nbytes: int) -> None:
    """Send from rank 0 to rank 1, and wait until all has arrived."""
    command, env = [sys.executable, "-I", "-S", "-c", SEND], {"NBYTES": str(nbytes)}
    with hosts.popen(1, command, env=env, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        assert hosts.popen(0, command, env=env).wait(60) == 0
        assert receiver.wait(60) == 0


@pytest.mark.root
def test_bytes_counted_are_bytes_sent_within_three_percent(way: Way) -> None:
    nbytes = 3_000_000
    with Lab(3, 200 * MBIT, way=way) as lab:
        send(lab, nbytes)
        (sent, acks), (_, received), other = (lab.wire_nbytes(rank) for rank in range(3))
    assert nbytes <= sent <= 1.03 * nbytes
    assert nbytes <= received <= 1.03 * nbytes
    # The receiver answers with acknowledgements only, and a switch shows a third host next to nothing.
    assert acks < 0.03 * nbytes
    assert max(other) < 0.01 * nbytes


@pytest.mark.root
def test_links_reach_their_rate_both_ways_at_once(way: Way) -> None:
    with Lab(3, 100 * MBIT, rate_of={1: 40 * MBIT}, way=way) as lab:
        reaches = measure_links(lab, seconds=1)
    assert [each.asked for each in reaches] == [100 * MBIT, 40 * MBIT, 40 * MBIT]
    for each in reaches:
        assert each.asked is not None
        assert 0.7 * each.asked <= each.reached <= 1.2 * each.asked


@pytest.mark.root
def test_a_link_changes_its_rate_while_the_lab_is_open(way: Way) -> None:
    with Lab(2, 100 * MBIT, way=way) as lab:
        lab.reshape(1, 20 * MBIT)
        # A stream that waits for one lost packet delivers a window at once: long beside that.
        slowed = measure_links(lab, seconds=2)
        lab.reshape(1, None)
        lab.reshape(0, None)
        assert not lab.shaped
        freed = measure_links(lab, seconds=0.3)
    for each in slowed:
        assert each.asked == 20 * MBIT
        assert 0.7 * each.asked <= each.reached <= 1.2 * each.asked
    for each in freed:
        assert each.asked is None
        assert each.reached > 150 * MBIT


@pytest.mark.root
def test_labs_side_by_side_share_nothing(way: Way) -> None:
    nbytes = 1_000_000
    with Lab(2, way=way) as one, Lab(2, way=way) as two:
        assert one.addresses == two.addresses
        send(one, nbytes)
        assert one.wire_nbytes(0)[0] >= nbytes
        assert two.wire_nbytes(0)[0] < 10_000


@pytest.mark.root
def test_a_host_reaches_the_hosts_of_its_lab_only(way: Way) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Lab(1, way=way) as lab:
        port = server.getsockname()[1]
        reach = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        refusal: list[str] = []
        lab.run([sys.executable, "-I", "-S", "-c", reach], on_stderr=lambda _, line: refusal.append(line))
    assert "ConnectionRefusedError" in refusal[-1]


@pytest.mark.root
def test_the_note_names_rates_and_the_odd_host(way: Way) -> None:
    with Lab(3, 500 * MBIT, rate_of={2: 100 * MBIT}, way=way) as lab:
        assert lab.shaped
        assert lab.note == "3 namespaces on veth, 500 Mbit/s each way, rank 2 100 Mbit/s each way"
    with Lab(2, way=way) as lab:
        assert not lab.shaped
        assert lab.note == "2 namespaces on veth, unshaped"


@pytest.mark.root
def test_a_user_without_privilege_gets_a_shaped_lab() -> None:
    script = """
import json, os
from tonnage.lab import Lab, measure_links
with Lab(2, 100 * 125_000.0) as lab:
    reached = [each.reached for each in measure_links(lab, seconds=0.5)]
    print(json.dumps({"way": lab.way, "user": os.getuid(), "reached": reached}))
"""
    done = subprocess.run(
        [*without_privilege(), "-B", "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "LinkError: no network namespaces here" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-2])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["way"] == "user"
    assert found["user"] != 0
    assert all(0.7 * 100 * MBIT <= reached <= 1.2 * 100 * MBIT for reached in found["reached"])


@pytest.mark.root
def test_without_permission_the_lab_is_refused_and_loopback_says_why() -> None:
    # In this user namespace nobody, its root included, may make a network namespace.
    deny = 'echo 0 >/proc/sys/user/max_net_namespaces && exec "$@"'
    script = """
from tonnage.errors import LinkError
from tonnage.lab import Lab, open_lab
with open_lab(2, 1e6) as hosts:
    print(hosts.shaped, hosts.isolated, hosts.note, sep="|")
    assert hosts.run(["true"]).exit_code == 0
try:
    Lab(2)
except LinkError as error:
    print(error.what)
"""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Ur", "true"], check=False).returncode:
        pytest.skip("user namespaces are refused here")
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", deny, "sh", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    open_line, refusal = done.stdout.splitlines()
    shaped, isolated, note = open_line.split("|")
    assert (shaped, isolated) == ("False", "False")
    assert note.startswith("plain loopback, unshaped: no network namespaces here: ")
    assert refusal in note


def test_plain_loopback_carries_bytes_between_its_ranks() -> None:
    with Loopback(2, reason="of the test") as hosts:
        send(hosts, 1_000_000)
        assert not hosts.shaped
        assert hosts.note == "plain loopback, unshaped: of the test"


def test_plain_loopback_refuses_what_it_cannot_do_instead_of_guessing() -> None:
    with Loopback(1) as hosts:
        for refused in (
            lambda: hosts.wire_nbytes(0),
            lambda: hosts.reshape(0, 1e6),
            lambda: hosts.cut(0),
            lambda: hosts.mend(0),
        ):
            with pytest.raises(LinkError, match="plain loopback"):
                refused()


def test_what_open_lab_gives_agrees_with_the_probe() -> None:
    with open_lab(2) as hosts:
        assert isinstance(hosts, Lab if probe() is None else Loopback)
        assert hosts.num_hosts == len(hosts.addresses) == len(set(hosts.addresses)) == 2


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("make", [Lab, open_lab])
def test_a_rate_that_no_link_has_is_refused(make: type[Lab], rate: float) -> None:
    with pytest.raises(LinkError, match="bytes per second"):
        make(2, rate)


@pytest.mark.parametrize("num_hosts", [0, -1, 251])
def test_a_number_of_hosts_that_no_lab_has_is_refused(num_hosts: int) -> None:
    with pytest.raises(LinkError, match="hosts"):
        open_lab(num_hosts)


def test_a_rate_for_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(LinkError, match="rank 2"):
        open_lab(2, 1e6, rate_of={2: 1e6})


@pytest.mark.root
def test_what_names_no_rank_is_refused(way: Way) -> None:
    with Lab(2, way=way) as lab:
        for refused in (lambda: lab.wire_nbytes(2), lambda: lab.cut(-1), lambda: lab.popen(2, ["true"])):
            with pytest.raises(LinkError, match="no rank"):
                refused()
        with pytest.raises(LinkError, match="bytes per second"):
            lab.reshape(0, 0.0)
    with pytest.raises(LinkError, match="closed"):
        lab.wire_nbytes(0)


def without_privilege() -> list[str]:
    """A Python that runs as a user without privilege, and that this user may read."""
    if os.geteuid() != 0:
        return [sys.executable]
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv to drop privilege with")
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        # setpriv itself may still reach what the program that it becomes can't: start Python from Python.
        usable = (
            f"import subprocess, sys; sys.path.insert(0, {str(SOURCE)!r}); import tonnage.lab;"
            "subprocess.run([sys.executable, '-c', ''], check=True)"
        )
        ran = Path(python).exists() and subprocess.run(
            [*drop, python, "-B", "-c", usable], cwd="/", capture_output=True, check=False
        )
        if ran and ran.returncode == 0:
            return [*drop, python]
    pytest.skip("no Python 3.11 and source tree that a user without privilege may read")
