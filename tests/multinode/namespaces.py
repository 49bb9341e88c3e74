"""Machines that are network namespaces: an address and a cable each, on one switch.

    p1 (eth0 10.213.0.11) ──── cable ────┐
    d1 (eth0 10.213.0.21) ── cable ~~~~ ─┤ br0  in a namespace of its own, ``switch``
    client   10.213.0.2   ──── cable ────┘

Nothing of it shows in the namespace that we were started in: no device, no route, no
address.  ``Machine.inside`` takes the calling thread, and what it starts, into a machine.
A cable can be pulled out and put back (``unplug``, ``plug``), narrowed (``narrow``), and two
machines can be made unable to reach each other alone (``part``, ``heal``).  Cables with a
``~`` run through :mod:`tests.multinode.wire`, which makes packets late and loses some.

Names begin with ``pdmn.``, then say who made them, as pid and start time.  A guard, a
process of its own, deletes them when a pipe from us closes, however that came about; should
the guard be killed too, the next network sweeps up what has no owner any more.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.multinode.wire import Wire

_PREFIX = "pdmn"
_NAMES = Path("/run/netns")
_TUN = Path("/dev/net/tun")
_CLONE_NEWNET = 0x40000000
_SUBNET = "10.213.0."
_UNUSED_ADDRESS = "02:00:00:00:00:00"  # a hardware address that no machine has
_ROOT = Path(__file__).parents[2]


class NetworkFailed(Exception):
    """A command that builds or changes the network failed; says which, and its words."""


def why_not() -> str | None:
    """Why no network can be made here, or None where one can."""
    if os.geteuid() != 0:
        return f"network namespaces need root, and this is user {os.geteuid()}"
    if not _TUN.exists():
        return f"{_TUN} is not there, and late cables are made of it"
    trial = f"{_PREFIX}.{_owner(os.getpid())}.trial"
    try:
        _ip("netns", "add", trial)
        _ip("netns", "del", trial)
    except NetworkFailed as failure:
        return f"network namespaces cannot be made here: {failure}"
    return None


@dataclass(frozen=True)
class Machine:
    """A namespace with one network card, ``eth0``."""

    name: str
    namespace: str
    address: str

    @property
    def within(self) -> tuple[str, ...]:
        """Words that run the command behind them here."""
        return ("ip", "netns", "exec", self.namespace)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Be here: this thread, and threads and processes that it starts meanwhile."""
        with (
            open("/proc/thread-self/ns/net", encoding="utf-8") as home,
            open(_NAMES / self.namespace, encoding="utf-8") as here,
        ):
            _enter(here.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def received_nbytes(self, device: str = "eth0") -> int:
        """Bytes that have come in at ``device``, headers included, since it was made."""
        shown = _ip("-n", self.namespace, "-j", "-s", "link", "show", device)
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])

    def set(self, key: str, value: int) -> None:
        """Write a number under ``/proc/sys/net``, here only; ``key`` like ``ipv4/tcp_retries2``."""
        with self.inside():
            Path("/proc/sys/net", key).write_text(f"{value}\n", encoding="utf-8")


