"""What requests may hold at once: bytes of their bodies.  Pure.

A body is held from its first byte until an engine's answer begins.  A client that leaves does
not end that: the hand-over of its request and the return of its ticket hold the body too, so
the bytes are counted until the last of them is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from pdconn.router.errors import Busy

MAX_NBYTES = 256 << 20
"""Of all bodies together.  While an engine is asked a body takes about three times its length."""


class BodyBudget:
    """Bytes of the bodies of all clients.

    Attributes:
        nbytes: held now.
    """

    def __init__(self, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self.nbytes = 0

    def take(self, nbytes: int) -> None:
        """Count bytes as held.

        Raises:
            Busy: there is no room for them; they are not counted.
        """
        if self.nbytes + nbytes > self._max_nbytes:
            raise Busy(
                f"request bodies of {self.nbytes} bytes are held, at most {self._max_nbytes}"
            )
        self.nbytes += nbytes


class HeldBody:
    """The bytes of one request's body; as a context manager, one of those that use it.

    Attributes:
        when_free: is called when the last user is done, to drop the body itself.
    """

    def __init__(self, budget: BodyBudget | None = None) -> None:
        self.when_free: Callable[[], None] = _nothing
        self._budget = budget or BodyBudget()
        self._nbytes = 0
        self._num_users = 0

    def grow(self, nbytes: int) -> None:
        """More of the body has arrived.

        Raises:
            Busy: there is no room for it.
        """
        self._budget.take(nbytes)
        self._nbytes += nbytes

    def use(self) -> None:
        """The body is used until ``release``."""
        self._num_users += 1

    def release(self) -> None:
        """One user is done; the last one gives the bytes back."""
        self._num_users -= 1
        if not self._num_users:
            self._budget.nbytes -= self._nbytes
            self._nbytes = 0
            act, self.when_free = self.when_free, _nothing  # else the two keep each other alive
            act()

    def __enter__(self) -> Self:
        self.use()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def _nothing() -> None:
    pass
