from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tonnage.cli import main
from tonnage.lab import probe

needs_lab = [pytest.mark.root, pytest.mark.skipif(probe() is not None, reason=str(probe()))]

# Rank 1 sends to rank 0. Opening a FIFO waits for its other end, so it does when rank 0 listens.
SEND = """
import os, socket, sys
hosts = os.environ["TONNAGE_HOSTS"].split(",")
if os.environ["RANK"] == "0":
    server = socket.create_server((hosts[0], 5000))
    open(sys.argv[1], "w").close()
    connection = server.accept()[0]
    while connection.recv(1 << 20):
        pass
else:
    open(sys.argv[1]).close()
    socket.create_connection((hosts[0], 5000)).sendall(bytes(2_000_000))
print("done")
"""


class TestJob:
    pytestmark = needs_lab

    def test_json_tells_what_each_rank_sent_and_received(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        os.mkfifo(tmp_path / "listening")
        job = ["--", sys.executable, "-I", "-S", "-c", SEND, str(tmp_path / "listening")]
        status = main(["lab", "--ranks", "2", "--link", "200mbit", "--link-of", "1=100mbit", "--json", *job])
        printed = capsys.readouterr()
        found = json.loads(printed.out)
        assert status == found["exit_code"] == 0
        assert found["schema"] == "tonnage.lab/1"
        assert found["shaped"]
        receiver, sender = found["ranks"]
        assert (receiver["rate"], sender["rate"]) == (25e6, 12.5e6)
        for nbytes in (receiver["received_nbytes"], sender["sent_nbytes"]):
            assert 2_000_000 <= nbytes <= 1.03 * 2_000_000
        # 2 MB over 100 Mbit/s, of which two idle buckets may have saved up a little.
        assert found["seconds"] > 0.8 * 2_000_000 / 12.5e6
        assert "[0] done\n" in printed.err

    def test_people_see_the_output_of_ranks_and_a_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        status = main(["lab", "--ranks", "2", "--link", "1gbit", "--", "sh", "-c", "echo I am $RANK"])
        printed = capsys.readouterr()
        lines = printed.out.splitlines()
        assert status == 0
        assert sorted(lines[:2]) == ["[0] I am 0", "[1] I am 1"]
        assert lines[2].split() == ["rank", "sent", "received", "exit"]
        assert [line.split()[0] for line in lines[3:5]] == ["0", "1"]
        assert lines[5].startswith("wall time ")
        assert printed.err == "2 namespaces on veth, 1.00 Gbit/s each way\n"

    def test_the_exit_status_is_that_of_the_first_rank_that_fails(self) -> None:
        assert main(["lab", "--ranks", "3", "--", "sh", "-c", "[ $RANK = 2 ] && exit 5; exec sleep 60"]) == 5

    def test_a_job_out_of_time_has_status_124(self) -> None:
        assert main(["lab", "--timeout", "0.1", "--", "sleep", "60"]) == 124

    def test_options_after_the_dashes_are_the_jobs(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["lab", "--ranks", "1", "--", "echo", "--json", "--ranks", "--", "7"]) == 0
        assert capsys.readouterr().out.startswith("[0] --json --ranks -- 7\n")

    def test_check_measures_every_link(self, capsys: pytest.CaptureFixture[str]) -> None:
        check = ["lab", "--ranks", "2", "--link", "50mbit", "--check", "--seconds", "0.3"]
        assert main([*check, "--json"]) == 0
        links = json.loads(capsys.readouterr().out)["links"]
        assert [each["rank"] for each in links] == [0, 1]
        assert all(0.7 * 6.25e6 <= each["reached"] <= 1.1 * 6.25e6 for each in links)
        assert main(check) == 0
        header, *rows = capsys.readouterr().out.splitlines()
        assert header.split() == ["from", "to", "reached", "asked", "share"]
        assert [row.split()[:2] for row in rows] == [["1", "0"], ["0", "1"]]

    def test_ctrl_c_gives_130_and_leaves_no_rank(self) -> None:
        job = ["sh", "-c", "echo $$; exec sleep 600"]
        command = [sys.executable, "-m", "tonnage", "lab", "--ranks", "2", "--link", "1gbit", "--", *job]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
            pidfds = [os.pidfd_open(pid) for pid in pids]
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert "Traceback" not in process.stderr.read()
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], 0)[0], "a rank outlived the command"
            os.close(pidfd)


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["--check", "--", "true"],
        ["--link", "1mbits", "--", "true"],
        ["--link", "0mbit", "--", "true"],
        ["--link-of", "1", "--", "true"],
        ["--link-of", "x=1gbit", "--", "true"],
        ["--timeout", "-1", "--", "true"],
        ["--timeout", "nan", "--", "true"],
        ["--check", "--seconds", "0"],
    ],
)
def test_what_cannot_be_meant_is_wrong_use(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", *line]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "line",
    [
        ["--ranks", "0", "--", "true"],
        ["--ranks", "2", "--link-of", "2=1gbit", "--", "true"],
        ["--", "no-such-program"],
        ["--ranks", "1", "--link", "1gbit", "--check"],
    ],
)
def test_what_cannot_be_done_is_an_error_with_a_code(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "--json", *line]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "LinkError"


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lab", "--help"])
    assert ended.value.code == 0
    assert "tonnage lab --ranks 4 --link 500mbit -- python train.py" in capsys.readouterr().out
