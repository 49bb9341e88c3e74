"""The lending side: allocates the requested memory and registers it for reads.

On the same host it is a child process at the end of a socket pair; for other hosts it listens
(``pdconn bench transfer --serve``).  It serves one reader at a time.  Any client that reaches the
port can make it allocate up to its limit and read the pattern, so run it on a trusted network only.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack

from pdconn.tools.bench.bench_errors import BadOption, BenchError, LenderFailed
from pdconn.tools.bench.interrupts import interruptible
from pdconn.tools.bench.manifest import machine
from pdconn.tools.bench.transfer.arena import BenchMemory
from pdconn.tools.bench.transfer.control import (
    AT_LENDER,
    AT_READER,
    CanLend,
    CannotLend,
    ControlConnection,
    FromLender,
    Lent,
    Open,
    Shut,
    ToLender,
    Used,
)
from pdconn.tools.bench.transfer.mooncake import Mooncake
from pdconn.tools.bench.transfer.paths import PATHS
from pdconn.tools.bench.transfer.workload import allocated, extent
from pdconn.tools.lab.process_keeper import die_with_parent
from pdconn.tools.output.progress_line import LogStep
from transport import TransportError
from transport.closing import Closing

MAX_BYTES = 16 << 30
_EXIT_S = 10.0


class BenchLender(Closing):
    """Memory of some ranks, each with a transport, until :meth:`close`."""

    def __init__(self, asked: Open, max_nbytes: int) -> None:
        self._stack = ExitStack()
        try:
            self.opened = self._open(asked, max_nbytes)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Release everything."""
        self._stack.close()

    def _open(self, asked: Open, max_nbytes: int) -> CanLend:
        if asked.path not in PATHS:
            raise BadOption("path", ", ".join(PATHS), asked.path)
        if not 0 < asked.num_blocks <= max_nbytes:
            raise BadOption("blocks", f"1 to {max_nbytes}", asked.num_blocks)
        path = PATHS[asked.path]
        described = asked.engine.references(asked.num_blocks)
        if not set(asked.ranks) <= set(range(len(described))):
            raise BadOption("ranks", f"below {len(described)}", asked.ranks)
        needed = sum(extent(described[rank]) for rank in asked.ranks)
        if needed > max_nbytes:
            raise BadOption("bytes to lend", f"at most {max_nbytes:,}", f"{needed:,}")
        lent, facts = [], machine()
        rival = Mooncake() if asked.mooncake else None
        if rival is not None:
            self._stack.callback(rival.close)
        for rank in asked.ranks:
            arena = BenchMemory(extent(described[rank]), huge_pages=path.huge_pages)
            self._stack.enter_context(arena)
            references = allocated(asked.engine, rank, asked.num_blocks, arena)
            arena.fill(seed=rank)
            transport = self._stack.enter_context(path.open_transport(f"bench-lender-{rank}"))
            transport.register([arena.memory])
            base, nbytes = arena.memory.base, arena.memory.nbytes
            lent.append(Lent(rank, base, nbytes, references, transport.address()))
            facts |= transport.describe()
            if rival is not None:
                rival.register_memory(arena.memory)
        return CanLend(tuple(lent), facts, "" if rival is None else rival.address)


def lend(control: ControlConnection[ToLender], max_nbytes: int = MAX_BYTES) -> None:
    """Serve one reader until it disconnects."""
    lending: BenchLender | None = None
    try:
        while (message := control.receive_message()) is not None:
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
            try:
                control.send_message(answer)
            except LenderFailed:  # disconnected: an interrupted reader does not wait
                return
    finally:
        if lending is not None:
            lending.close()
        control.close()


def listen(host: str, port: int, max_nbytes: int, log_step: LogStep) -> None:
    """Serve readers one after another until interrupted.

    Raises:
        OSError: the port cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as server:
        at = server.getsockname()
        log_step(f"listening on {at[0]}:{at[1]}; lends at most {max_nbytes:,} bytes")
        while True:
            with interruptible():
                sock, peer = server.accept()
            log_step(f"{peer[0]} connected")
            try:
                lend(ControlConnection(sock, AT_LENDER), max_nbytes)
            except LenderFailed as error:
                log_step(f"{peer[0]}: {error}")
            log_step(f"{peer[0]} disconnected")


class LocalLender(Closing):
    """A lender in a child process on this host, which ends with this object.

    The child has its own session, so that Ctrl-C reaches this process only.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pdconn.tools.bench.transfer.bench_lender", str(fd)],
                pass_fds=[fd],
                env=env,
                start_new_session=True,
            )
        self.control = ControlConnection(ours, AT_READER)

    def close(self) -> None:
        """Close the connection, which ends the process."""
        self.control.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ListeningLender(Closing):
    """A lender that listens on another host.

    Raises:
        LenderFailed: no lender listens at the address.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            with interruptible():
                sock = socket.create_connection((host, port), timeout=10)
        except OSError as error:
            raise LenderFailed(f"{host}:{port}: {error}") from error
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.control = ControlConnection(sock, AT_READER)

    def close(self) -> None:
        """Close the connection."""
        self.control.close()


if __name__ == "__main__":
    die_with_parent()  # while it fills memory, or is stopped, it does not see the connection end
    lend(ControlConnection(socket.socket(fileno=int(sys.argv[1])), AT_LENDER))
