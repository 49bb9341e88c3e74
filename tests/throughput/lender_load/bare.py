"""Lenders that understand nothing, to tell what sockets cost from what a lender's work costs.

Each answers every frame with the same bytes: it reads no message, keeps no lease and
authenticates nobody.  One is Python, with as few calls as a server of sockets needs; the other is
C (``bare.c``, built with ``cc`` when it is asked for), which holds the interpreter's lock for none
of it.  Their turns are spaced as those of the real lender under load.
"""

from __future__ import annotations

import ctypes
import selectors
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pdconn.lender.server import PERIOD_S
from pdconn.lifecycle.lease import Freed, FreedLease
from pdconn.protocol.messages import Granted, encode, frame
from pdconn.tools.lab.ports import LOCALHOST

_REPLY = frame(encode([Granted(1, "r123456", "p123456", 30_000)]))
_CHUNK = 4096


class BareLender:
    """Has of a :class:`pdconn.lender.server.Lender` what the benchmark calls.

    Args:
        language: ``python`` or ``c``.

    Raises:
        FileNotFoundError, subprocess.CalledProcessError: there is no C compiler, or it failed.
    """

    def __init__(self, language: str) -> None:
        serve = _serve if language == "python" else _compiled()
        self._listener = socket.create_server((LOCALHOST, 0), backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._stop, self._stopped = socket.socketpair()
        self._lent = 0
        arguments = (self._listener, self._stopped)
        self._thread = threading.Thread(target=serve, args=arguments, name="pdconn-lender")
        self._thread.start()

    def lend(self, request: str, ticket: bytes, ttl_s: float) -> None:
        """Count it."""
        self._lent += 1

    def take_freed(self) -> list[FreedLease]:
        """All that was lent, as if it had been read."""
        lent, self._lent = self._lent, 0
        return [FreedLease("", Freed.READ)] * lent

    def close(self) -> None:
        """Stop serving."""
        self._stop.send(b"x")
        self._thread.join()
        for sock in (self._listener, self._stop, self._stopped):
            sock.close()


def _serve(listener: socket.socket, stop: socket.socket) -> None:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(stop, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is stop:
                selector.close()
                return
            if sock is listener:
                accepted, _ = listener.accept()
                accepted.setblocking(False)
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(accepted, selectors.EVENT_READ)
            elif data := sock.recv(_CHUNK):
                sock.send(_REPLY * _num_frames(data))
            else:
                selector.unregister(sock)
                sock.close()
        time.sleep(PERIOD_S)


def _num_frames(data: bytes) -> int:
    """Of bytes that end with a frame, as those of a benchmark do."""
    at = count = 0
    while at < len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "big")
        count += 1
    return count


def _compiled() -> Callable[[socket.socket, socket.socket], None]:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "bare.so"
        source = Path(__file__).with_name("bare.c")
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True
        )
        function = ctypes.CDLL(str(library)).serve  # stays mapped when the file is gone
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_long,
    ]

    def serve(listener: socket.socket, stop: socket.socket) -> None:
        pause_ns = int(PERIOD_S * 1e9)
        if function(listener.fileno(), stop.fileno(), _REPLY, len(_REPLY), pause_ns):
            raise RuntimeError("the bare lender failed")

    return serve
