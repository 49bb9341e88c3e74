"""A client's request body as bytes, within the bounds of size, time and the common budget.

A body is read as it was sent: a compressed one could be a thousand times larger than what was
received, so it is refused unread.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from pdconn.router.admission.budget import BodyBudget, HeldBody
from pdconn.router.admission.connections import ClientAdmission
from pdconn.router.admission.queue import AdmissionQueue
from pdconn.router.errors import BadBody, BodyTooLarge, UnsupportedEncoding


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads bodies of at most ``max_nbytes``, of requests that have a place in ``queue``."""

    admission: ClientAdmission
    budget: BodyBudget
    queue: AdmissionQueue
    max_nbytes: int

    async def read(self, http: web.Request, held: HeldBody) -> bytes:
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
