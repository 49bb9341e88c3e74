"""The side that lends: allocates what it is told to, registers it, and is read.

Beside a benchmark it is a child process at the end of a socket pair; on another host it
listens (``pdconn bench transfer --serve``).  One reader at a time is served.  Whoever
reaches the port may make it allocate up to its limit and read a pattern, so it belongs
on a network where that is harmless.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from pdconn.bench.errors import BadCase, BenchError, LenderFailed
from pdconn.bench.manifest import machine
from pdconn.bench.transfer.arena import BenchMemory
from pdconn.bench.transfer.control import (
    AT_LENDER,
    AT_READER,
    CannotLend,
    FromLender,
    Lent,
    Open,
    Opened,
    Shut,
    Talk,
    ToLender,
    Used,
)
from pdconn.bench.transfer.mooncake import Mooncake
from pdconn.bench.transfer.paths import PATHS
from pdconn.bench.transfer.workload import extent
from transport import TransportError

log = logging.getLogger(__name__)

MAX_BYTES = 16 << 30
_ENDING_S = 20.0


class BenchLender:
    """Memory of some ranks, each with a transport, until :meth:`close`."""

    def __init__(self, asked: Open, max_nbytes: int) -> None:
        self._stack = ExitStack()
        try:
            self.opened = self._open(asked, max_nbytes)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Give everything back."""
        self._stack.close()

    def _open(self, asked: Open, max_nbytes: int) -> Opened:
        if asked.path not in PATHS:
            raise BadCase("path", ", ".join(PATHS), asked.path)
        if not 0 < asked.num_blocks <= max_nbytes:
            raise BadCase("blocks", f"1 to {max_nbytes}", asked.num_blocks)
        path = PATHS[asked.path]
        described = asked.engine.references(asked.num_blocks)
        if not set(asked.ranks) <= set(range(len(described))):
            raise BadCase("ranks", f"below {len(described)}", asked.ranks)
        needed = sum(extent(described[rank]) for rank in asked.ranks)
        if needed > max_nbytes:
            raise BadCase("bytes to lend", f"at most {max_nbytes:,}", f"{needed:,}")
        lent, facts = [], machine()
        rival = Mooncake() if asked.mooncake else None
        if rival is not None:
            self._stack.callback(rival.close)
        for rank in asked.ranks:
            arena = BenchMemory(extent(described[rank]), huge_pages=path.huge_pages)
            self._stack.enter_context(arena)
            arena.fill(seed=rank)
            transport = self._stack.enter_context(path.open(f"bench-lender-{rank}"))
            transport.register([arena.memory])
            address = transport.address()
            lent.append(Lent(rank, arena.memory.base, arena.memory.nbytes, address))
            facts |= transport.describe()
            if rival is not None:
                rival.register(arena.memory)
        return Opened(tuple(lent), facts, "" if rival is None else rival.address)


def lend(talk: Talk[ToLender], max_nbytes: int = MAX_BYTES) -> None:
    """Do what a reader asks for until it leaves."""
    lending: BenchLender | None = None
    try:
        while (message := talk.receive()) is not None:
            answer: FromLender = Used(time.process_time())
            if isinstance(message, Open | Shut) and lending is not None:
                lending.close()
                lending = None
            if isinstance(message, Open):
                try:
                    lending = BenchLender(message, max_nbytes)
                    answer = lending.opened
                except (BenchError, TransportError, ValueError) as error:
                    answer = CannotLend(f"{type(error).__name__}: {error}")
            talk.send(answer)
    finally:
        if lending is not None:
            lending.close()
        talk.close()


def listen(host: str, port: int, max_nbytes: int, say: Callable[[str], None]) -> None:
    """Serve one reader after the other until interrupted.

    Raises:
        OSError: the port cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as server:
        at = server.getsockname()
        say(f"listening on {at[0]}:{at[1]}; lends at most {max_nbytes:,} bytes")
        while True:
            sock, peer = server.accept()
            say(f"{peer[0]} has come")
            try:
                lend(Talk(sock, AT_LENDER), max_nbytes)
            except LenderFailed as error:
                say(f"{peer[0]}: {error}")
            say(f"{peer[0]} has left")


class Beside:
    """A lender in a process of its own, on this host, gone when this closes."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pdconn.bench.transfer.lender", str(fd)],
                pass_fds=[fd],
                env=env,
            )
        self.talk = Talk(ours, AT_READER)

    def close(self) -> None:
        """Hang up, which ends it."""
        self.talk.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Afar:
    """A lender that listens on another host.

    Raises:
        LenderFailed: nobody listens there.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            sock = socket.create_connection((host, port), timeout=10)
        except OSError as error:
            raise LenderFailed(f"{host}:{port}: {error}") from error
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.talk = Talk(sock, AT_READER)

    def close(self) -> None:
        """Hang up."""
        self.talk.close()


if __name__ == "__main__":
    lend(Talk(socket.socket(fileno=int(sys.argv[1])), AT_LENDER))
