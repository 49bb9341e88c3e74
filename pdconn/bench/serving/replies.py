"""What came of one request, and of a turn of them.  Pure.

All times are seconds of one clock that only ever goes forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class SaidReply:
    """The words of an answer; ``tokens`` are ids, where the server tells them."""

    text: str
    tokens: tuple[int, ...] | None = None

    def difference(self, expected: SaidReply) -> str | None:
        """Where this first departs from ``expected``, or None; texts where ids are not known.

        >>> Said("", (4, 5)).difference(Said("", (4, 6)))
        'token 1: expected 6, seen 5'
        """
        if self.tokens is None or expected.tokens is None:
            return _first_difference("character", expected.text, self.text)
        return _first_difference("token", expected.tokens, self.tokens)


@dataclass(frozen=True, slots=True)
class WholeReply:
    """An answer that came to its end.

    Attributes:
        prompt: the number of its prompt within the round.
        began_s: when it was sent, or was due where requests come at times of their own.
        arrivals_s: when each piece with tokens came; at least one.
        num_tokens: in all pieces; pieces are counted where the server tells no ids.
        said: what it was.
        handover_s: from the end of prefill's answer to the first byte of decode's; None
            where nobody handed over, or nobody told.
    """

    prompt: int
    began_s: float
    arrivals_s: tuple[float, ...]
    num_tokens: int
    said: SaidReply
    handover_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0] - self.began_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between pieces, as a reader sees them."""
        return tuple(later - earlier for earlier, later in pairwise(self.arrivals_s))

    @property
    def mean_gap_s(self) -> float:
        """Time per token after the first; 0 where there is none."""
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class FailedReply:
    """A request that got no whole answer, and why."""

    prompt: int
    began_s: float
    why: str


Reply = WholeReply | FailedReply


@dataclass(frozen=True, slots=True)
class Taken:
    """One contestant's turn.

    Attributes:
        round_number: counted from 1.
        contestant: its name.
        replies: in the order of the prompts.
        seconds: from the first request to the end of the last answer.
        others: part of the machine that other programs took meanwhile, 0 to 1; None where
            the contestant's own processes are not known.
    """

    round_number: int
    contestant: str
    replies: tuple[Reply, ...]
    seconds: float
    others: float | None = None


def _first_difference(what: str, expected: Sequence[object], seen: Sequence[object]) -> str | None:
    for at, (ours, theirs) in enumerate(zip(expected, seen, strict=False)):
        if ours != theirs:
            return f"{what} {at}: expected {ours}, seen {theirs}"
    if len(expected) != len(seen):
        return f"expected {len(expected)} {what}s, seen {len(seen)}"
    return None
