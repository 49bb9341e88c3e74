"""Statistics of replies: latencies, goodput, and wrong answers.  Pure.

Goodput counts the requests that are complete, have the reference's tokens, and meet both bounds.
As in DistServe (Zhong et al., OSDI 2024), the bound between tokens applies to a request's mean, not
to each gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdconn.tools.bench.percentile import percentile
from pdconn.tools.bench.serving.replies import CompleteReply, TurnResult


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a good request: time to its first token, and time per token after it."""

    ttft_s: float
    itl_s: float

    def hold(self, reply: CompleteReply) -> bool:
        """Whether a request meets both bounds."""
        return reply.ttft_s <= self.ttft_s and reply.mean_gap_s <= self.itl_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 99th percentile (the maximum below a hundred values), in seconds."""

    p50_s: float
    p99_s: float

    @classmethod
    def of_values(cls, values: Iterable[float]) -> Spread | None:
        """The spread of ``values``; None without values."""
        known = list(values)
        return cls(percentile(known, 0.5), percentile(known, 0.99)) if known else None


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """An answer that differs from the reference's."""

    round_number: int
    contestant: str
    prompt: int
    difference: str


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """All answers compared with the reference's.

    ``unchecked`` have no reference answer: round, contestant, prompt.
    """

    wrong: tuple[AnswerDifference, ...]
    unchecked: frozenset[tuple[int, str, int]]


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of one contestant over all rounds.

    ``itl`` covers all gaps between chunks of all requests; ``met`` counts good requests;
    ``seconds`` is the total length of its turns.
    """

    contestant: str
    requests: int
    failed: int
    wrong: int
    ttft: Spread | None
    itl: Spread | None
    handover: Spread | None
    met: int
    seconds: float

    @property
    def goodput(self) -> float:
        """Good requests per second."""
        return self.met / self.seconds

    @property
    def throughput(self) -> float:
        """Complete answers per second, good or not."""
        return (self.requests - self.failed) / self.seconds


def check(turns: Sequence[TurnResult], reference: str) -> AnswerCheck:
    """Compare every answer with that of ``reference`` to the same prompt."""
    expected = {
        (turn.round_number, reply.prompt): reply.content
        for turn in turns
        if turn.contestant == reference
        for reply in turn.replies
        if isinstance(reply, CompleteReply)
    }
    wrong, unchecked = [], set()
    for turn in turns:
        for reply in turn.replies:
            if not isinstance(reply, CompleteReply):
                continue
            right = expected.get((turn.round_number, reply.prompt))
            if right is None:
                unchecked.add((turn.round_number, turn.contestant, reply.prompt))
                continue
            difference = reply.content.difference(right)
            if difference is not None:
                wrong.append(
                    AnswerDifference(turn.round_number, turn.contestant, reply.prompt, difference)
                )
    return AnswerCheck(tuple(wrong), frozenset(unchecked))


def summarise(
    contestant: str, turns: Sequence[TurnResult], answers: AnswerCheck, bounds: Bounds
) -> Summary:
    """Summarise the turns of ``contestant``."""
    turns = [turn for turn in turns if turn.contestant == contestant]
    wrong = {
        (one.round_number, one.prompt) for one in answers.wrong if one.contestant == contestant
    }
    doubtful = wrong | {
        (number, prompt) for number, name, prompt in answers.unchecked if name == contestant
    }
    complete = [
        (turn.round_number, reply)
        for turn in turns
        for reply in turn.replies
        if isinstance(reply, CompleteReply)
    ]
    replies = [reply for _, reply in complete]
    num_requests = sum(len(turn.replies) for turn in turns)
    return Summary(
        contestant,
        num_requests,
        num_requests - len(replies),
        len(wrong),
        Spread.of_values(reply.ttft_s for reply in replies),
        Spread.of_values(gap for reply in replies for gap in reply.gaps_s),
        Spread.of_values(reply.handover_s for reply in replies if reply.handover_s is not None),
        sum(bounds.hold(one) and (number, one.prompt) not in doubtful for number, one in complete),
        sum(turn.seconds for turn in turns),
    )
