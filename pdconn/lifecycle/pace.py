"""When to ask for blocks for a request that is still being computed elsewhere.

Blocks that are held early are missing to others, so they are asked for as late as the link allows:
so that what is announced can be read by the time at which the prompt is computed::

    prefill starts                       expected end
    ├────────────────────────────────────────┤
                      ├─ transfer × 1.25 ─┼──┤
                      blocks              fixed

How fast the lender computes prompts of about this length, and how fast it is read, is learned from
earlier streams of it.  Without that knowledge blocks are asked for at once.

Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIXED_S = 0.02
"""A step of the engine, a plan, and the first read."""
SLACK = 1.25
"""Of the expected transfer."""
LEARNS_FROM_TOKENS = 64
"""The time of a shorter prompt is that of one step, and says little of longer ones."""
LEARNS_FROM_NBYTES = 1 << 16
_WEIGHT = 0.3


@dataclass(slots=True)
class LenderRates:
    """What was learned of a lender.

    Attributes:
        prefill_s: seconds per token of a prompt, by the bits of its number of tokens: a step has a
            fixed cost, and attention costs more in longer prompts.
        bytes_per_s: read from there; None while it is unknown.
    """

    prefill_s: dict[int, float] = field(default_factory=dict)
    bytes_per_s: float | None = None

    def learn_prefill(self, num_tokens: int, seconds: float) -> None:
        """A prompt of so many tokens, that were not cached, took so long."""
        if num_tokens >= LEARNS_FROM_TOKENS and seconds > 0:
            bits = num_tokens.bit_length()
            self.prefill_s[bits] = _mean(self.prefill_s.get(bits), seconds / num_tokens)

    def learn_read(self, nbytes: int, seconds: float) -> None:
        """A read of so many bytes took so long."""
        if nbytes >= LEARNS_FROM_NBYTES and seconds > 0:
            self.bytes_per_s = _mean(self.bytes_per_s, nbytes / seconds)

    def seconds_per_token(self, num_tokens: int) -> float | None:
        """Of a prompt of so many tokens, as of one of about the length; None if none is known."""
        bits = num_tokens.bit_length()
        nearest = min(self.prefill_s, key=lambda known: (abs(known - bits), known), default=None)
        return None if nearest is None else self.prefill_s[nearest]


@dataclass(slots=True)
class StreamPace:
    """The progress of one request.

    Attributes:
        rates: of its lender.
        num_tokens: of its prompt.
        started_at: when its lender began to compute it; None while it waits there.
        cached: tokens that were announced then: its lender had them in its cache.
        announced: tokens, and when they were.
    """

    rates: LenderRates
    num_tokens: int
    started_at: float | None = None
    cached: int = 0
    announced: tuple[int, float] = field(default=(0, 0.0))

    def note_announced(self, num_tokens: int, now: float) -> None:
        """So many tokens are announced by now, in all; the first time the request has begun."""
        if self.started_at is None:
            self.started_at, self.cached = now, num_tokens
        self.announced = num_tokens, now

    def note_completed(self, now: float) -> None:
        """The request is computed."""
        if self.started_at is not None:
            self.rates.learn_prefill(self.num_tokens - self.cached, now - self.started_at)

    def blocks_due_at(self, nbytes: float, now: float) -> float | None:
        """When to ask for blocks, of which ``nbytes`` will be read; None until it has begun."""
        if self.started_at is None:
            return None
        end, bytes_per_s = self.expected_end(now), self.rates.bytes_per_s
        if end is None or bytes_per_s is None:
            return now
        return end - SLACK * nbytes / bytes_per_s - FIXED_S

    def expected_end(self, now: float) -> float | None:
        """When the request will be computed, at the earliest while it waits; None if unknown."""
        each_s = self.rates.seconds_per_token(self.num_tokens - self.cached)
        if each_s is None:
            return None
        done, at = (0, now) if self.started_at is None else self.announced
        return at + (self.num_tokens - done) * each_s


def _mean(before: float | None, seen: float) -> float:
    return seen if before is None else before + _WEIGHT * (seen - before)
