"""What replies come to: latencies, goodput, and whose answers are wrong.  Pure.

Goodput counts the requests that a user would be content with: whole, with the tokens of
the reference, and within both bounds.  As in DistServe (Zhong et al., OSDI 2024), the bound
between tokens holds for a request's mean, not for each gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdconn.bench.percentile import percentile
from pdconn.bench.serving.replies import Taken, WholeReply


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that a good request may take: to its first token, and per token after it."""

    ttft_s: float
    itl_s: float

    def hold(self, reply: WholeReply) -> bool:
        """Whether a request stays within both."""
        return reply.ttft_s <= self.ttft_s and reply.mean_gap_s <= self.itl_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 99th percentile (of fewer than a hundred: the worst), in seconds."""

    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None of no values."""
        known = list(values)
        return cls(percentile(known, 0.5), percentile(known, 0.99)) if known else None


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that is not the reference's."""

    round_number: int
    contestant: str
    prompt: int
    difference: str


@dataclass(frozen=True, slots=True)
class Checked:
    """Every answer held against the reference's.

    ``unchecked`` are those that it has none for: round, contestant, prompt.
    """

    wrong: tuple[Wrong, ...]
    unchecked: frozenset[tuple[int, str, int]]


@dataclass(frozen=True, slots=True)
class Summary:
    """One contestant over all rounds.

    ``itl`` is of all gaps between pieces, of all requests; ``met`` counts the good ones and
    ``seconds`` those of its turns.
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
        """Whole answers per second, good or not."""
        return (self.requests - self.failed) / self.seconds


def check(taken: Sequence[Taken], reference: str) -> Checked:
    """Hold every answer against ``reference``'s to the same prompt."""
    expected = {
        (turn.round_number, reply.prompt): reply.said
        for turn in taken
        if turn.contestant == reference
        for reply in turn.replies
        if isinstance(reply, WholeReply)
    }
    wrong, unchecked = [], set()
    for turn in taken:
        for reply in turn.replies:
            if not isinstance(reply, WholeReply):
                continue
            right = expected.get((turn.round_number, reply.prompt))
            if right is None:
                unchecked.add((turn.round_number, turn.contestant, reply.prompt))
                continue
            difference = reply.said.difference(right)
            if difference is not None:
                wrong.append(Wrong(turn.round_number, turn.contestant, reply.prompt, difference))
    return Checked(tuple(wrong), frozenset(unchecked))


def summarise(contestant: str, taken: Sequence[Taken], checked: Checked, bounds: Bounds) -> Summary:
    """What ``contestant`` achieved in its turns."""
    turns = [turn for turn in taken if turn.contestant == contestant]
    wrong = {
        (one.round_number, one.prompt) for one in checked.wrong if one.contestant == contestant
    }
    doubtful = wrong | {
        (number, prompt) for number, who, prompt in checked.unchecked if who == contestant
    }
    whole = [
        (turn.round_number, reply)
        for turn in turns
        for reply in turn.replies
        if isinstance(reply, WholeReply)
    ]
    replies = [reply for _, reply in whole]
    num_requests = sum(len(turn.replies) for turn in turns)
    return Summary(
        contestant,
        num_requests,
        num_requests - len(replies),
        len(wrong),
        Spread.of(reply.ttft_s for reply in replies),
        Spread.of(gap for reply in replies for gap in reply.gaps_s),
        Spread.of(reply.handover_s for reply in replies if reply.handover_s is not None),
        sum(bounds.hold(one) and (number, one.prompt) not in doubtful for number, one in whole),
        sum(turn.seconds for turn in turns),
    )
