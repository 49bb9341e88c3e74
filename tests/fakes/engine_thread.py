"""Watches a thread that may touch no file and no socket, as the engine's may not."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EVENTS = (
    "open", "os.", "fcntl.", "shutil.", "glob.", "socket.", "subprocess.", "tempfile.",
    "mmap.", "urllib.", "ctypes.dlopen",
)  # fmt: skip
_UNAUDITED = ("stat", "lstat", "fstat", "access", "read", "write", "statvfs", "fsync")
"""Calls of ``os`` for which Python raises no audit event."""

_watched = threading.local()


class FileTouched(AssertionError):
    """The watched thread touched a file or a socket."""


def _seen(event: str, args: Any) -> None:
    if getattr(_watched, "is_on", False) and event.startswith(_EVENTS):
        _watched.is_on = False  # what reports it may read files
        raise FileTouched(f"{event}{args!r}")


@functools.cache
def _install() -> None:
    sys.addaudithook(_seen)  # for ever


@contextmanager
def touches_nothing() -> Iterator[None]:
    """This thread may not touch a file or a socket meanwhile; other threads may.

    Raises:
        FileTouched: at the call that does.
    """
    _install()
    kept = {name: getattr(os, name) for name in _UNAUDITED}

    def watched(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            _seen(f"os.{name}", args)
            return kept[name](*args, **kwargs)

        return call

    for name in kept:
        setattr(os, name, watched(name))
    _watched.is_on = True
    try:
        yield
    finally:
        _watched.is_on = False
        for name, call in kept.items():
            setattr(os, name, call)
