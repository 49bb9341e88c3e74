"""Our keys in ``kv_transfer_params`` for sessions: to keep a session's KV, release or prefetch it.

They are in ``pdconn``, beside the keys of :mod:`pdconn.protocol.prefix`.  A router asks with the
first two, and the answer has the third::

    "keep": {"session": "agent-7", "seconds": 300, "tenant": "a"}    0 seconds release it
    "prefetch": true                     nobody waits for this request: others' transfers go first
    "kept": {"session": "agent-7", "tokens": 3200, "used": true}

``used`` is true if this turn has come back to what was kept for it.  ``broken`` is there if an
earlier promise of the session was broken, and tells why; ``refused`` if nothing is kept;
``seconds`` if it is kept for a shorter time than was asked, with that time.

The sessions of others that a request has displaced do not see its answer.  An answer that only a
router reads (a ticket for the whole prompt, or a prefetch) therefore has a list beside ``kept``::

    "broken": [{"session": "agent-9", "tenant": "a", "why": "room"}]     or "store-room", of rows

Each break is in one list, of at most ``MOST_REPORTED``; the next answer has the others.  A router
tells the session with its next answer, whichever engine gives it.

With a store ``rows`` is true if the turn's rows are kept, as far as they are there, and
``rows_broken`` tells why an earlier promise to keep rows was broken; rows of a turn that turn out
to be more than may be kept are told so, since the answer has promised them.  ``rows_seconds`` is as
``seconds``, of rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pdconn.protocol.errors import TicketError
from pdconn.protocol.ticket import ours_in

MAX_SESSION = 128
"""Characters of a session's name, and of a tenant's."""
MAX_KEEP_S = 86_400.0
MOST_REPORTED = 16
"""Broken promises that one answer reports."""


@dataclass(frozen=True, slots=True, order=True)
class SessionKey:
    """A session of a tenant; the names of sessions of two tenants are different ones.

    Raises:
        TicketError: a name that is too long, or not printable.
    """

    tenant: str
    session: str

    def __post_init__(self) -> None:
        for field, text, least in (("tenant", self.tenant, 0), ("session", self.session, 1)):
            is_text = type(text) is str and least <= len(text) <= MAX_SESSION
            if not is_text or not text.isprintable():
                expected = f"{least} to {MAX_SESSION} printable characters"
                raise TicketError(f"pdconn.keep.{field}", expected, text)


@dataclass(frozen=True, slots=True)
class KeepOrder:
    """What is asked for a session: to keep its KV for ``seconds``, or with 0 to release it.

    Raises:
        TicketError: ``seconds`` are no number, or out of bounds.
    """

    key: SessionKey
    seconds: float

    def __post_init__(self) -> None:
        seconds = self.seconds
        if type(seconds) not in (int, float) or not 0 <= seconds <= MAX_KEEP_S:
            raise TicketError("pdconn.keep.seconds", f"0 to {MAX_KEEP_S:g}", seconds)


def keep_of(params: object) -> KeepOrder | None:
    """What a request's parameters ask for its session; None if they ask for nothing.

    Raises:
        TicketError: naming the field, the expected and the seen value.

    >>> keep_of({"pdconn": {"keep": {"session": "s", "seconds": 9}}})
    KeepOrder(key=SessionKey(tenant='', session='s'), seconds=9)
    """
    ours = ours_in(params)
    if "keep" not in ours:
        return None
    asked = ours["keep"]
    if not isinstance(asked, dict):
        raise TicketError("pdconn.keep", "an object", asked)
    key = SessionKey(asked.get("tenant", ""), asked.get("session", ""))
    return KeepOrder(key, asked.get("seconds", 0))


def is_prefetch(params: object) -> bool:
    """Whether a request is a prefetch, whose pulls and loads give way to those of others.

    Raises:
        TicketError: the field is neither true nor false.

    >>> is_prefetch({"pdconn": {"prefetch": True}}), is_prefetch(None)
    (True, False)
    """
    asked = ours_in(params).get("prefetch", False)
    if type(asked) is not bool:
        raise TicketError("pdconn.prefetch", "true or false", asked)
    return asked


def reports_broken(params: object) -> bool:
    """Whether the answer to a request may name other sessions: no client sees it.

    >>> reports_broken({"do_remote_decode": True}), reports_broken({"do_remote_prefill": True})
    (True, False)
    >>> reports_broken({"do_remote_decode": True, "pdconn": {"lend": 9}})
    False
    """
    ours = ours_in(params)
    if "lend" in ours:  # of such an answer a router reads the ticket only
        return False
    is_lent = isinstance(params, dict) and params.get("do_remote_decode") is True
    return is_lent or ours.get("prefetch") is True


def with_broken(
    params: dict[str, Any] | None, broken: Iterable[tuple[SessionKey, str]]
) -> dict[str, Any] | None:
    """The answer's parameters, with sessions whose promises were broken, and why.

    >>> with_broken(None, [(SessionKey("a", "s"), "room")])
    {'pdconn': {'broken': [{'session': 's', 'tenant': 'a', 'why': 'room'}]}}
    """
    named = [{"session": key.session, "tenant": key.tenant, "why": str(why)} for key, why in broken]
    return {"pdconn": {**ours_in(params), "broken": named}} if named else params


def kept_params(
    session: str,
    num_tokens: int,
    *,
    used: bool = False,
    broken: str | None = None,
    refused: str | None = None,
    cut_to_s: float | None = None,
) -> dict[str, Any]:
    """The answer's parameters: tokens that are kept from now on.

    Args:
        session: its name.
        num_tokens: 0 if nothing is kept.
        used: whether this turn has come back to what was kept for it.
        broken: why an earlier promise was broken; None if none was.
        refused: why nothing is kept; None if something is.
        cut_to_s: seconds for which it is kept; None if for as long as was asked.
    """
    why = {"broken": broken, "refused": refused, "seconds": cut_to_s}
    said = {name: one for name, one in why.items() if one is not None}
    kept = {"session": session, "tokens": num_tokens, "used": used, **said}
    return {"pdconn": {"kept": kept}}


def kept_rows_params(
    session: str, *, kept: bool, broken: str | None, cut_to_s: float | None = None
) -> dict[str, Any]:
    """The answer's parameters of a store, beside those of :func:`kept_params`.

    Args:
        session: its name.
        kept: whether the turn's rows are kept, as far as they are there.
        broken: why an earlier promise to keep rows was broken; None if none was.
        cut_to_s: seconds for which they are kept; None if for as long as was asked.
    """
    why = {"rows_broken": broken, "rows_seconds": cut_to_s}
    said = {name: one for name, one in why.items() if one is not None}
    return {"pdconn": {"kept": {"session": session, "rows": kept, **said}}}
