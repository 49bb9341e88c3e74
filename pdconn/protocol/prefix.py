"""Prefixes in ``kv_transfer_params``: one that is asked for, and one that was lent.

Beside vLLM's keys stand ours, in ``pdconn``; a request has at most one of these::

    "lend": 3200        of the engine that holds it: a ticket for the first 3200 tokens
    "from": {...}       of the engine that computes the rest: that ticket
    "lend_back": false  of the engine that answers: no ticket for prompt and answer, please
"""

from __future__ import annotations

from typing import Any

from pdconn.protocol.errors import TicketError
from pdconn.protocol.ticket import Ticket, parse_ticket, whole


def lend_of(params: object, num_prompt_tokens: int) -> int | None:
    """Tokens of the prefix that a request of ``num_prompt_tokens`` asks for; None if it does not.

    Raises:
        TicketError: no number of tokens, or another one than all but the last.
    """
    ours = _ours(params)
    if "lend" not in ours:
        return None
    found, expected = whole(ours["lend"]), num_prompt_tokens - 1
    if found is None or found != expected or found < 1:
        expectation = f"{expected}, all tokens of the prompt but one"
        raise TicketError("pdconn.lend", expectation, ours["lend"])
    return found


def ticket_from(params: object) -> object:
    """What a request names as the ticket for its prefix, of any type; None if it names none."""
    return _ours(params).get("from")


def lends_back(params: object) -> bool:
    """Whether a request takes a ticket for its prompt and answer; it need not say so."""
    return _ours(params).get("lend_back", True) is not False


def next_turn(ticket: dict[str, Any]) -> dict[str, Any]:
    """``kv_transfer_params`` of prefill's request for the next turn: it pulls, and lends on."""
    return {"do_remote_prefill": False, "do_remote_decode": True, "pdconn": {"from": ticket}}


def parse_prefix_ticket(given: object, max_blocks: int) -> Ticket:
    """A ticket for a prefix, as a request names it; see :func:`parse_ticket`.

    Raises:
        TicketError: naming the field, the expected and the seen value.
    """
    ticket = parse_ticket(given, max_blocks)
    if ticket.num_tokens < 1:
        raise TicketError("remote_num_tokens", "at least 1", ticket.num_tokens)
    return ticket


def _ours(params: object) -> dict[Any, Any]:
    """Our part of what a client wrote; empty if there is none."""
    ours = params.get("pdconn") if isinstance(params, dict) else None
    return ours if isinstance(ours, dict) else {}
