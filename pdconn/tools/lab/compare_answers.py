"""Compares the answers of two engines, and makes prompts for them.

Equal tokens are not enough: with a slightly wrong KV cache the best token is often unchanged.  So
log-probabilities are compared too, of the chosen tokens and of the other top tokens that both
engines reported.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pdconn.tools.lab.model import FIRST_WORD, TINY

TOLERANCE = 1e-3
"""Largest difference between two correct answers, in nats.  Rounding causes about 1e-5."""


@dataclass(frozen=True)
class Answer:
    """An engine's answer to a prompt.

    Attributes:
        tokens: ids of the generated tokens.
        logprobs: natural logarithm of each token's probability.
        top: per position, log-probabilities of the likeliest tokens by id.
        finish_reason: why generation stopped.
        kv_transfer_params: the ticket for the decode engine, if a prefill engine answered.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[int, float], ...] = ()
    finish_reason: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.tokens):
            raise ValueError(
                f"{len(self.tokens)} tokens came with {len(self.logprobs)} log-probabilities"
            )


@dataclass(frozen=True)
class Mismatch:
    """The first place where two answers differ.

    Attributes:
        what: number of tokens, a token, or a log-probability.
        position: index into the generated tokens.
        expected: token id, log-probability or count of the reference.
        seen: the same for the other answer.
        token: the token whose log-probability differs.
    """

    what: Literal["length", "token", "logprob"]
    position: int
    expected: float
    seen: float
    token: int | None = None

    def __str__(self) -> str:
        of = "" if self.token is None else f" of token {self.token}"
        return (
            f"{self.what}{of} differs at position {self.position}: "
            f"expected {self.expected:g}, seen {self.seen:g}"
        )


def compare(expected: Answer, seen: Answer, tolerance: float = TOLERANCE) -> Mismatch | None:
    """The first difference above ``tolerance``, or None.

    Log-probabilities of a position are compared before the token of the next one: a wrong
    cache changes them first.
    """
    for position, (ours, theirs) in enumerate(zip(expected.tokens, seen.tokens, strict=False)):
        if ours != theirs:
            return Mismatch("token", position, ours, theirs)
        for token, want, got in _pairs(expected, seen, position):
            if not abs(want - got) <= tolerance:  # also if either is not a number
                return Mismatch("logprob", position, want, got, token)
    if len(expected.tokens) != len(seen.tokens):
        at = min(len(expected.tokens), len(seen.tokens))
        return Mismatch("length", at, len(expected.tokens), len(seen.tokens))
    return None


def distance(expected: Answer, seen: Answer) -> float:
    """Largest difference of log-probabilities, in nats; infinite if tokens differ."""
    if expected.tokens != seen.tokens:
        return float("inf")
    return max(
        (
            abs(want - got)
            for position in range(len(expected.tokens))
            for _, want, got in _pairs(expected, seen, position)
        ),
        default=0.0,
    )


def _pairs(expected: Answer, seen: Answer, position: int) -> list[tuple[int, float, float]]:
    """``(token, expected, seen)`` log-probabilities that both answers report at ``position``."""
    chosen = expected.tokens[position]
    pairs = [(chosen, expected.logprobs[position], seen.logprobs[position])]
    if expected.top and seen.top:
        theirs = seen.top[position]
        pairs += [
            (token, value, theirs[token])
            for token, value in expected.top[position].items()
            if token in theirs  # the last top token may tie with an unreported one
        ]
    return pairs


def make_prompts(
    lengths: Sequence[int], seed: int, vocab: int = TINY.vocab
) -> list[tuple[int, ...]]:
    """Random prompts of the given lengths in tokens, the same for the same seed.

    Prompts begin with different tokens, so none is a prefix of another, except very
    short ones by chance.
    """
    source = random.Random(seed)
    return [tuple(source.randrange(FIRST_WORD, vocab) for _ in range(n)) for n in lengths]


def spread_lengths(count: int, longest: int, seed: int, edges: Sequence[int] = ()) -> list[int]:
    """``count`` prompt lengths from 1 to ``longest``, in random order.

    They include 1, ``longest``, and every value of ``edges`` (where blocks and windows end)
    with its neighbours; the rest is spread evenly over orders of magnitude.

    >>> sorted(spread_lengths(8, 100, seed=1, edges=[32]))[:1]
    [1]
    """
    source = random.Random(seed)
    wanted = {1, longest, *(edge + step for edge in edges for step in (-1, 0, 1))}
    lengths = sorted(n for n in wanted if 1 <= n <= longest)
    source.shuffle(lengths)
    lengths = lengths[:count]
    while len(lengths) < count:
        lengths.append(round(longest ** source.random()))
    source.shuffle(lengths)
    return lengths
