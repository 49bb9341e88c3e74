"""Where each prefill engine lends from, learned from its tickets.  Pure.

An early ticket names the boot that will lend, before that has answered.  The newest ticket of the
same engine, and of the same data-parallel rank where one is named, says which boot that is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import Raw

from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.errors import TicketError
from pdconn.router.openai.requests import UNREADABLE

_UNNAMED = "0" * 32
"""In place of a stream, which each request gets for itself."""
MOST_PAST = 64
"""Boots of one engine that are remembered; more ranks behind one address are unusual."""


class _TicketPlace(msgspec.Struct):
    """The fields of a ticket that say where it is from; others are skipped."""

    remote_engine_id: Any = None
    remote_host: Any = None
    remote_port: Any = None
    pdconn: Any = None


def lender_of(ticket: Raw) -> EarlyTicket | None:
    """The boot that has issued a ticket, without a stream; None for another connector's.

    >>> lender_of(Raw(b'{"remote_engine_id": "p", "remote_host": "h", "remote_port": 7}'))
    """
    try:
        found = msgspec.json.decode(ticket, type=_TicketPlace)
        return EarlyTicket.like(msgspec.to_builtins(found), _UNNAMED)
    except (*UNREADABLE, TicketError):
        return None


def is_one_boot(early: EarlyTicket, lender: EarlyTicket) -> bool:
    """Whether two early tickets name the same boot."""
    return replace(early, stream=lender.stream) == lender


@dataclass(slots=True)
class _KnownLender:
    """What tickets of one engine, or rank, have named.

    Attributes:
        newest: the boot of the newest ticket.
        past: boots of earlier tickets.
        are_several: boots take turns: there are ranks, and the engine chooses among them.
    """

    newest: EarlyTicket
    past: deque[EarlyTicket] = field(default_factory=lambda: deque(maxlen=MOST_PAST))
    are_several: bool = False

    def note_ticket(self, lender: EarlyTicket) -> None:
        if lender != self.newest:
            # A boot that has ended does not come back.
            self.are_several = self.are_several or lender in self.past
            self.past.append(self.newest)
            self.newest = lender


class KnownLenders:
    """Boots that lend, by engine and data-parallel rank."""

    def __init__(self) -> None:
        self._known: dict[str, dict[int | None, _KnownLender]] = {}

    def learn_lender(self, engine: str, rank: int | None, lender: EarlyTicket) -> None:
        """A ticket of ``engine`` was issued by ``lender``; ``rank``: what it was asked for."""
        ranks = self._known.setdefault(engine, {})
        if (known := ranks.get(rank)) is None:
            ranks[rank] = _KnownLender(lender)
        else:
            known.note_ticket(lender)

    def early_ticket(self, engine: str, rank: int | None, stream: str) -> EarlyTicket | None:
        """A ticket for ``stream`` at an engine; None if it is not known which boot would lend."""
        known = self._known.get(engine, {}).get(rank)
        return None if known is None or known.are_several else replace(known.newest, stream=stream)

    def forget_engine(self, engine: str) -> None:
        """Forget an engine that went down: it may come back as another boot."""
        self._known.pop(engine, None)

    def keep_engines(self, engines: Collection[str]) -> None:
        """Forget all other engines."""
        self._known = {name: ranks for name, ranks in self._known.items() if name in engines}
