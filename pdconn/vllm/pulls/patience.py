"""How long a request waits for a prefix that another engine has lent it, before it computes.

A prefix only saves time.  So it may cost at most what it saves: a pull that takes longer than
computing its tokens, or several times as long as pulls take, is given up::

    bound = max(LEAST_S, min(compute(tokens), PULLS * pull(tokens)))

The same holds for the answer to its claim.  A holder that freezes after it has granted a claim
would cost the whole lease otherwise, since a read that hangs and a renewal that is not answered
tell nothing before that.  Both rates are the median of what was seen here; until something was,
the bound is ``UNKNOWN_S``.

A read that was begun cannot be cancelled, so its blocks are quarantined until it settles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

LEAST_S = 2.0
"""Less is noise: a busy machine, a connection that was lost and is made anew."""
UNKNOWN_S = 10.0
"""Until prompts were computed here, and prefixes pulled."""
PULLS = 8.0
"""Times what pulls take."""
SEEN = 15
"""Prompts and pulls that a rate is made of."""
LEAST_TOKENS = 64
"""Shorter ones tell nothing of a rate."""


@dataclass(slots=True)
class _Wait:
    tokens: int
    since: float


@dataclass(slots=True)
class _Prompt:
    """A request that computes ``tokens`` tokens of its prompt, from ``since`` on."""

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
        """Requests that are known; none when the engine is quiet."""
        known = len(self._awaiting) + len(self._pulling)
        return known + len(self._missing) + len(self._computing)

    def bound_s(self, tokens: int) -> float:
        """Seconds that a prefix of so many tokens may take."""
        if not self._compute:
            return UNKNOWN_S
        bound_s = median(self._compute) * tokens
        if self._pull:
            bound_s = min(bound_s, PULLS * median(self._pull) * tokens)
        return max(LEAST_S, bound_s)

    def note_claim(self, request_id: str, tokens: int) -> None:
        """The claim of a request for a prefix of so many tokens is not answered yet."""
        self._awaiting.setdefault(request_id, _Wait(tokens, self._clock()))

    def note_missing(self, request: Any, tokens: int) -> None:
        """A request can be admitted, and so many of its tokens are neither held nor pulled."""
        self._awaiting.pop(request.request_id, None)
        self._missing[request.request_id] = _Prompt(request, tokens)

    def note_blocks(self, request_id: str, pulled: int) -> None:
        """A request got blocks; ``pulled`` tokens of them are a prefix's, or 0."""
        now = self._clock()
        self._awaiting.pop(request_id, None)
        prompt = self._missing.pop(request_id, None)
        if pulled:
            self._pulling[request_id] = _Wait(pulled, now)
        elif prompt is not None and prompt.tokens >= LEAST_TOKENS:
            prompt.since = now
            self._computing[request_id] = prompt

    def note_pull(self, request_id: str, *, failed: bool) -> None:
        """A pull has ended."""
        wait = self._pulling.pop(request_id, None)
        if wait is not None and not failed and wait.tokens >= LEAST_TOKENS:
            self._pull.append((self._clock() - wait.since) / wait.tokens)

    def forget_request(self, request_id: str) -> None:
        """A request left the engine."""
        self._learn()
        self._awaiting.pop(request_id, None)
        self._pulling.pop(request_id, None)
        self._missing.pop(request_id, None)
        self._computing.pop(request_id, None)

    def _learn(self) -> None:
        """Prompts that have been computed since the last step have an answer's first token."""
        now = self._clock()
        for name in [
            name for name, one in self._computing.items() if one.request.num_output_tokens
        ]:
            one = self._computing.pop(name)
            self._compute.append((now - one.since) / one.tokens)

    def overdue(self) -> list[str]:
        """Requests whose prefix takes too long; each is named once."""
        if self._computing:
            self._learn()
        if not (self._awaiting or self._pulling):  # asked in every step
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