class Network:
    """Machines by name, on one switch; gone for certain when this closes.

    Args:
        addresses: the last number of each machine's address, by name.
        late: names of machines whose cable can make packets late and lose them.

    Raises:
        NetworkFailed: nothing of it is left then.
    """

    def __init__(self, addresses: dict[str, int], late: Sequence[str] = ()) -> None:
        self._id = f"{_PREFIX}.{_owner(os.getpid())}.{os.urandom(2).hex()}"
        self._switch = Machine("switch", f"{self._id}.switch", "")
        self.machines = {
            name: Machine(name, f"{self._id}.{name}", f"{_SUBNET}{number}")
            for name, number in addresses.items()
        }
        sweep()
        with ExitStack() as built:
            built.callback(self._guarded().__exit__, None, None, None)
            self._build_switch()
            self.wire = built.enter_context(Wire(self._switch.within, late))
            for machine in self.machines.values():
                self._connect(machine, machine.name in late)
            self._open = built.pop_all()

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def unplug(self, name: str) -> None:
        """Pull a machine's cable out at the switch; it learns that it has no carrier."""
        self._at_switch("link", "set", "dev", name, "down")

    def plug(self, name: str) -> None:
        """Put it back."""
        self._at_switch("link", "set", "dev", name, "up")

    def part(self, one: str, other: str) -> None:
        """Let nothing pass between two machines, without a word to either.

        Each takes the other to be at a hardware address that no machine has.
        """
        for a, b in ((self[one], self[other]), (self[other], self[one])):
            at_unused = ("lladdr", _UNUSED_ADDRESS, "nud", "permanent", "dev", "eth0")
            _ip("-n", a.namespace, "neigh", "replace", b.address, *at_unused)

    def heal(self, one: str, other: str) -> None:
        """Undo ``part``."""
        for a, b in ((self[one], self[other]), (self[other], self[one])):
            _ip("-n", a.namespace, "neigh", "del", b.address, "dev", "eth0")

    def narrow(
        self,
        name: str,
        bytes_per_s: int,
        *,
        burst_nbytes: int = 16 << 10,
        queue_nbytes: int = 64 << 10,
    ) -> None:
        """Let no more than this pass to a machine in a second; what does not queue is lost.

        A fast cable needs a burst of about what passes in a millisecond.
        """
        shape = (
            "rate",
            f"{8 * bytes_per_s}",
            "burst",
            f"{burst_nbytes}",
            "limit",
            f"{queue_nbytes}",
        )
        self._tc("replace", name, "tbf", *shape)

    def widen(self, name: str) -> None:
        """Undo ``narrow``."""
        self._tc("del", name)

    def close(self) -> None:
        """Delete all; processes inside keep what they have until they end."""
        self._open.close()

    def _guarded(self) -> subprocess.Popen[bytes]:
        """A process that deletes the network as soon as we are gone or close its pipe.

        In a session of its own, so that an interrupt at a terminal does not reach it.
        """
        return subprocess.Popen(
            [sys.executable, "-m", "tests.multinode.namespaces", self._id],
            stdin=subprocess.PIPE,
            cwd=_ROOT,
            start_new_session=True,
        )

    def _build_switch(self) -> None:
        _ip("netns", "add", self._switch.namespace)
        self._at_switch("link", "add", "name", "br0", "type", "bridge")
        self._at_switch("link", "set", "dev", "br0", "up")

    def _connect(self, machine: Machine, late: bool) -> None:
        ours, here = self._switch.namespace, machine.namespace
        _ip("netns", "add", here)
        if late:
            far = self.wire.far_end(machine.name)
            self._at_switch("link", "set", "dev", far, "netns", here, "name", "eth0")
        else:
            veth = ("type", "veth", "peer", "name", "eth0", "netns", here)
            _ip("link", "add", "name", machine.name, "netns", ours, *veth)
        self._at_switch("link", "set", "dev", machine.name, "master", "br0", "up")
        _ip("-n", here, "address", "add", f"{machine.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", here, "link", "set", "dev", device, "up")

    def _at_switch(self, *words: str) -> None:
        _ip("-n", self._switch.namespace, *words)

    def _tc(self, verb: str, device: str, *shape: str) -> None:
        namespace = self._switch.namespace
        _run(["tc", "-n", namespace, "qdisc", verb, "dev", device, "root", *shape])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def left_by(pid: int | None = None) -> list[str]:
    """Namespaces of networks: all, or those that a process made."""
    beginning = f"{_PREFIX}." if pid is None else f"{_PREFIX}.{pid}-"
    with suppress(FileNotFoundError):
        return sorted(e.name for e in _NAMES.iterdir() if e.name.startswith(beginning))
    return []


def sweep() -> list[str]:
    """Delete namespaces whose makers are gone; returns their names."""
    swept = []
    for name in left_by():
        owner = name.split(".")[1]
        pid = owner.partition("-")[0]
        if pid.isdigit() and _owner(int(pid)) != owner:
            _delete(name)
            swept.append(name)
    return swept


def _owner(pid: int) -> str:
    """A process's pid and start time, which no other process ever has both of."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{pid}-gone"
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"


def _delete(name: str) -> None:
    with suppress(NetworkFailed):  # another sweep was faster
        _ip("netns", "del", name)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise NetworkFailed(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise NetworkFailed(f"{' '.join(command)}: {error.stderr.strip()}") from error
    return done.stdout


def _guard(network: str) -> None:
    """Wait until the maker of ``network`` closes our standard input; delete it."""
    sys.stdin.buffer.read()
    for name in left_by():
        if name.startswith(f"{network}."):
            _delete(name)


if __name__ == "__main__":
    _guard(sys.argv[1])
