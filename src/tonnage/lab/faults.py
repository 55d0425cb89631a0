"""What goes wrong with a rank: it freezes, or it dies. Cables are cut and slowed by the lab itself.

A rank is its process group: each starts as the leader of a group of its own, so its workers freeze
and die with it, as they would with their machine.
"""

from __future__ import annotations

import os
import signal

from tonnage.errors import LinkError


def stop(pid: int) -> None:
    """Freeze a rank: its sockets stay open, nothing answers.

    Args:
        pid: of a process that a lab started (``lab.popen(...).pid``).

    Raises:
        LinkError: it runs no more, or leads no group of its own.
    """
    _signal_group(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    """Let a frozen rank go on; see ``stop``."""
    _signal_group(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    """End a rank as a power cut does: it gets no chance to say so; see ``stop``."""
    _signal_group(pid, signal.SIGKILL)


def _signal_group(pid: int, number: signal.Signals) -> None:
    # Group 0 is our own, and 1 and below would reach far more than one rank.
    if pid <= 1 or pid == os.getpgrp():
        raise LinkError(f"process {pid} is no rank of a lab", hint="pass the pid of a process from lab.popen")
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError) as error:
        raise LinkError(
            f"{number.name} did not reach process group {pid}: {error.strerror}",
            hint="pass the pid of a process from lab.popen that still runs",
        ) from error
