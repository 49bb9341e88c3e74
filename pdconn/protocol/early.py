"""Early tickets: decode is asked before prefill has computed the prompt.

A router mints a *stream*, a name that nobody can guess, and sends both legs of a request at once.
Whoever knows the stream may read what the request with that stream lends::

    router ── "pdconn": {"stream": s} ──────────► prefill
           ── an early ticket, with s ──► decode ── Follow(s) ──► prefill
                                                 ◄── Opened, Grown ..., Completed ──

An early ticket names the boot that lends, as a ticket does.  A router knows it from earlier tickets
of the same engine; a plain proxy sends none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from pdconn.protocol.errors import TicketError
from pdconn.protocol.limits import DIGEST_NBYTES, MAX_TEXT
from pdconn.protocol.ticket import (
    PORTS,
    TICKET_VERSION,
    check_ticket_version,
    number_in,
    ours_in,
    text_in,
)

STREAM_CHARS = (16, 64)
"""Fewest and most characters of a stream; 32 hexadecimal ones are 128 random bits."""


@dataclass(frozen=True, slots=True)
class EarlyTicket:
    """A stream to follow, and the boot that lends it.

    Raises:
        TicketError: a name that is too long or not printable, or a port out of bounds.
    """

    engine_id: str
    incarnation: str
    host: str
    port: int
    stream: str

    def __post_init__(self) -> None:
        for field, text in (
            ("remote_engine_id", self.engine_id),
            ("pdconn.incarnation", self.incarnation),
            ("remote_host", self.host),
        ):
            if not 0 < len(text) <= MAX_TEXT or not text.isprintable():
                raise TicketError(field, f"1 to {MAX_TEXT} printable characters", text)
        check_stream(self.stream)

    @classmethod
    def like(cls, params: object, stream: str) -> EarlyTicket:
        """For ``stream``, at the boot that has issued the ticket ``params``, early or not.

        Raises:
            TicketError: naming the field, the expected and the seen value.
        """
        if not isinstance(params, dict):
            raise TicketError("kv_transfer_params", "an object", params)
        ours = ours_in(params)
        check_ticket_version(ours)
        return cls(
            text_in(params, "remote_engine_id"),
            text_in(ours, "pdconn.incarnation"),
            text_in(params, "remote_host"),
            number_in(params, "remote_port", *PORTS),
            stream,
        )

    def to_params(self) -> dict[str, Any]:
        """The ``kv_transfer_params`` for the decode engine's request."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "pdconn": {
                "version": TICKET_VERSION,
                "incarnation": self.incarnation,
                "stream": self.stream,
            },
        }

    def digest(self) -> bytes:
        """16 bytes in place of a ticket's digest, while there is no ticket (BLAKE2b)."""
        text = f"stream:{self.incarnation}:{self.stream}"
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_NBYTES).digest()


def check_stream(stream: object) -> str:
    """Check the name of a stream.

    Raises:
        TicketError: it is no text of ``STREAM_CHARS`` printable characters.
    """
    fewest, most = STREAM_CHARS
    if type(stream) is not str or not fewest <= len(stream) <= most or not stream.isprintable():
        raise TicketError("pdconn.stream", f"{fewest} to {most} printable characters", stream)
    return stream


def stream_of(params: object) -> str | None:
    """The stream in a request's parameters; None without one.

    Raises:
        TicketError: it is no name of a stream.
    """
    ours = ours_in(params)
    return check_stream(ours["stream"]) if "stream" in ours else None


def parse_early_ticket(params: object) -> EarlyTicket | None:
    """Read ``kv_transfer_params``; None if they name no stream.

    Raises:
        TicketError: naming the field, the expected and the seen value.
    """
    stream = stream_of(params)
    return None if stream is None else EarlyTicket.like(params, stream)
