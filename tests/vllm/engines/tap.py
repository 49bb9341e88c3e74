"""A relay in a side channel that knows the messages, to time faults by.  Plain text only."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from pdconn.protocol.messages import Frames, decode_from_lender, decode_from_reader
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.ports import LOCALHOST

Ticket = Mapping[str, Any]


class Tap:
    """A relay before an engine's side channel that knows the messages.

    A ticket that ``over`` changed leads through it.  ``at`` says what to do when the
    next message of a kind arrives here, before it is passed on.
    """

    def __init__(self, engine: Engine) -> None:
        assert engine.spec.side_channel_port is not None
        self._behind = (LOCALHOST, engine.spec.side_channel_port)
        self._listener = socket.create_server((LOCALHOST, 0))
        self._port = self._listener.getsockname()[1]
        self._watched: dict[type, tuple[Callable[[], object], threading.Event]] = {}
        self._open = ExitStack()
        threading.Thread(target=self._accept, daemon=True).start()

    def over(self, ticket: Ticket) -> Ticket:
        """``ticket``, through here."""
        return {**ticket, "remote_host": LOCALHOST, "remote_port": self._port}

    def at(self, kind: type, act: Callable[[], object] = lambda: None) -> threading.Event:
        """Do ``act`` at the next message of ``kind``; set once that is done."""
        done = threading.Event()
        self._watched[kind] = act, done
        return done

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                decode, _ = self._listener.accept()
                try:
                    lender = socket.create_connection(self._behind)
                except OSError:
                    decode.close()
                    continue
                self._open.callback(decode.close)
                self._open.callback(lender.close)
                for source, sink, parse in (
                    (decode, lender, decode_from_reader),
                    (lender, decode, decode_from_lender),
                ):
                    relaying = (source, sink, parse)
                    threading.Thread(target=self._relay, args=relaying, daemon=True).start()

    def _relay(
        self, source: socket.socket, sink: socket.socket, parse: Callable[[bytes], list[Any]]
    ) -> None:
        frames = Frames(1 << 26)
        with suppress(OSError):
            while data := source.recv(1 << 16):
                for body in frames.feed_bytes(data):
                    for message in parse(body):
                        self._pass(type(message))
                sink.sendall(data)
        for end in (sink, source):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass(self, kind: type) -> None:
        watched = self._watched.pop(kind, None)
        if watched is not None:
            act, done = watched
            act()
            done.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._open.close()
