"""Our keys in ``kv_transfer_params`` for prefixes: to ask for one, and to use one.

They are in ``pdconn``, next to vLLM's keys; a request has at most one of these::

    "lend": 3200        to the engine that holds the prefix: return a ticket for 3200 tokens
    "from": {...}       to the engine that computes the rest: that ticket
    "lend_back": false  to the engine that answers: return no ticket for prompt and answer
"""

from __future__ import annotations

from typing import Any

from pdconn.protocol.errors import TicketError
from pdconn.protocol.ticket import Ticket, ours_in, parse_ticket, whole


def lend_of(params: object, num_prompt_tokens: int) -> int | None:
    """Tokens of the prefix that a request of ``num_prompt_tokens`` asks for; None if it does not.

    Raises:
        TicketError: no number of tokens, or another one than all but the last.
    """
    ours = ours_in(params)
    if "lend" not in ours:
        return None
    found, expected = whole(ours["lend"]), num_prompt_tokens - 1
    if found is None or found != expected or found < 1:
        expectation = f"{expected}, all tokens of the prompt but one"
        raise TicketError("pdconn.lend", expectation, ours["lend"])
    return found


def ticket_from(params: object) -> object:
    """The ticket for its prefix in a request's parameters, of any type; None without one."""
    return ours_in(params).get("from")


def lends_back(params: object) -> bool:
    """Whether a request accepts a ticket for its prompt and answer; by default it does."""
    return ours_in(params).get("lend_back", True) is not False


def next_turn(ticket: dict[str, Any]) -> dict[str, Any]:
    """``kv_transfer_params`` for the next turn: prefill pulls with ``ticket``, then lends."""
    return {"do_remote_prefill": False, "do_remote_decode": True, "pdconn": {"from": ticket}}


def parse_prefix_ticket(given: object, max_blocks: int) -> Ticket:
    """Read a ticket for a prefix, which covers at least one token.

    Raises:
        TicketError: naming the field, the expected and the seen value.
    """
    ticket = parse_ticket(given, max_blocks)
    if ticket.num_tokens < 1:
        raise TicketError("remote_num_tokens", "at least 1", ticket.num_tokens)
    return ticket
