from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tonnage.errors import LinkError
from tonnage.lab import Loopback

no_ends = st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def three() -> Iterator[Loopback]:
    with Loopback(3) as hosts:
        yield hosts


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(no_ends, max_size=5), end=st.booleans())
def test_what_ranks_print_comes_back_line_by_line(three: Loopback, lines: list[str], end: bool) -> None:
    text = "\n".join(lines) + ("\n" if end else "")
    got: dict[int, list[str]] = {0: [], 1: [], 2: []}
    result = three.run(["printf", "%s", text], on_stdout=lambda rank, line: got[rank].append(line))
    expected = text.split("\n")
    if not expected[-1]:
        expected.pop()
    assert result.codes == (0, 0, 0)
    assert got == dict.fromkeys(range(3), expected)


def test_output_larger_than_a_pipe_is_passed_on_whole(three: Loopback) -> None:
    got: list[str] = []
    three.run(["seq", "60000"], on_stdout=lambda rank, line: got.append(line) if rank == 1 else None)
    assert got == [str(number) for number in range(1, 60001)]


def test_output_and_error_output_are_told_apart(three: Loopback) -> None:
    out, err = [], []
    three.run(
        ["sh", "-c", "echo out; echo err >&2"],
        on_stdout=lambda rank, line: out.append((rank, line)),
        on_stderr=lambda rank, line: err.append((rank, line)),
    )
    assert sorted(out) == [(rank, "out") for rank in range(3)]
    assert sorted(err) == [(rank, "err") for rank in range(3)]


def test_the_first_rank_that_fails_ends_the_others(three: Loopback) -> None:
    result = three.run(["sh", "-c", '[ "$RANK" = 1 ] && exit 7; exec sleep 60'])
    assert result.codes == (-signal.SIGTERM, 7, -signal.SIGTERM)
    assert (result.first_failed, result.exit_code, result.timed_out) == (1, 7, False)
    assert result.seconds < 20


def test_a_rank_that_ignores_the_request_to_end_is_killed_after_the_grace_period(
    three: Loopback, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "trapped")
    commands = (
        'trap "" TERM; echo >trapped; while :; do sleep 60; done',
        # Reading blocks until rank 0 has set its trap.
        "read line <trapped; exit 1",
        "exec sleep 60",
    )
    result = three.run(lambda rank: ["sh", "-c", commands[rank]], grace=0.2, cwd=tmp_path)
    assert result.codes == (-signal.SIGKILL, 1, -signal.SIGTERM)


def test_a_job_out_of_time_is_ended_with_status_124(three: Loopback) -> None:
    result = three.run(["sleep", "60"], timeout=0.1)
    assert result.timed_out
    assert result.first_failed is None
    assert result.exit_code == 124
    assert result.codes == (-signal.SIGTERM,) * 3


def test_a_rank_killed_by_a_signal_gives_the_status_a_shell_would(three: Loopback) -> None:
    assert three.run(["sh", "-c", "kill -SEGV $$"]).exit_code == 128 + signal.SIGSEGV


def test_a_grandchild_that_holds_the_pipe_open_does_not_hold_up_the_job() -> None:
    with Loopback(1) as hosts:
        got: list[str] = []
        started = time.monotonic()
        hosts.run(["sh", "-c", "sleep 60 & echo $!"], on_stdout=lambda _, line: got.append(line))
        pidfd = os.pidfd_open(int(got[0]))
        assert time.monotonic() - started < 20
    # Closing the lab ended it, though its rank was gone.
    assert _ended(pidfd)


def test_an_error_in_a_callback_leaves_no_rank_behind() -> None:
    def fail(rank: int, line: str) -> None:
        raise RuntimeError(line)

    with Loopback(2) as hosts:
        with pytest.raises(RuntimeError) as raised:
            hosts.run(["sh", "-c", "echo $$; exec sleep 60"], on_stdout=fail)
        with pytest.raises(ProcessLookupError):
            os.kill(int(str(raised.value)), 0)


def test_ranks_see_their_place_and_the_callers_variables(three: Loopback) -> None:
    seen: dict[int, str] = {}
    show = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR:$MASTER_PORT $GLOO_SOCKET_IFNAME $MINE"'
    three.run(["sh", "-c", show], env={"MINE": "x"}, on_stdout=lambda rank, line: seen.update({rank: line}))
    master = f"127.0.0.1:{three.master_port}"
    assert seen == {rank: f"{rank} 3 0 {master} lo x" for rank in range(3)}


@pytest.mark.parametrize("argv", [["no-such-program"], []])
def test_a_command_that_is_not_there_is_refused_before_anything_starts(
    three: Loopback, argv: list[str]
) -> None:
    with pytest.raises(LinkError, match="command"):
        three.run(argv)


def test_a_closed_lab_starts_nothing() -> None:
    hosts = Loopback(1)
    hosts.close()
    hosts.close()
    with pytest.raises(LinkError, match="closed"):
        hosts.popen(0, ["true"])


def test_popen_gives_pipes_of_text(three: Loopback) -> None:
    with three.popen(1, ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.communicate("3 €\n")[0] == "3 €\n"


def _ended(pidfd: int) -> bool:
    """Wait until a process has ended; False after a deadline."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        return bool(poll.poll(20_000))
    finally:
        os.close(pidfd)
