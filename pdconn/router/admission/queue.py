"""Places of requests in flight, and a bounded queue for those that find none.

First come, first served; a request waits with its body unread, so that it holds no memory beyond
its head.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from pdconn.router.errors import Busy

MAX_REQUESTS = 4096
"""In flight at once; each has a client's connection and an engine's."""
WAIT_S = 10.0
"""Clients that wait for longer have often left, or sent the request again."""


class AdmissionQueue:
    """Who may be in flight.

    Args:
        max_requests: places.
        max_queue: requests that may wait for one.
        max_wait_s: how long each may.
        waited: is told the seconds of each that has waited, served or not.

    Attributes:
        num_requests: places that are taken.
    """

    def __init__(
        self,
        max_requests: int = MAX_REQUESTS,
        max_queue: int = 0,
        max_wait_s: float = WAIT_S,
        waited: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._max_requests = max_requests
        self._max_queue = max_queue
        self._max_wait_s = max_wait_s
        self._waited = waited
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.num_requests = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def enter(self) -> None:
        """Take a place, which ``leave`` gives back.

        Raises:
            Busy: all are taken, and there is no room to wait or no place became free in time.
        """
        if self.num_requests < self._max_requests and not self._waiting:
            self.num_requests += 1
            return
        if len(self._waiting) >= self._max_queue:
            waiting = f", and {self._max_queue} more wait" if self._max_queue else ""
            raise Busy(f"{self._max_requests} requests are in flight{waiting}")
        await self._wait()

    async def _wait(self) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self.leave()  # it got its place in the same moment
            elif place in self._waiting:
                self._waiting.remove(place)
            if isinstance(error, TimeoutError):
                raise Busy(f"no place became free within {self._max_wait_s:g} s") from error
            raise
        finally:
            self._waited(time.perf_counter() - began_s)

    def leave(self) -> None:
        """Give a place back: to the one that has waited for the longest time."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.num_requests -= 1
