"""The result of one request, and of one turn.  Pure.

All times are in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class AnswerContent:
    """The content of an answer; ``tokens`` are ids, if the server reports them."""

    text: str
    tokens: tuple[int, ...] | None = None

    def difference(self, expected: AnswerContent) -> str | None:
        """The first difference from ``expected``, or None; compares text if ids are unknown.

        >>> AnswerContent("", (4, 5)).difference(AnswerContent("", (4, 6)))
        'token 1: expected 6, seen 5'
        """
        if self.tokens is None or expected.tokens is None:
            return _first_difference("character", expected.text, self.text)
        return _first_difference("token", expected.tokens, self.tokens)


@dataclass(frozen=True, slots=True)
class CompleteReply:
    """A complete answer.

    Attributes:
        prompt: number of the prompt within the round.
        began_s: time of sending, or the due time with a request rate.
        arrivals_s: arrival times of the chunks with tokens; at least one.
        num_tokens: tokens in all chunks; the number of chunks if the server reports no ids.
        content: text and tokens.
        handover_s: from the end of prefill's answer to the first byte of decode's; None without a
            handover, or if not reported.
    """

    prompt: int
    began_s: float
    arrivals_s: tuple[float, ...]
    num_tokens: int
    content: AnswerContent
    handover_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0] - self.began_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between chunks, as seen by the client."""
        return tuple(later - earlier for earlier, later in pairwise(self.arrivals_s))

    @property
    def mean_gap_s(self) -> float:
        """Mean time per token after the first; 0 for a single token."""
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class FailedReply:
    """A request without a complete answer, and the reason."""

    prompt: int
    began_s: float
    reason: str


Reply = CompleteReply | FailedReply


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The result of one contestant's turn.

    Attributes:
        round_number: counted from 1.
        contestant: the contestant's name.
        replies: in prompt order.
        seconds: from the first request to the end of the last answer.
        others: share of the machine's CPU time that other processes used, 0 to 1; None if the
            contestant's own processes are unknown.
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
