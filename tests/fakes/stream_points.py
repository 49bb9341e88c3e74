"""A point in the work of a GPU that a test drives, instead of a CUDA event."""

from __future__ import annotations

import threading


class Point:
    """Not reached until a test says so.

    Attributes:
        num_asked: how often somebody looked whether it is reached.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self.num_asked = 0

    def reach(self) -> None:
        """The GPU has come to it."""
        self._done.set()

    def query(self) -> bool:
        """See :class:`transport.streams.StreamPoint`."""
        self.num_asked += 1
        return self._done.is_set()

    def synchronize(self) -> None:
        """See :class:`transport.streams.StreamPoint`."""
        self._done.wait()
