"""What requests may hold at once: places in flight, and bytes of their bodies.

A request that finds no place waits with its body unread, so that it holds no memory beyond its
head.  A body is held from its first byte until an engine's answer begins.  A client that leaves
does not end that: the hand-over of its request and the return of its ticket hold the body too, so
the bytes are counted until the last of them is done.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self

from aiohttp import web

from pdconn.router.admission.connections import ClientAdmission
from pdconn.router.errors import BadBody, BodyTooLarge, Busy, UnsupportedEncoding
from pdconn.router.openai.requests import XARGS

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
        waited: is called with the seconds of each that has waited, served or not.

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

    async def take_place(self) -> None:
        """Take a place, which ``give_place_back`` returns.

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
                self.give_place_back()  # it got its place in the same moment
            elif place in self._waiting:
                self._waiting.remove(place)
            if isinstance(error, TimeoutError):
                raise Busy(f"no place became free within {self._max_wait_s:g} s") from error
            raise
        finally:
            self._waited(time.perf_counter() - began_s)

    def give_place_back(self) -> None:
        """Give a place back: to the one that has waited for the longest time."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.num_requests -= 1


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

    def take_bytes(self, nbytes: int) -> None:
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
        self._budget.take_bytes(nbytes)
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


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads bodies of at most ``max_nbytes``, of requests that have a place in ``queue``.

    ``xargs`` are the names that they may use in ``vllm_xargs``.
    """

    admission: ClientAdmission
    budget: BodyBudget
    queue: AdmissionQueue
    max_nbytes: int
    xargs: Collection[str] = XARGS

    async def read_body(self, http: web.Request, held: HeldBody) -> bytes:
        """The whole body, counted in ``held``.

        Raises:
            UnsupportedEncoding: it is compressed.
            BodyTooLarge: it is, or is announced to be, longer than ``max_nbytes``.
            BodyTooSlow: too little of it arrives.
            BadBody: it ends before its announced end.
            Busy: all bodies together are too large.
        """
        codings = ",".join(http.headers.getall("Content-Encoding", ()))
        if codings.strip().lower() not in ("", "identity"):
            raise UnsupportedEncoding("Content-Encoding", "identity (no encoding)", codings)
        if (http.content_length or 0) > self.max_nbytes:
            raise self._too_large()
        try:
            if http.content.is_eof():  # it came with its head, as short ones do
                return self._keep(http.content.read_nowait(), 0, held)
            async with self.admission.of(http).reading_body() as received:
                pieces: list[bytes] = []
                nbytes = 0
                while piece := await http.content.readany():
                    pieces.append(self._keep(piece, nbytes, held))
                    nbytes += len(piece)
                    received(len(piece))
        except (web.RequestPayloadError, ConnectionError) as error:
            raise BadBody("body", "as many bytes as announced", "fewer") from error
        return b"".join(pieces)

    def _keep(self, piece: bytes, nbytes_before: int, held: HeldBody) -> bytes:
        if nbytes_before + len(piece) > self.max_nbytes:
            raise self._too_large()
        held.grow(len(piece))
        return piece

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge("body", f"at most {self.max_nbytes} bytes", "more")
