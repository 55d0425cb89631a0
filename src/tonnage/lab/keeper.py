"""The process that holds a lab's namespaces, and ends everything in them when the lab ends.

A namespace without a name lives as long as a process or an open file holds it. The keeper holds
all of a lab's network namespaces as open files, and nothing else does but the ranks in them. So
nothing of a lab has a name that could be left behind: when the keeper ends, the kernel takes the
namespaces, bridge, cables and queues away.

It ends in one of two ways: its standard input is closed (the lab was closed), or its parent dies,
however it dies (``kill -9`` too: it watches a pidfd). It then kills every process that carries the
lab's token in its environment or sits in one of its namespaces, and only then goes. It leads a
session of its own, so that a signal to the parent's process group passes it by.

The file is run by path in a bare interpreter (``python -I -S``) and imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

TOKEN_VARIABLE = "TONNAGE_LAB"
"""Environment variable with the tokens of the labs that a process runs in, the innermost last."""

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000


def end_processes(token: str, namespaces: frozenset[int], *, patience: float = 10.0) -> bool:
    """Kill the processes of one lab; True when none is left.

    Args:
        token: the lab's own word in ``TOKEN_VARIABLE``.
        namespaces: inode numbers of its network namespaces.
        patience: seconds after which a process that does not die is given up.
    """
    deadline = time.monotonic() + patience
    # A process may have forked between the reading of /proc and the signal: repeat until none is seen.
    while sum(_kill(pid, token, namespaces) for pid in _pids()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def main(arguments: Sequence[str]) -> int:
    """Hold namespaces until the lab closes or the parent dies; exit status 1 if a process stayed."""
    way, count, token, parent = arguments
    os.chdir("/")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    held: list[int] = []
    try:
        parent_fd = os.pidfd_open(int(parent))
        held += _make_namespaces(way, int(count))
    except OSError as error:
        print(json.dumps({"error": f"{error.strerror} ({way} namespaces)"}), flush=True)
        return 1
    inodes = frozenset(os.fstat(fd).st_ino for fd in held)
    try:
        print(json.dumps({"files": held, "inodes": sorted(inodes)}), flush=True)
        # The pid could have been given to another process before the pidfd was opened.
        if os.getppid() == int(parent):
            _wait(parent_fd)
    finally:
        ended = end_processes(token, inodes)
    return 0 if ended else 1


def _make_namespaces(way: str, count: int) -> list[int]:
    """Open files of ``count`` new network namespaces; ``user``: in a user namespace of our own."""
    if way == "user":
        uid, gid = os.geteuid(), os.getegid()
        _unshare(_CLONE_NEWUSER)
        # user_namespaces(7): without privilege a group map may be written only after this.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    files = []
    for _ in range(count):
        _unshare(_CLONE_NEWNET)
        files.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        _choose_reno()
    return files


def _choose_reno() -> None:
    """Let TCP in the namespace that we are in behave alike on every machine.

    A new namespace has the machine's choice. BBR needs seconds to find a bucket's rate, and reached
    half of 50 Mbit/s in a measurement of 0.3 s where Reno reached 96 %. Cubic, Linux' usual choice,
    keeps to Reno's pace at round trips this short (RFC 9438, section 4.3), but unlike Reno a kernel
    may lack it or forbid it in a namespace.
    """
    # A container may mount /proc/sys read-only: then the lab works with the machine's choice.
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")


def _unshare(flags: int) -> None:
    # os.unshare came with Python 3.12.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _wait(parent_fd: int) -> None:
    poll = select.poll()
    poll.register(parent_fd, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    poll.poll()


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _kill(pid: int, token: str, namespaces: frozenset[int]) -> bool:
    """Kill ``pid`` if it is a process of the lab; True if it was one."""
    if pid == os.getpid():
        return False
    try:
        # Opened before the process is looked at, so that the signal meets the one that was seen.
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        found = _carries(pid, token) or _network(pid) in namespaces
        if found:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return found
    finally:
        os.close(pidfd)


def _carries(pid: int, token: str) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, a zombie, or another user's: then not one of ours
        return False
    key = f"{TOKEN_VARIABLE}=".encode()
    return any(token.encode() in line[len(key) :].split() for line in variables if line.startswith(key))


def _network(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return -1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
