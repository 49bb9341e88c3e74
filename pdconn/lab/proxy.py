"""The proxy as its users start it: a process of its own, gone for certain at the end."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdconn.lab.errors import EngineDied, EngineStartTimeout, PortInUse
from pdconn.lab.ports import LOCALHOST, free_ports, is_free
from pdconn.lab.process import Process


@contextmanager
def running_proxy(
    prefill: Sequence[str],
    decode: Sequence[str],
    directory: Path,
    port: int | None = None,
    args: Sequence[str] = (),
    *,
    host: str = LOCALHOST,
    within: Sequence[str] = (),
) -> Iterator[str]:
    """``pdconn proxy`` over these URLs; hands over its own.  Its log is ``proxy.log``.

    ``args`` are further words of its command line, ``within`` words in front of it that
    run it elsewhere on this machine, where ``host`` is an address.

    Raises:
        PortInUse, EngineDied, EngineStartTimeout: it is not left running then.
    """
    port = port or free_ports(1)[0]
    if not within and not is_free(port, host):
        raise PortInUse("proxy", host, port)
    command = [*within, sys.executable, "-m", "pdconn.cli.main", "proxy"]
    command += ["--host", host, "--port", str(port)]
    command += ["--prefill", *prefill, "--decode", *decode, *args]
    log = directory / "proxy.log"
    log.write_bytes(b"")
    process = Process("proxy", command, log.resolve())
    try:
        _await_port(process, host, port)
        yield f"http://{host}:{port}"
    finally:
        process.end()


def _await_port(process: Process, host: str, port: int, timeout_s: float = 30.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not _listens(host, port):
        if (ended := process.ended()) is not None:
            raise EngineDied("proxy", ended.exit_code, process.log, process.tail())
        if time.monotonic() > give_up:
            raise EngineStartTimeout("proxy", timeout_s, process.log, process.tail())
        time.sleep(0.05)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
