"""A comparison finds what differs, and nothing where nothing does."""

from __future__ import annotations

import math

import pytest

from pdconn.tools.lab.compare_answers import (
    Answer,
    Mismatch,
    compare,
    distance,
    make_prompts,
    spread_lengths,
)
from pdconn.tools.lab.model import FIRST_WORD, TINY

_RIGHT = Answer((7, 8), (-1.0, -2.0), ({7: -1.0, 9: -1.5}, {8: -2.0, 5: -2.5}))


def _answer(
    tokens: tuple[int, ...] = (7, 8),
    logprobs: tuple[float, ...] = (-1.0, -2.0),
    runner_up: float = -1.5,
) -> Answer:
    return Answer(tokens, logprobs, ({7: -1.0, 9: runner_up}, {8: -2.0, 5: -2.5}))


def test_equal_answers_agree() -> None:
    assert compare(_RIGHT, _answer()) is None
    assert distance(_RIGHT, _answer()) == 0


def test_rounding_is_forgiven_up_to_the_tolerance() -> None:
    seen = _answer(logprobs=(-1.0004, -2.0))
    assert compare(_RIGHT, seen) is None
    assert compare(_RIGHT, seen, tolerance=1e-4) is not None
    assert distance(_RIGHT, seen) == pytest.approx(4e-4)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (_answer(tokens=(7, 3)), Mismatch("token", 1, 8, 3)),
        (_answer(logprobs=(-1.0, -2.1)), Mismatch("logprob", 1, -2.0, -2.1, 8)),
        (_answer(runner_up=-1.6), Mismatch("logprob", 0, -1.5, -1.6, 9)),
        # The log-probability before a wrong token says more than the token.
        (_answer(tokens=(7, 3), runner_up=-1.6), Mismatch("logprob", 0, -1.5, -1.6, 9)),
        (Answer((7,), (-1.0,)), Mismatch("length", 1, 2, 1)),
        (Answer((7, 8, 9), (-1.0, -2.0, -3.0)), Mismatch("length", 2, 2, 3)),
    ],
)
def test_the_first_difference_is_reported(seen: Answer, expected: Mismatch) -> None:
    assert compare(_RIGHT, seen) == expected
    assert "expected" in str(expected)


def test_what_is_not_a_number_never_agrees() -> None:
    found = compare(_RIGHT, _answer(logprobs=(math.nan, -2.0)))
    assert found is not None
    assert found.position == 0


def test_a_runner_up_that_only_one_reports_is_no_difference() -> None:
    seen = Answer((7, 8), (-1.0, -2.0), ({7: -1.0, 4: -1.5}, {8: -2.0}))
    assert compare(_RIGHT, seen) is None


def test_wrong_tokens_are_infinitely_far() -> None:
    assert distance(_RIGHT, _answer(tokens=(7, 3))) == math.inf


def test_an_answer_has_a_logprob_for_every_token() -> None:
    with pytest.raises(ValueError, match="2 tokens came with 1"):
        Answer((1, 2), (-1.0,))


def test_prompts_are_the_same_for_the_same_seed() -> None:
    assert make_prompts([3, 50], seed=1) == make_prompts([3, 50], seed=1)
    assert make_prompts([3, 50], seed=1) != make_prompts([3, 50], seed=2)


def test_prompts_have_their_length_and_only_words() -> None:
    prompts = make_prompts([1, 2, 500], seed=3)
    assert [len(prompt) for prompt in prompts] == [1, 2, 500]
    assert {token for prompt in prompts for token in prompt} <= set(range(FIRST_WORD, TINY.vocab))


@pytest.mark.parametrize("count", [1, 7, 200])
def test_lengths_are_as_many_as_asked_and_in_range(count: int) -> None:
    lengths = spread_lengths(count, 4000, seed=2, edges=(32, 64))
    assert len(lengths) == count
    assert all(1 <= length <= 4000 for length in lengths)


def test_lengths_hold_both_ends_and_the_edges() -> None:
    lengths = spread_lengths(40, 4000, seed=2, edges=(32, 4000))
    assert {1, 31, 32, 33, 3999, 4000} <= set(lengths)
