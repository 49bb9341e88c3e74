"""What the controller of roles observes: engines, prompts and first tokens.  Pure.

A router knows best what it has sent itself.  Of an engine's own report three things count: the
requests of others, the share of its KV cache in use, and its inter-token latency.  A report that
is old or absurd counts for nothing, and the engine's own numbers are those of the router alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pdconn.router.fleet.member import Role

STALE_S = 5.0
"""Age from which on a report counts for nothing; reports are polled once a second."""
MOST_REQUESTS = 100_000
MOST_ITL_S = 60.0
"""Larger values are taken for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine.

    Attributes:
        engine: base URL.
        roles: that it is listed in; one with both is movable.
        up: whether it answers, and does not drain by the operator's order.
        age_s: of its own report; None if there is none.
        num_ours: requests of this router that are in flight there.
        num_others: requests of others there, running and waiting, by its report.
        num_waiting: requests that wait there, by its report.
        kv_usage: share of its KV cache in use, by its report.
        itl_s: mean inter-token latency since its previous report; None without tokens.
        kept_tokens: tokens of sessions that it has promised to keep.
    """

    engine: str
    roles: frozenset[Role]
    up: bool = True
    age_s: float | None = None
    num_ours: int = 0
    num_others: int = 0
    num_waiting: int = 0
    kv_usage: float | None = None
    itl_s: float | None = None
    kept_tokens: int = 0

    @property
    def is_trusted(self) -> bool:
        """Whether the report is recent, and every number of it is possible."""
        if self.age_s is None or not 0 <= self.age_s <= STALE_S:
            return False
        shares = () if self.kv_usage is None else (self.kv_usage,)
        times = () if self.itl_s is None else (self.itl_s,)
        counts = (self.num_others, self.num_waiting)
        return (
            all(math.isfinite(one) and 0 <= one <= 1 for one in shares)
            and all(math.isfinite(one) and 0 <= one <= MOST_ITL_S for one in times)
            and all(0 <= one <= MOST_REQUESTS for one in counts)
        )

    @property
    def num_requests(self) -> int:
        """Requests there, those of others only if the report is trusted."""
        return self.num_ours + (self.num_others if self.is_trusted else 0)


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """A prompt whose ticket has arrived.

    Attributes:
        tokens: that prefill had to compute for it.
        ahead: tokens of the requests of this router before it at the engine.
        seconds: from asking prefill to the ticket.
    """

    tokens: int
    ahead: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FirstTokenSample:
    """The first token of a streamed answer, and the part of the time that prefill took."""

    seconds: float
    prefill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """The fleet, and what has happened since the report before.

    Attributes:
        engines: by name; no draining by role is visible here, the controller knows it.
        sent_tokens: that were sent to prefill to be computed.
        sent_prompts: number of their prompts.
        backlog_tokens: that prefill has to compute now.
        prefilled: prompts that were computed.
        first_tokens: of streamed answers.
    """

    engines: Mapping[str, EngineReport]
    sent_tokens: int = 0
    sent_prompts: int = 0
    backlog_tokens: int = 0
    prefilled: tuple[PrefillSample, ...] = ()
    first_tokens: tuple[FirstTokenSample, ...] = ()
