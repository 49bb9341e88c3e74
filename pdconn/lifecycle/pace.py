"""When to ask for blocks for a request that is still being computed elsewhere.

Blocks that are held early are missing to others, so they are asked for as late as the link allows:
so that all but the last step of the prompt can be read by the time at which it is computed::

    prefill starts                                  expected end
    ├─────────┬─────────┬─────────┬─────────┬─────────┤
                   ├─ transfer of four steps × 1.1 ─┼─┤
                 blocks                            fixed

How fast the lender computes tokens at about these positions, and how fast it is read, is learned
from earlier streams of it.  Without that knowledge blocks are asked for at once.

Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

FIXED_S = 0.02
"""A step of the engine, a plan, and the first read."""
SLACK = 1.1
"""Of the expected transfer."""
LEARNS_FROM_TOKENS = 64
"""The time of fewer tokens is that of one step, and says little of more."""
LEARNS_FROM_NBYTES = 1 << 16
_WEIGHT = 0.3
_LEAST_BITS = LEARNS_FROM_TOKENS.bit_length()


@dataclass(slots=True)
class LenderRates:
    """What was learned of a lender.

    Attributes:
        prefill: seconds and tokens, of which later ones count more, by the bits of the tokens'
            positions: attention costs more at later ones, and a step has a fixed cost.
        bytes_per_s: read from there by one pull; None while it is unknown.
    """

    prefill: dict[int, tuple[float, float]] = field(default_factory=dict)
    bytes_per_s: float | None = None

    def learn_prefill(self, begin: int, end: int, seconds: float) -> None:
        """The tokens at positions ``[begin, end)`` took so long."""
        each_s = seconds / (end - begin)
        for bits, count in _by_bits(begin, end):
            keep = (1 - _WEIGHT) ** (count / (1 << (bits - 1)))
            before_s, before = self.prefill.get(bits, (0.0, 0.0))
            self.prefill[bits] = keep * before_s + count * each_s, keep * before + count

    def learn_read(self, nbytes: int, seconds: float) -> None:
        """Reads of so many bytes took so long."""
        if nbytes >= LEARNS_FROM_NBYTES and seconds > 0:
            seen, before = nbytes / seconds, self.bytes_per_s
            self.bytes_per_s = seen if before is None else before + _WEIGHT * (seen - before)

    def prefill_seconds(self, begin: int, end: int) -> float | None:
        """Of the tokens at positions ``[begin, end)``; None if nothing is known.

        Those at positions of which nothing is known take as long as at the nearest known ones.
        """
        if not self.prefill:
            return None
        total = 0.0
        for bits, count in _by_bits(begin, end):
            seconds, tokens = self.prefill[min(self.prefill, key=lambda one: abs(one - bits))]
            total += count * seconds / tokens
        return total


@dataclass(slots=True)
class StreamPace:
    """The progress of one request.

    Attributes:
        rates: of its lender.
        num_tokens: of its prompt.
        known: tokens that are announced, and since when; None while the request waits there.
        step_tokens: announced the last time, after the first one.
    """

    rates: LenderRates
    num_tokens: int
    known: tuple[int, float] | None = None
    step_tokens: int = 0

    def note_announced(self, num_tokens: int, now: float) -> None:
        """So many tokens are announced by now, in all; the first time the request has begun.

        The first ones were cached.
        """
        if self.known is None:
            self.known = num_tokens, now
            return
        before, since = self.known
        # 1. Too few to learn from: they count with the next ones.
        if num_tokens - before < LEARNS_FROM_TOKENS or now <= since:
            return
        # 2. A step, or some.
        self.rates.learn_prefill(before, num_tokens, now - since)
        self.step_tokens = num_tokens - before
        self.known = num_tokens, now

    def note_completed(self, now: float) -> None:
        """The request is computed."""
        if self.known is not None:
            self.note_announced(self.num_tokens, now)

    def blocks_due_at(self, nbytes: float, now: float) -> float | None:
        """When to ask for blocks, of which ``nbytes`` will be read; None until it has begun."""
        if self.known is None:
            return None
        end, bytes_per_s = self.expected_end(now), self.rates.bytes_per_s
        if end is None or bytes_per_s is None:
            return now
        # The last step can only be read after the end.
        before_end = nbytes * (1 - self.step_tokens / self.num_tokens)
        return end - SLACK * before_end / bytes_per_s - FIXED_S

    def expected_end(self, now: float) -> float | None:
        """When the request will be computed, at the earliest while it waits; None if unknown."""
        done, since = (0, now) if self.known is None else self.known
        left_s = self.rates.prefill_seconds(done, self.num_tokens)
        return None if left_s is None else since + left_s


def _by_bits(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Bits of positions in ``[begin, end)``, and how many have them; the first ones count alike."""
    while begin < end:
        bits = max(begin.bit_length(), _LEAST_BITS)
        stop = min(end, 1 << bits)
        yield bits, stop - begin
        begin = stop
