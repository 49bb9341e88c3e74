"""``pdconn proxy`` as a process of its own, ended with the block that started it."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pdconn.tools.lab.lab_errors import EngineDied, EngineStartTimeout, PortInUse
from pdconn.tools.lab.ports import LOCALHOST, free_ports, is_free
from pdconn.tools.lab.process import Process

_START_TIMEOUT_S = 30.0


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
    command: str = "proxy",
) -> Iterator[str]:
    """Run ``pdconn proxy``, or ``command``, over these URLs and yield its own URL.

    Its log is ``proxy.log``.

    It listens on ``port``, and for ``admin_url`` on the next one, both on ``host``.  ``args`` are
    further arguments.  ``within`` is a prefix of the command line, such as ``ip netns exec NAME``;
    ``host`` is then an address there.

    Raises:
        PortInUse, EngineDied, EngineStartTimeout: the process is not left running.
    """
    port = port or free_ports(2, in_a_row=True)[0]
    for one in (port, port + 1):
        if not within and not is_free(one, host):
            raise PortInUse("proxy", host, one)
    line = [*within, sys.executable, "-m", "pdconn.tools.cli.main", command]
    line += ["--host", host, "--port", str(port)]
    line += ["--admin-host", host, "--admin-port", str(port + 1)]
    line += ["--prefill", *prefill, "--decode", *decode, *args]
    log = directory / "proxy.log"
    log.write_bytes(b"")
    with Process("proxy", line, log.resolve()) as process:
        _await_port(process, host, port)
        yield f"http://{host}:{port}"


def admin_url(url: str) -> str:
    """The URL of the admin pages and metrics of a proxy started by ``running_proxy``."""
    parts = urlsplit(url)
    return f"http://{parts.hostname}:{(parts.port or 0) + 1}"


def _await_port(process: Process, host: str, port: int) -> None:
    give_up = time.monotonic() + _START_TIMEOUT_S
    while not _listens(host, port):
        if (ended := process.ended()) is not None:
            raise EngineDied("proxy", ended.exit_code, process.log, process.tail())
        if time.monotonic() > give_up:
            raise EngineStartTimeout("proxy", _START_TIMEOUT_S, process.log, process.tail())
        time.sleep(0.05)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
