"""Limits over all requests: places in flight, and bytes of request bodies.

A request without a place waits with its body unread, so that it holds no memory beyond its head.
A body is held from its first byte until an engine's answer begins.  When a client leaves, the
hand-over of its request and the return of its ticket still use the body, so the bytes stay
counted until the last of them ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from aiohttp import web
from multidict import CIMultiDictProxy

from pdconn.router.admission.connections import ClientAdmission
from pdconn.router.router_errors import BadBody, BodyTooLarge, Busy, UnsupportedEncoding

MAX_REQUESTS = 4096
"""Requests in flight; each has a connection to a client and one to an engine."""
WAIT_S = 10.0
"""Seconds in the queue; clients that wait longer have often left or retried."""


class AdmissionQueue:
    """The places for requests in flight, and the queue for them.

    Args:
        max_requests: number of places.
        max_queue: number of requests that may wait for a place.
        max_wait_s: longest wait.
        waited: called with the seconds of each wait, whether it got a place or not.

    Attributes:
        num_requests: places in use.
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
        """Number of waiting requests."""
        return len(self._waiting)

    async def take_place(self) -> None:
        """Take a place; ``give_place_back`` returns it.

        Raises:
            Busy: no place is free, and the queue is full or no place became free in time.
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
                self.give_place_back()  # it got its place at the same moment
            elif place in self._waiting:
                self._waiting.remove(place)
            if isinstance(error, TimeoutError):
                raise Busy(f"no place became free within {self._max_wait_s:g} s") from error
            raise
        finally:
            self._waited(time.perf_counter() - began_s)

    def give_place_back(self) -> None:
        """Return a place; the request that has waited longest gets it."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.num_requests -= 1


MAX_NBYTES = 256 << 20
"""Bytes of all bodies.  While an engine is asked, a body takes about three times its length."""


class BodyBudget:
    """The byte budget of all clients' request bodies.

    Attributes:
        nbytes: bytes held now.
    """

    def __init__(self, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self.nbytes = 0

    def take_bytes(self, nbytes: int) -> None:
        """Reserve bytes.

        Raises:
            Busy: the budget is exhausted; nothing is reserved.
        """
        if self.nbytes + nbytes > self._max_nbytes:
            raise Busy(
                f"request bodies of {self.nbytes} bytes are held, at most {self._max_nbytes}"
            )
        self.nbytes += nbytes


class HeldBody:
    """The bytes of one request's body, with a count of its users; a context manager counts as one.

    Attributes:
        when_free: called when the last user ends, to drop the body itself.
    """

    def __init__(self, budget: BodyBudget | None = None) -> None:
        self.when_free: Callable[[], None] = _nothing
        self._budget = budget or BodyBudget()
        self._nbytes = 0
        self._num_users = 0

    def grow(self, nbytes: int) -> None:
        """Count more received bytes.

        Raises:
            Busy: the budget is exhausted.
        """
        self._budget.take_bytes(nbytes)
        self._nbytes += nbytes

    def add_user(self) -> None:
        """The body is used until ``release``."""
        self._num_users += 1

    def drop_user(self) -> None:
        """One user is done; the last one gives the bytes back."""
        self._num_users -= 1
        if not self._num_users:
            self._budget.nbytes -= self._nbytes
            self._nbytes = 0
            act, self.when_free = self.when_free, _nothing  # breaks the reference cycle of the two
            act()

    def __enter__(self) -> Self:
        self.add_user()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.drop_user()


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads bodies of at most ``max_nbytes``, of requests that have a place in ``queue``."""

    admission: ClientAdmission
    budget: BodyBudget
    queue: AdmissionQueue
    max_nbytes: int

    async def read_body(self, http: web.Request, held: HeldBody) -> bytes:
        """Read the whole body, counting it in ``held``.

        Raises:
            UnsupportedEncoding: the body is compressed.
            BodyTooLarge: the body, or its announced length, exceeds ``max_nbytes``.
            BodyTooSlow: the body arrives too slowly.
            BadBody: the body ends before its announced length.
            Busy: the budget of all bodies is exhausted.
        """
        check_body_head(http.headers, self.max_nbytes)
        try:
            if http.content.is_eof():  # the body arrived with the head, as short ones do
                return self._keep(http.content.read_nowait(), 0, held)
            async with self.admission.connection_of(http).reading_body() as received:
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
        count_piece(piece, nbytes_before, held, self.max_nbytes)
        return piece


def check_body_head(headers: CIMultiDictProxy[str], max_nbytes: int) -> None:
    """Check what a request's head says of its body.

    Raises:
        UnsupportedEncoding: it is compressed.
        BodyTooLarge: its announced length exceeds ``max_nbytes``.
    """
    codings = ",".join(headers.getall("Content-Encoding", ()))
    if codings.strip().lower() not in ("", "identity"):
        raise UnsupportedEncoding("Content-Encoding", "identity (no encoding)", codings)
    length = headers.get("Content-Length", "")
    if length.isascii() and length.isdigit() and int(length) > max_nbytes:
        raise too_large(max_nbytes)


def count_piece(piece: bytes, nbytes_before: int, held: HeldBody, max_nbytes: int) -> None:
    """Count the next bytes of a body.

    Raises:
        BodyTooLarge: the body exceeds ``max_nbytes``.
        Busy: the budget of all bodies is exhausted.
    """
    if nbytes_before + len(piece) > max_nbytes:
        raise too_large(max_nbytes)
    held.grow(len(piece))


def too_large(max_nbytes: int) -> BodyTooLarge:
    """The refusal of a body that exceeds ``max_nbytes``."""
    return BodyTooLarge("body", f"at most {max_nbytes} bytes", "more")
