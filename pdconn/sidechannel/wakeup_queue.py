"""A queue between an engine's thread and one of ours.

Posting never blocks: it appends and writes one byte to a socket pair that the owner
selects on.  What can wait until the owner wakes anyway is left without the byte; the
owner looks once more before it goes to sleep::

    poster   leave an item   ──►  is the owner's sleep too long?  ──►  wake
    owner    say how long it will sleep  ──►  is there an item?  ──►  select

Whichever comes second sees the other.

One byte is enough until the owner has looked.  Writing it lets go of Python's lock, and an
owner that was woken a moment ago is waiting for just that: the poster would stand still
until the owner is done with everything posted before.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class WakeupQueue(Generic[T]):
    """Many posters, one owner that waits for ``self.socket`` to be readable."""

    def __init__(self) -> None:
        self.socket, self._poke = socket.socketpair()
        self.socket.setblocking(False)
        self._poke.setblocking(False)
        self._items: deque[T] = deque()
        self._poked = False

    def post(self, item: T) -> None:
        """Add ``item`` and wake the owner."""
        self._items.append(item)
        self.wake()

    def leave(self, item: T) -> None:
        """Add ``item`` without waking the owner."""
        self._items.append(item)

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._items)

    def wake(self) -> None:
        """Make ``select`` return.  A full or closed pipe means it will, or need not.

        Where the system has no room for a byte, the next post tries again.
        """
        if self._poked:
            return
        try:
            self._poked = True
            self._poke.send(b"\0")
        except BlockingIOError:
            pass
        except OSError:
            self._poked = False
        except BaseException:  # a signal's handler: who posts next pokes
            self._poked = False
            raise

    def hush(self) -> None:
        """Take in what woke the owner: call it when the socket is readable, before ``take``."""
        with contextlib.suppress(BlockingIOError):
            while len(self.socket.recv(4096)) == 4096:
                pass
        # Before the items are taken: who posts from here on pokes again, and who did not
        # poke because of an earlier byte has posted already.
        self._poked = False

    def take(self) -> list[T]:
        """Everything posted so far, in order.  Only the owner calls this."""
        items: list[T] = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        """Close both ends; later posts are kept and ignored."""
        self.socket.close()
        self._poke.close()
