"""Several hosts on one machine: a network namespace each, cabled to one switch.

``open_lab`` gives the best that this machine allows: a ``Lab`` (as root, or without privilege in a
user namespace) whose links are shaped, counted and can be cut, or else a ``Loopback`` that runs the
ranks side by side and says that it shapes nothing. Both are ``Hosts``.

Whatever runs in a lab ends with it, also when this process is killed; ``keeper`` tells how. A lab
sets up networks only: files, CPUs, memory and ``/sys`` are the machine's (a host's own counters are
in ``/proc/net/dev``).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tonnage.errors import LinkError
from tonnage.lab import shape
from tonnage.lab.keeper import TOKEN_VARIABLE, end_processes
from tonnage.lab.run import LineCallback, RunResult, run_ranks
from tonnage.units import format_rate

Way = Literal["root", "user"]
"""How namespaces are made: with the privilege we have, or inside a user namespace of our own."""

_KEEPER = Path(__file__).with_name("keeper.py")
_SEARCH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
_MASTER_PORT = 29500
_ALLOW = "run as root, or allow user namespaces (sysctl user.max_user_namespaces)"


class Hosts(ABC):
    """Hosts that ranks can run on, one rank a host.

    Attributes:
        num_hosts: how many.
        addresses: IPv4 address of each host.
        interface: name of the network device that the hosts reach each other through.
        rates: bytes per second of each host's link in each direction; None where unshaped.
        isolated: whether each host has a network of its own: traffic counted, cables to cut.
        note: what this is, in one line for a report.
    """

    num_hosts: int
    addresses: tuple[str, ...]
    interface: str
    rates: tuple[float | None, ...]
    isolated: bool
    note: str

    def __init__(self, num_hosts: int) -> None:
        if not 1 <= num_hosts <= shape.MAX_HOSTS:
            raise LinkError(f"a lab of {num_hosts} hosts", hint=f"ask for 1 to {shape.MAX_HOSTS}")
        self.num_hosts = num_hosts
        self._processes: list[subprocess.Popen[str]] = []
        self._keeper: _Keeper | None = None

    @property
    def shaped(self) -> bool:
        """Whether at least one link keeps to a rate."""
        return any(rate is not None for rate in self.rates)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs in the lab, and take the hosts away. A second time does nothing.

        Raises:
            LinkError: a process could not be killed.
        """
        keeper, self._keeper = self._keeper, None
        try:
            if keeper is not None:
                keeper.close()
        finally:
            for process in self._processes:
                process.wait()
            self._processes.clear()

    def env(self, rank: int) -> dict[str, str]:
        """The variables that tell a rank its place, as torchrun gives them, one rank a host."""
        self._check(rank)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(self.master_port),
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
            "TONNAGE_HOSTS": ",".join(self.addresses),
        }

    @property
    @abstractmethod
    def master_port(self) -> int:
        """A port on the first host that nobody listens on."""

    def popen(
        self,
        rank: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[str]:
        """Start a process on a rank's host, as the leader of a session and process group of its own.

        Args:
            rank: 0 to ``num_hosts - 1``.
            argv: the command.
            env: variables on top of our own and of ``self.env(rank)``.
            cwd: folder to start in; ours if None.
            stdin: as in ``subprocess.Popen``; so are the next two. Pipes are text.
            stdout: see ``stdin``.
            stderr: see ``stdin``.

        Raises:
            LinkError: there is no such rank or command, or the lab is closed.
        """
        self._check(rank)
        assert self._keeper is not None
        keeper = self._keeper
        whole = {**os.environ, **self.env(rank), **(env or {})}
        whole[TOKEN_VARIABLE] = f"{os.environ.get(TOKEN_VARIABLE, '')} {keeper.token}".strip()
        if not argv or shutil.which(argv[0], path=whole.get("PATH")) is None:
            raise LinkError(
                f"there is no command {argv[0]!r} to run" if argv else "an empty command",
                where=f"rank {rank}",
                hint="give a program on the PATH or the path of an executable file",
            )
        process = subprocess.Popen(
            [*self._inside(rank), *argv],
            env=whole,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run(
        self,
        argv: Sequence[str] | Callable[[int], Sequence[str]],
        *,
        timeout: float | None = None,
        grace: float = 5.0,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        on_stdout: LineCallback | None = None,
        on_stderr: LineCallback | None = None,
    ) -> RunResult:
        """Run one command on every host and wait for all; the first that fails ends the others.

        Args:
            argv: the command, or a function from the rank to its command.
            timeout: seconds until all are ended.
            grace: seconds that ranks have between being asked to end and being killed.
            env: variables on top of our own and of ``self.env(rank)``.
            cwd: folder to start in; ours if None.
            on_stdout: gets the rank and each line that it prints; without it, ranks print to our output.
            on_stderr: the same for their error output.

        Raises:
            LinkError: a rank could not be started.
        """

        def start(rank: int, *, stdout: int | None, stderr: int | None) -> subprocess.Popen[str]:
            command = argv(rank) if callable(argv) else argv
            return self.popen(
                rank, command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )

        return run_ranks(
            start, self.num_hosts, timeout=timeout, grace=grace, on_stdout=on_stdout, on_stderr=on_stderr
        )

    @abstractmethod
    def wire_nbytes(self, rank: int) -> tuple[int, int]:
        """Bytes that a host has sent and received on its cable since the lab was opened.

        The headers of packets that segmentation offload would make are not counted, so this is
        0 to 5 % below what a physical cable would carry.

        Raises:
            LinkError: the hosts share one network (``Loopback``).
        """

    @abstractmethod
    def reshape(self, rank: int, rate: float | None) -> None:
        """Give a host's cable another rate while it is used.

        Args:
            rank: the host.
            rate: bytes per second in each direction; None takes the limit off.

        Raises:
            LinkError: the rate is not above zero, or the hosts share one network (``Loopback``).
        """

    @abstractmethod
    def cut(self, rank: int) -> None:
        """Pull a host's cable out: everything sent to or by it is lost, and nobody is told.

        Raises:
            LinkError: the hosts share one network (``Loopback``).
        """

    @abstractmethod
    def mend(self, rank: int) -> None:
        """Plug the cable in again; TCP goes on with its next retransmission, seconds later at most.

        Raises:
            LinkError: the hosts share one network (``Loopback``).
        """

    @abstractmethod
    def _inside(self, rank: int) -> list[str]:
        """The command that enters a host and becomes the command behind it."""

    def _check(self, rank: int) -> None:
        if self._keeper is None:
            raise LinkError("the lab is closed", hint="use it inside its with block")
        if not 0 <= rank < self.num_hosts:
            raise LinkError(f"there is no rank {rank}", hint=f"ranks are 0 to {self.num_hosts - 1}")


class Lab(Hosts):
    """Hosts with a network namespace each; open from the start, closed by ``with`` or ``close``.

    Args:
        num_hosts: 1 to 250.
        rate: bytes per second of every cable in each direction; None leaves them unshaped.
        rate_of: other rates for some ranks.
        way: how to make namespaces; None tries both.

    Raises:
        LinkError: namespaces, cables or buckets could not be made here, or an argument can't be meant.
    """

    isolated = True
    interface = "eth0"

    def __init__(
        self,
        num_hosts: int,
        rate: float | None = None,
        *,
        rate_of: Mapping[int, float | None] | None = None,
        way: Way | None = None,
    ) -> None:
        super().__init__(num_hosts)
        rates = _rates(num_hosts, rate, rate_of or {})
        self._tools = _find_tools()
        self.addresses = tuple(shape.address(rank) for rank in range(num_hosts))
        self.way = self._open(rates, (way,) if way else _ways())
        self.note = f"{num_hosts} namespaces on veth, {_describe(rates)}"

    @property
    def master_port(self) -> int:
        """The port that torchrun takes too: in a network of its own it is free."""
        return _MASTER_PORT

    def wire_nbytes(self, rank: int) -> tuple[int, int]:
        """See ``Hosts.wire_nbytes``."""
        self._check(rank)
        shown = self._tool("ip", ["-s", "-json", "link", "show", "dev", self.interface], rank)
        counted = json.loads(shown)[0]["stats64"]
        return int(counted["tx"]["bytes"]), int(counted["rx"]["bytes"])

    def reshape(self, rank: int, rate: float | None) -> None:
        """See ``Hosts.reshape``."""
        self._check(rank)
        _check_rate(rate)
        for device, place in ((self.interface, rank), (f"p{rank}", self.num_hosts)):
            lines = shape.no_bucket(device) if rate is None else [shape.bucket(device, rate)]
            self._tool("tc", ["-batch", "-"], place, lines)
        self.rates = (*self.rates[:rank], rate, *self.rates[rank + 1 :])

    def cut(self, rank: int) -> None:
        """See ``Hosts.cut``."""
        self._check(rank)
        self._tool("ip", ["-batch", "-"], self.num_hosts, [shape.port_line(rank, up=False)])

    def mend(self, rank: int) -> None:
        """See ``Hosts.mend``."""
        self._check(rank)
        self._tool("ip", ["-batch", "-"], self.num_hosts, [shape.port_line(rank, up=True)])

    def _open(self, rates: Sequence[float | None], ways: Sequence[Way]) -> Way:
        refusals = []
        for way in ways:
            try:
                self._keeper = _Keeper(way, self.num_hosts + 1)
                self._cable(rates)
            except LinkError as error:
                self.close()
                refusals.append(error.what)
            except BaseException:
                self.close()
                raise
            else:
                return way
        raise LinkError("no network namespaces here: " + "; ".join(refusals), hint=_ALLOW)

    def _cable(self, rates: Sequence[float | None]) -> None:
        # The last namespace is the switch.
        assert self._keeper is not None
        switch = self.num_hosts
        paths = self._keeper.namespaces[:switch]
        self._tool("ip", ["-batch", "-"], switch, shape.switch_lines(paths))
        self.rates = (None,) * self.num_hosts
        for rank, rate in enumerate(rates):
            self._tool("ip", ["-batch", "-"], rank, shape.host_lines(rank))
            if rate is not None:
                self.reshape(rank, rate)

    def _inside(self, place: int) -> list[str]:
        assert self._keeper is not None
        return [self._tools["nsenter"], *self._keeper.entry(place), "--"]

    def _tool(self, name: str, arguments: Sequence[str], place: int, lines: Sequence[str] = ()) -> str:
        done = subprocess.run(
            [*self._inside(place), self._tools[name], *arguments],
            input="\n".join(lines),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
            raise LinkError(f"{name} refused: {said}", where="; ".join(lines), hint=_ALLOW)
        return done.stdout


class Loopback(Hosts):
    """The same ranks side by side on plain loopback: nothing shaped, nothing counted, nothing to cut.

    Args:
        num_hosts: 1 to 250.
        reason: why there is no ``Lab``, for the note.
    """

    isolated = False
    interface = "lo"

    def __init__(self, num_hosts: int, *, reason: str = "asked for") -> None:
        super().__init__(num_hosts)
        self.reason = reason
        self.rates = (None,) * num_hosts
        # All of 127.0.0.0/8 is loopback on Linux, so that each host can listen on the same port.
        self.addresses = tuple(f"127.0.0.{rank + 1}" for rank in range(num_hosts))
        self.note = f"plain loopback, unshaped: {reason}"
        self._port = _free_port()
        self._keeper = _Keeper("none", 0)

    @property
    def master_port(self) -> int:
        """A port that was free when the hosts were opened."""
        return self._port

    def wire_nbytes(self, rank: int) -> tuple[int, int]:
        """Refused: loopback counts all traffic of the machine together."""
        raise self._refusal("counts no bytes for a rank")

    def reshape(self, rank: int, rate: float | None) -> None:
        """Refused."""
        raise self._refusal("has no rate to set")

    def cut(self, rank: int) -> None:
        """Refused."""
        raise self._refusal("has no cable to cut")

    def mend(self, rank: int) -> None:
        """Refused."""
        raise self._refusal("has no cable to mend")

    def _inside(self, rank: int) -> list[str]:
        return []

    def _refusal(self, what: str) -> LinkError:
        return LinkError(f"plain loopback {what}", where=self.reason, hint=_ALLOW)


def open_lab(
    num_hosts: int, rate: float | None = None, *, rate_of: Mapping[int, float | None] | None = None
) -> Hosts:
    """A ``Lab`` where this machine allows one, else a ``Loopback`` whose note tells why.

    Raises:
        LinkError: an argument can't be meant.
    """
    _rates(num_hosts, rate, rate_of or {})
    try:
        return Lab(num_hosts, rate, rate_of=rate_of)
    except LinkError as error:
        return Loopback(num_hosts, reason=error.what)


def probe(way: Way | None = None) -> str | None:
    """Why no shaped lab can be made here, in one line; None if one can: it was made and closed."""
    try:
        with Lab(1, rate=1e6, way=way):
            return None
    except LinkError as error:
        return error.what


def available(way: Way | None = None) -> bool:
    """Whether a shaped lab can be made here."""
    return probe(way) is None


class _Keeper:
    """The parent's end of the keeper process."""

    def __init__(self, way: Way | Literal["none"], num_namespaces: int) -> None:
        if not sys.platform.startswith("linux"):
            raise LinkError(
                f"a lab needs Linux, and this is {sys.platform}", hint="run it in a Linux container"
            )
        self.token = f"lab-{os.getpid()}-{secrets.token_hex(8)}"
        self._way = way
        arguments = (way, str(num_namespaces), self.token, str(os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_KEEPER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        made = json.loads(line) if line.startswith("{") else {"error": f"the keeper failed: {line.strip()}"}
        if "error" in made:
            self._leave()
            raise LinkError(str(made["error"]), hint=_ALLOW)
        self._inodes = frozenset(int(inode) for inode in made["inodes"])
        self.namespaces = [f"/proc/{self._process.pid}/fd/{int(fd)}" for fd in made["files"]]

    def entry(self, place: int) -> list[str]:
        """What ``nsenter`` needs to enter a namespace."""
        user = [f"--user=/proc/{self._process.pid}/ns/user", "--preserve-credentials"]
        return [*(user if self._way == "user" else ()), f"--net={self.namespaces[place]}"]

    def close(self) -> None:
        # A keeper that somebody killed could not end the ranks: then we do.
        if self._leave() != 0 and not end_processes(self.token, self._inodes):
            raise LinkError("a process of the lab does not end", where=self.token, hint="look at it with ps")

    def _leave(self) -> int:
        # Closes its standard input, which is its sign to end, and waits for that.
        self._process.communicate()
        return self._process.returncode


def _rates(
    num_hosts: int, rate: float | None, rate_of: Mapping[int, float | None]
) -> tuple[float | None, ...]:
    strangers = sorted(rank for rank in rate_of if not 0 <= rank < num_hosts)
    if strangers:
        raise LinkError(f"a rate for rank {strangers[0]}", hint=f"ranks are 0 to {num_hosts - 1}")
    rates = tuple(rate_of.get(rank, rate) for rank in range(num_hosts))
    for each in rates:
        _check_rate(each)
    return rates


def _check_rate(rate: float | None) -> None:
    # tc counts in whole bits, 1 Tbit/s is beyond what any machine moves through veth.
    if rate is not None and not 125.0 <= rate <= 125e9:
        raise LinkError(f"a link of {rate} bytes per second", hint="ask for 1 kbit/s to 1 Tbit/s")


def _describe(rates: Sequence[float | None]) -> str:
    texts = ["unshaped" if rate is None else f"{format_rate(rate)} each way" for rate in rates]
    usual = max(dict.fromkeys(texts), key=texts.count)
    others = [f"rank {rank} {text}" for rank, text in enumerate(texts) if text != usual]
    return ", ".join([usual, *others])


def _ways() -> tuple[Way, ...]:
    return ("root", "user") if os.geteuid() == 0 else ("user",)


def _find_tools() -> dict[str, str]:
    found = {name: shutil.which(name, path=_SEARCH) for name in ("ip", "tc", "nsenter")}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise LinkError(f"no {' or '.join(missing)} on this machine", hint="install iproute2 and util-linux")
    return {name: path for name, path in found.items() if path is not None}


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return int(probe_socket.getsockname()[1])
