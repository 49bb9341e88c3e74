"""How long a request waits for a prefix that another engine lends, before it is computed.

A prefix only saves time.  So a pull that takes longer than computing its tokens, or several times
as long as other pulls, is given up::

    bound = max(LEAST_S, min(compute(tokens), PULLS * pull(tokens)))

The bound also applies to the claim's answer: without it a lender that freezes would cost the time
of the whole lease.  Both rates are medians of this engine's prompts and pulls; until there are
some, the bound is ``UNKNOWN_S``.

A read in flight cannot be cancelled, so its blocks are quarantined until it settles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

LEAST_S = 2.0
"""The least bound: less is noise, of a busy machine or of a new connection."""
UNKNOWN_S = 10.0
"""The bound until prompts have been computed and prefixes pulled."""
PULLS = 8.0
"""A pull may take this many times as long as other pulls."""
SEEN = 15
"""Prompts and pulls whose median is a rate."""
LEAST_TOKENS = 64
"""Shorter prompts and pulls do not count for rates."""


@dataclass(slots=True)
class _Wait:
    tokens: int
    since: float


@dataclass(slots=True)
class _Prompt:
    """A request that computes ``tokens`` tokens of its prompt since ``since``."""

    request: Any
    tokens: int
    since: float = 0.0


class PrefixPatience:
    """Requests that wait for prefixes, and the rates that bound their waits.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._awaiting: dict[str, _Wait] = {}
        self._pulling: dict[str, _Wait] = {}
        self._missing: dict[str, _Prompt] = {}
        self._computing: dict[str, _Prompt] = {}
        self._compute: deque[float] = deque(maxlen=SEEN)
        self._pull: deque[float] = deque(maxlen=SEEN)

    def __len__(self) -> int:
        """Known requests; 0 when the engine is idle."""
        known = len(self._awaiting) + len(self._pulling)
        return known + len(self._missing) + len(self._computing)

    def bound_s(self, tokens: int) -> float:
        """Seconds that a prefix of ``tokens`` tokens may take."""
        if not self._compute:
            return UNKNOWN_S
        bound_s = median(self._compute) * tokens
        if self._pull:
            bound_s = min(bound_s, PULLS * median(self._pull) * tokens)
        return max(LEAST_S, bound_s)

    def note_claim(self, request_id: str, tokens: int) -> None:
        """Record a claim, not answered yet, for a prefix of ``tokens`` tokens."""
        self._awaiting.setdefault(request_id, _Wait(tokens, self._clock()))

    def note_missing(self, request: Any, tokens: int) -> None:
        """Record that ``tokens`` of a request's tokens are neither held nor pulled."""
        self._awaiting.pop(request.request_id, None)
        self._missing[request.request_id] = _Prompt(request, tokens)

    def note_blocks(self, request_id: str, pulled: int) -> None:
        """Record that a request has blocks, into which it pulls ``pulled`` tokens of a prefix."""
        now = self._clock()
        self._awaiting.pop(request_id, None)
        prompt = self._missing.pop(request_id, None)
        if pulled:
            self._pulling[request_id] = _Wait(pulled, now)
        elif prompt is not None and prompt.tokens >= LEAST_TOKENS:
            prompt.since = now
            self._computing[request_id] = prompt

    def note_pull(self, request_id: str, *, failed: bool) -> None:
        """Record that a pull has ended."""
        wait = self._pulling.pop(request_id, None)
        if wait is not None and not failed and wait.tokens >= LEAST_TOKENS:
            self._pull.append((self._clock() - wait.since) / wait.tokens)

    def forget_waits(self, request_id: str) -> None:
        """Forget a request that leaves the engine."""
        self._learn()
        self._awaiting.pop(request_id, None)
        self._pulling.pop(request_id, None)
        self._missing.pop(request_id, None)
        self._computing.pop(request_id, None)

    def _learn(self) -> None:
        """Update the rate of computing by the prompts that have a first output token."""
        now = self._clock()
        for name in [
            name for name, one in self._computing.items() if one.request.num_output_tokens
        ]:
            one = self._computing.pop(name)
            self._compute.append((now - one.since) / one.tokens)

    def overdue(self) -> list[str]:
        """Requests whose prefix takes too long; each is returned once."""
        if self._computing:
            self._learn()
        if not (self._awaiting or self._pulling):  # in most steps
            return []
        now, found = self._clock(), []
        for waits in (self._awaiting, self._pulling):
            late = [
                name for name, one in waits.items() if now - one.since > self.bound_s(one.tokens)
            ]
            for name in late:
                del waits[name]
            found += late
        return found
