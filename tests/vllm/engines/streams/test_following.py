"""Both engines asked at once: decode follows prefill's request while it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pdconn.tools.lab.compare_answers import compare
from pdconn.tools.lab.lab_client import ask_both, prefill_only
from tests.vllm.engines.engines import (
    MAX_TOKENS,
    Expected,
    PdPair,
    Prompt,
    all_at_once,
    one_after_another,
)


@pytest.fixture
def like(pair: PdPair) -> Mapping[str, Any]:
    """A ticket of prefill, which says where it lends; used up."""
    prompt = tuple(range(50, 120))
    ticket = prefill_only(pair.prefill, prompt)
    assert ticket is not None
    pair.decode.complete(prompt, 1, kv_transfer_params=ticket)
    return ticket


def test_prompts_of_every_length_are_answered_right(
    pair: PdPair, expected: Expected, like: Mapping[str, Any]
) -> None:
    before = pair.decode.metrics()["pdconn:pulls_total"]
    answers = {}
    prompts = one_after_another(every=12)
    for number, prompt in enumerate(prompts):
        head_start_s = (0.0, 0.05, -0.05)[number % 3]
        answer, _ = ask_both(
            pair.prefill, pair.decode, prompt, MAX_TOKENS, like=like, head_start_s=head_start_s
        )
        answers[prompt] = answer
    assert not expected.mismatches(answers)
    assert pair.decode.metrics()["pdconn:pulls_total"] - before >= len(prompts) // 2


def test_many_at_once_are_answered_right(
    pair: PdPair, expected: Expected, like: Mapping[str, Any]
) -> None:
    def ask(prompt: Prompt) -> tuple[Prompt, Any]:
        return prompt, ask_both(pair.prefill, pair.decode, prompt, MAX_TOKENS, like=like)[0]

    with ThreadPoolExecutor(8) as pool:
        answers = dict(pool.map(ask, all_at_once()))
    assert not expected.mismatches(answers)


def test_another_prompt_than_that_of_the_stream_is_computed(
    pair: PdPair, expected: Expected, like: Mapping[str, Any]
) -> None:
    del like
    assert compare(expected[(5, 6, 7)], pair.decode.complete((5, 6, 7), MAX_TOKENS)) is None
