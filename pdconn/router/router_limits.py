"""Time-outs and bounds that no option sets."""

from __future__ import annotations

from dataclasses import dataclass

from pdconn.router.fleet import engine_registry, sources
from pdconn.router.handover import abandoned, ticket_return
from pdconn.router.routing import tokenize


@dataclass(frozen=True, slots=True)
class Limits:
    """Time-outs and bounds that no option sets; each is explained at its default.

    Attributes:
        ready_pause_s: between two rounds of probes during the wait at the start.
        fleet_interval_s: between two polls of the fleet's sources.
        first_backoff_s: before the first probe of an engine that went down.
        patience_s: for requests of clients that left.
        late_prefill_s: for prefills that decode does not wait for.
        most_ticket_returns: concurrent returns.
        last_returns_s: for both of them after the drain, regardless of ``--drain-timeout``: a
            prefill that was cut off needs ``patience_s`` before its ticket can be returned.
        most_tokens, most_token_nbytes: bounds of prompts that are tokenized.
    """

    ready_pause_s: float = 0.5
    fleet_interval_s: float = sources.INTERVAL_S
    first_backoff_s: float = engine_registry.FIRST_BACKOFF_S
    patience_s: float = abandoned.PATIENCE_S
    late_prefill_s: float = abandoned.LATE_S
    most_ticket_returns: int = ticket_return.MOST_RETURNS
    last_returns_s: float = 4.0
    most_tokens: int = tokenize.MOST_TOKENS
    most_token_nbytes: int = tokenize.MAX_NBYTES


LIMITS = Limits()
