"""Pools of real ranks over loopback, that many tests share."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
_START = "import sys; sys.path.insert(0, sys.argv[1]); import ranks; ranks.main(*map(int, sys.argv[2:]))"
_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class Pool:
    """Processes of one group; each case is run by all of them together.

    Args:
        size: how many.
        timeout: seconds that a case may take before all are killed.
    """

    def __init__(self, size: int, *, timeout: float = 60.0) -> None:
        self.size = size
        self._timeout = timeout
        self._open()

    def _open(self) -> None:
        size = self.size
        self._told: list[list[Any]] = [[] for _ in range(size)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-c", _START, str(HERE), str(rank), str(size), str(theirs.fileno())]
            self.processes.append(
                subprocess.Popen(command, env={**os.environ, **_ENV}, pass_fds=[theirs.fileno()])
            )
            theirs.close()
            self._links.append(Connection(ours.detach()))
        port = self.told(0)
        for link in self._links[1:]:
            link.send(port)

    def run(self, case: str, **arguments: Any) -> list[Any]:
        """What ``module.function(**arguments)`` returns on each rank; raises what the first one raised."""
        answers = self.answers(case, **arguments)
        for rank, answer in enumerate(answers):
            if isinstance(answer, Exception):
                answer.add_note(f"raised on rank {rank} of {self.size} by {case}({arguments})")
                raise answer
        return answers

    def answers(self, case: str, **arguments: Any) -> list[Any]:
        """As :meth:`run`, with the exception in place of the result where a rank raised one."""
        self.start(case, **arguments)
        return self.collect(case)

    def start(self, case: str, **arguments: Any) -> None:
        """Begin a case; :meth:`collect` waits for its end."""
        if any(process.poll() is not None for process in self.processes):
            self.close()
            self._open()  # one test's dead ranks are not the next one's failure
        for link in self._links:
            link.send((*case.split("."), arguments))

    def collect(self, case: str = "the case") -> list[Any]:
        """The answers of the case that was started, by rank."""
        deadline = time.monotonic() + self._timeout
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            for rank, (word, value) in self._receive(deadline, case, without=answers):
                if word == "told":
                    self._told[rank].append(value)
                else:
                    answers[rank] = value
        return [answers[rank] for rank in range(self.size)]

    def told(self, rank: int) -> Any:
        """The next value that ``rank`` told from within a case."""
        deadline = time.monotonic() + self._timeout
        while not self._told[rank]:
            for other, (_, value) in self._receive(deadline, "a word of a rank", without={}):
                self._told[other].append(value)
        return self._told[rank].pop(0)

    def close(self) -> None:
        """Let the ranks end by themselves; kill those that do not."""
        for link in self._links:
            link.close()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """End all ranks, each with its threads' tracebacks on standard error."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGABRT)
            process.wait()

    def _receive(self, deadline: float, what: str, *, without: Any) -> list[tuple[int, Any]]:
        links = [link for rank, link in enumerate(self._links) if rank not in without]
        ready = wait(links, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            self.kill()
            missing = [self._links.index(link) for link in links]
            pytest.fail(f"ranks {missing} did not end {what} within {self._timeout:.0f} s")
        return [(self._links.index(link), link.recv()) for link in ready]


def _pool(size: int) -> Iterator[Pool]:
    pool = Pool(size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pair() -> Iterator[Pool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def quad() -> Iterator[Pool]:
    yield from _pool(4)
