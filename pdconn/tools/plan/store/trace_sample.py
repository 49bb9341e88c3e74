"""Of a long trace some requests, by their prefixes, on stores that are smaller in proportion.

A store of ``C`` bytes that gets a 20th of the prompt tokens hits what one of ``20 C`` bytes hits
that gets all of them (SHARDS: Waldspurger and others, FAST 2015), as long as requests that share a
prefix are chosen together.  Chosen is by the first block of a prompt that few requests have::

    system prompt ── tools ──┬── first question ── answer ── second question     chosen together
    many requests have them  └── another first question ──                       chosen on its own

What many requests have is in every sample, and takes a larger part of the smaller store: a few
system prompts, which are small beside a store that is worth a sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdconn.tools.plan.store.curve import TracedRequest

_BITS = 22
_MASK = (1 << _BITS) - 1
_FEW = 1000
"""A block is of few requests if at most this fraction has it."""
_LEAST_FEW = 100
"""And at least so many may have it: the turns of a long conversation."""
_MOST_KEPT = 1 << 18


@dataclass(frozen=True, slots=True)
class TraceSample:
    """Which requests of a trace are simulated.

    Attributes:
        every: one of so many prefixes.
        counts: requests that have a block, by the last bits of its digest.
        few: a block that at most so many requests have is of few.
    """

    every: int
    counts: array[int]
    few: int

    def choose(self, requests: Iterable[TracedRequest]) -> Iterator[TracedRequest]:
        """The requests that are simulated."""
        return (request for request in requests if self.every == 1 or self._has(request))

    def part(self, requests: Iterable[TracedRequest]) -> float:
        """Of the prompt tokens of a trace, those that are simulated; 1 if all are."""
        if self.every == 1:
            return 1.0
        tokens = chosen = 0
        for request in requests:
            tokens += request.num_tokens
            chosen += request.num_tokens * self._has(request)
        return chosen / max(1, tokens)

    def _has(self, request: TracedRequest) -> bool:
        digest = request.num_tokens if not request.ids else 0
        for one in request.ids:
            digest = hash((digest, one))
            if self.counts[digest & _MASK] <= self.few:
                break
        # Not the bits that the counts are by.
        return (digest >> _BITS) % self.every == 0


@dataclass(frozen=True, slots=True)
class TraceSurvey:
    """What one pass over a trace finds.

    Attributes:
        requests: number of them.
        prompt_tokens: of all of them.
        distinct_tokens: of different blocks, of which a store that loses nothing keeps a copy;
            above 262,144 blocks an estimate from a sample of them, within one percent.
        counts: as in :class:`TraceSample`.
    """

    requests: int
    prompt_tokens: int
    distinct_tokens: int
    counts: array[int]

    @classmethod
    def of(cls, requests: Iterable[TracedRequest], most_kept: int = _MOST_KEPT) -> TraceSurvey:
        """Survey a trace."""
        counts = array("I", bytes(4 << _BITS))
        kept: set[int] = set()
        block_tokens = number = tokens = 0
        every = 1
        for request in requests:
            number += 1
            tokens += request.num_tokens
            block_tokens = max(block_tokens, request.block_tokens)
            digest = 0
            for one in request.ids:
                digest = hash((digest, one))
                counts[digest & _MASK] += 1
                if not digest % every:
                    kept.add(digest)
            if len(kept) > most_kept:
                every *= 2
                kept = {one for one in kept if not one % every}
        return cls(number, tokens, len(kept) * every * block_tokens, counts)

    def sample(self, most: int) -> TraceSample:
        """About ``most`` requests, or all of them if they are fewer or ``most`` is 0."""
        every = max(1, -(-self.requests // most)) if most else 1
        return TraceSample(every, self.counts, max(_LEAST_FEW, self.requests // _FEW))
