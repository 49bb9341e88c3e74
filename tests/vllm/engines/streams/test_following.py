"""Both engines asked at once: decode follows prefill's request while it is computed."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from pdconn.protocol.early import EarlyTicket
from pdconn.router.openai.bodies import lend_params
from pdconn.tools.lab.compare_answers import compare
from pdconn.tools.lab.lab_client import Client, ask_both, prefill_only
from pdconn.tools.lab.lab_errors import RequestRefused
from pdconn.tools.lab.proxy import running_proxy
from tests.vllm.engines.engines import (
    BLOCK,
    MAX_TOKENS,
    Expected,
    PdPair,
    Prompt,
    all_at_once,
    one_after_another,
)

FEW = pytest.mark.only(layout="BHLNC", prefix_caching=True)


@pytest.fixture
def like(pair: PdPair) -> Mapping[str, Any]:
    """A ticket of prefill, which says where it lends; used up."""
    prompt = tuple(range(50, 120))
    ticket = prefill_only(pair.prefill, prompt)
    assert ticket is not None
    pair.decode.complete(prompt, 1, kv_transfer_params=ticket)
    return ticket


@FEW
def test_prompts_of_every_length_are_answered_right(
    pair: PdPair, expected: Expected, like: Mapping[str, Any]
) -> None:
    check_lengths(pair, expected, like, one_after_another(every=40))


@pytest.mark.matrix
def test_more_prompts_are_answered_right(
    pair: PdPair, expected: Expected, like: Mapping[str, Any]
) -> None:
    check_lengths(pair, expected, like, one_after_another(every=12))


def check_lengths(
    pair: PdPair, expected: Expected, like: Mapping[str, Any], prompts: Sequence[Prompt]
) -> None:
    """Ask both engines for each prompt, one of them a little later in two cases of three."""
    before = pair.decode.metrics()["pdconn:pulls_followed_total"]
    answers = {}
    for number, prompt in enumerate(prompts):
        head_start_s = (0.0, 0.05, -0.05)[number % 3]
        answer, _ = ask_both(
            pair.prefill, pair.decode, prompt, MAX_TOKENS, like=like, head_start_s=head_start_s
        )
        answers[prompt] = answer
    assert not expected.mismatches(answers)
    followed = pair.decode.metrics()["pdconn:pulls_followed_total"] - before
    assert followed >= len(prompts) // 2, "the others are cached, or have a single token"


@pytest.mark.matrix
def test_many_at_once_are_answered_right(
    pair: PdPair, expected: Expected, like: Mapping[str, Any]
) -> None:
    def ask(prompt: Prompt) -> tuple[Prompt, Any]:
        return prompt, ask_both(pair.prefill, pair.decode, prompt, MAX_TOKENS, like=like)[0]

    with ThreadPoolExecutor(8) as pool:
        answers = dict(pool.map(ask, all_at_once()))
    assert not expected.mismatches(answers)


@FEW
def test_a_stream_of_another_prompt_is_not_read(
    pair: PdPair, expected: Expected, like: Mapping[str, Any]
) -> None:
    """Decode compares the prompts' digests, and computes its own."""
    theirs, ours = (tuple(range(first, first + 8 * BLOCK)) for first in (300, 700))
    early = EarlyTicket.like(like, secrets.token_hex(16))
    lend = {**lend_params(), "pdconn": {"stream": early.stream}}
    with ThreadPoolExecutor(1) as other:
        prefilled = other.submit(pair.prefill.complete, theirs, 1, kv_transfer_params=lend)
        answer = pair.decode.complete(ours, MAX_TOKENS, kv_transfer_params=early.to_params())
        ticket = prefilled.result().kv_transfer_params
    assert compare(expected[ours], answer) is None
    assert pair.has_logged("it is for another prompt")
    # The lease ends here, unless it has ended with its reader, which may leave after prefill is
    # done: as whoever has a ticket may end its lease, so may whoever knows the stream.
    with suppress(RequestRefused):
        pair.decode.complete(theirs, 1, kv_transfer_params=ticket)


@pytest.mark.matrix
@FEW
def test_the_router_asks_both_at_once(pair: PdPair, expected: Expected) -> None:
    prompts = one_after_another(every=40)[-12:]
    followed = "pdconn:pulls_followed_total"
    before = pair.decode.metrics()[followed]
    directory, urls = pair.decode_engine.log.parent, (pair.prefill.url, pair.decode.url)
    with running_proxy([urls[0]], [urls[1]], directory, args=["--streams", "on"]) as url:
        client = Client(url)
        answers = {prompt: client.complete(prompt, MAX_TOKENS) for prompt in prompts}
        with ThreadPoolExecutor(6) as pool:
            again = all_at_once()
            done = pool.map(lambda prompt: client.complete(prompt, MAX_TOKENS), again)
            answers |= dict(zip(again, done, strict=True))
    assert not expected.mismatches(answers)
    assert pair.decode.metrics()[followed] - before >= len(prompts) // 3
