"""One job over all ranks: start them, pass on what they print, and let one failure end them all.

The loop sleeps in one ``select`` over a pidfd for each rank and a pipe for each stream; it never polls.
A rank that fails leaves the others waiting for it in a collective, so they are asked to end (SIGTERM),
and after a grace period they are killed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

TIMED_OUT = 124
"""Exit status of a job that ran out of time, as in timeout(1)."""

LineCallback = Callable[[int, str], None]
"""Called in the caller's thread with the rank and one line, without its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a job ended.

    Attributes:
        codes: exit status of each rank; below 0, the signal that ended it.
        first_failed: the rank that failed first, None if none did before the end of time.
        timed_out: whether the job was ended for taking too long.
        seconds: from the start of the first rank to the end of the last.
    """

    codes: tuple[int, ...]
    first_failed: int | None
    timed_out: bool
    seconds: float

    @property
    def exit_code(self) -> int:
        """One status for the job, as a shell gives it: 0, the first failure's, or 124 for out of time."""
        if self.timed_out:
            return TIMED_OUT
        code = 0 if self.first_failed is None else self.codes[self.first_failed]
        return code if code >= 0 else 128 - code


class Start(Protocol):
    """Starts one rank, its streams being files or pipes as in ``subprocess.Popen``."""

    def __call__(self, rank: int, *, stdout: int | None, stderr: int | None) -> subprocess.Popen[str]:
        """Start ``rank`` as the leader of a process group of its own."""


def run_ranks(
    start: Start,
    num_ranks: int,
    *,
    timeout: float | None = None,
    grace: float = 5.0,
    on_stdout: LineCallback | None = None,
    on_stderr: LineCallback | None = None,
) -> RunResult:
    """Run ``num_ranks`` processes to their end.

    Args:
        start: called once for each rank, in order.
        num_ranks: how many.
        timeout: seconds after which all are ended; None for no limit.
        grace: seconds between SIGTERM and SIGKILL for ranks that outlive a failure or the timeout.
        on_stdout: gets each line of the ranks' output; without it, they write to ours.
        on_stderr: the same for their error output.
    """
    with _Job() as job:
        for rank in range(num_ranks):
            job.add(rank, start, on_stdout, on_stderr)
        return job.wait(timeout, grace)


class _Lines:
    """Cuts what comes out of a pipe into lines."""

    def __init__(self, rank: int, fd: int, callback: LineCallback) -> None:
        self._rank, self._fd, self._callback = rank, fd, callback
        self._rest = b""
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Pass on the lines that are there; False at the end of the stream."""
        return self._take() != b""

    def finish(self) -> None:
        """Pass on what is left. A grandchild may hold the pipe open, so its end may never come."""
        while self._take():
            pass
        if self._rest:
            self._pass_on(self._rest)
            self._rest = b""

    def _take(self) -> bytes | None:
        """What was read; None where nothing waits, empty at the end of the stream."""
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._pass_on(line)
        return data

    def _pass_on(self, line: bytes) -> None:
        self._callback(self._rank, line.decode("utf-8", errors="replace"))


class _Job:
    """The ranks of one run; whichever way it is left, none of them is."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._pidfds: list[int] = []
        self._streams: list[_Lines] = []
        self._codes: dict[int, int] = {}
        self._started = time.monotonic()

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._selector.close()

    def add(self, rank: int, start: Start, out: LineCallback | None, err: LineCallback | None) -> None:
        process = start(
            rank, stdout=subprocess.PIPE if out else None, stderr=subprocess.PIPE if err else None
        )
        self._processes.append(process)
        self._running[rank] = process
        pidfd = os.pidfd_open(process.pid)
        self._pidfds.append(pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, rank)
        for stream, callback in ((process.stdout, out), (process.stderr, err)):
            if stream is not None and callback is not None:
                lines = _Lines(rank, stream.fileno(), callback)
                self._streams.append(lines)
                self._selector.register(stream, selectors.EVENT_READ, lines)

    def wait(self, timeout: float | None, grace: float) -> RunResult:
        deadline = None if timeout is None else self._started + timeout
        first_failed: int | None = None
        ending = timed_out = False
        while self._running:
            failed = self._step(deadline)
            if failed is not None and not ending:
                first_failed = failed
            late = deadline is not None and time.monotonic() >= deadline
            if ending and late:
                self._signal(signal.SIGKILL)
                deadline = None
            elif not ending and (late or first_failed is not None):
                timed_out = first_failed is None
                ending, deadline = True, time.monotonic() + grace
                self._signal(signal.SIGTERM)
        seconds = time.monotonic() - self._started
        for lines in self._streams:
            lines.finish()
        codes = tuple(self._codes[rank] for rank in range(len(self._processes)))
        return RunResult(codes=codes, first_failed=first_failed, timed_out=timed_out, seconds=seconds)

    def _step(self, deadline: float | None) -> int | None:
        """Wait for one thing to happen; the first rank that was found to have failed."""
        failed = None
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(wait):
            if isinstance(key.data, _Lines):
                if not key.data.read():
                    self._selector.unregister(key.fileobj)
                continue
            self._selector.unregister(key.fileobj)
            rank = int(key.data)
            self._codes[rank] = self._running.pop(rank).wait()
            if self._codes[rank] and failed is None:
                failed = rank
        return failed

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running.values():
            # Not reaped yet, so the number of the group is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
