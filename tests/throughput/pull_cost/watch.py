"""Counting the calls that let go of the interpreter's lock, and their processor time."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

NIXL = {
    "createXferReq": "NIXL's create",
    "postXferReq": "NIXL's post",
    "getXferStatus": "NIXL's status",
}
"""Functions of NIXL's bindings that let go of the lock (ai-dynamo/nixl PR 1232), as called here."""

SYSTEM = ("send", "recv", "epoll_wait")
UNLOCKED = (*NIXL.values(), *SYSTEM)


@dataclass
class Watch:
    """Calls of a function, on other threads than ``but``: how many, and their processor time."""

    calls: int = 0
    cpu_s: float = 0.0
    but: int | None = None

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, watched."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self.but:
                return function(*args, **kwargs)
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.cpu_s += time.thread_time() - began
                self.calls += 1

        return watched


class WatchedSelector(selectors.DefaultSelector):
    """Whose waiting is watched."""

    watch = Watch()

    def __init__(self) -> None:
        super().__init__()
        self._selector: Any = _WatchedPoll(self._selector, self.watch)  # type: ignore[has-type]


class _WatchedPoll:
    """An ``epoll`` object with its ``poll`` watched."""

    def __init__(self, real: Any, watch: Watch) -> None:
        self.poll = watch.around(real.poll)
        for name in ("register", "unregister", "modify", "close", "fileno"):
            setattr(self, name, getattr(real, name))


class _WatchedAgent:
    """NIXL's own agent object, some of its functions watched."""

    def __init__(self, real: Any, watches: dict[str, Watch]) -> None:
        self._real = real
        for name, label in NIXL.items():
            setattr(self, name, watches[label].around(getattr(real, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextlib.contextmanager
def watching(transport: Any) -> Iterator[dict[str, Watch]]:
    """Watch the calls that let go of the lock, on all threads but this one."""
    watches = {name: Watch(but=threading.get_ident()) for name in UNLOCKED}
    raw = transport._agent._raw
    raw.agent = _WatchedAgent(raw.agent, watches)
    WatchedSelector.watch = watches["epoll_wait"]
    before = selectors.DefaultSelector
    selectors.DefaultSelector = WatchedSelector  # type: ignore[misc]
    for name in ("send", "recv"):
        setattr(socket.socket, name, watches[name].around(getattr(socket.socket, name)))
    try:
        yield watches
    finally:
        selectors.DefaultSelector = before  # type: ignore[misc]
        for name in ("send", "recv"):
            delattr(socket.socket, name)
