"""A prompt longer than its model's length is refused before it is hashed, as engines refuse it."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import Any

import pytest
from multidict import CIMultiDict

from pdconn.router.events.caches import PrefixCaches, PrefixLookup
from pdconn.router.openai.requests import Route, parse_body
from pdconn.router.routing.routed_request import RoutedRequest
from pdconn.router.routing.tokenize import CHARS_A_TOKEN, CHAT_NBYTES_A_TOKEN
from tests.fakes.event_loop import in_loop
from tests.fakes.fake_engine import ANSWER
from tests.fakes.routed import PROMPT, Fleet, fleet, letters, num_asked

TRIES = 3


def listed(max_tokens: int | None) -> list[dict[str, Any]]:
    length = {} if max_tokens is None else {"max_model_len": max_tokens}
    return [{"id": "m", "root": "/m", "parent": None, **length}]


async def ready(f: Fleet, max_tokens: int | None = 1000) -> None:
    """The router has something to look prompts up in, and engines report their length."""
    for engine in (*f.prefill, *f.decode):
        engine.models = listed(max_tokens)
        engine.tokenize = letters
    await f.pod(f.prefill[0]).store(PROMPT)
    await f.events_applied()


def num_generated(f: Fleet) -> int:
    return sum(num_asked([*f.prefill, *f.decode]))


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ([5] * 1001, "1001 tokens"),
        ([[5] * 1001], "1001 tokens"),
        ([5] * 2_000_000, "2000000 tokens"),
        ("x" * (1000 * CHARS_A_TOKEN + 1), "512001 characters"),
        ("é" * (1000 * CHARS_A_TOKEN + 1), "512001 characters"),
        ("x" * 1001, "1001 tokens"),  # by what /tokenize answers
    ],
    ids=["ids", "one list of ids", "millions", "text", "escaped text", "tokenized"],
)
@in_loop
async def test_a_prompt_longer_than_the_model_is_refused_and_no_engine_is_asked(
    prompt: Any, seen: str
) -> None:
    async with fleet() as f:
        await ready(f)
        body = io.BytesIO(json.dumps({"model": "m", "prompt": prompt}).encode())
        reply = await f.send("/v1/completions", body)
        assert (reply.status, reply.error["type"]) == (400, "BadRequestError")
        assert reply.error["param"] == "prompt"
        assert seen in reply.error["message"]
        assert "the model's length is 1000 tokens" in reply.error["message"]
        assert (num_generated(f), len(f.router.decisions)) == (0, 0)
        assert f.outcome("refused") == 1


@pytest.mark.parametrize("blanks", [0, 200])
@in_loop
async def test_a_list_is_counted_before_it_is_parsed_whatever_blanks_it_begins_with(
    blanks: int,
) -> None:
    """These numbers are no token ids, which only a parser would notice."""
    async with fleet() as f:
        await ready(f)
        numbers = "[" + " " * blanks + ",".join(["1.5"] * 1001) + "]"
        reply = await f.send("/v1/completions", '{"model": "m", "prompt": ' + numbers + "}")
        assert (reply.status, "1001 tokens" in reply.error["message"]) == (400, True)


@pytest.mark.parametrize("prompt", [[5] * 1000, "é" * 1000])
@in_loop
async def test_a_prompt_as_long_as_the_model_is_the_engines_to_judge(prompt: Any) -> None:
    """The control, and the bound is exact."""
    async with fleet() as f:
        await ready(f)
        routed = await f.ask(prompt)
        assert (routed.unknown, routed.decision.num_tokens) == (None, 1000)


@in_loop
async def test_engines_that_do_not_tell_their_length_bound_nothing() -> None:
    async with fleet() as f:
        await ready(f, None)
        assert (await f.ask([5] * 3000)).unknown is None


@in_loop
async def test_the_longest_of_several_engines_counts_and_an_adapter_is_as_long_as_its_model() -> (
    None
):
    async with fleet() as f:
        await ready(f)
        adapter = {"id": "ada", "root": "/lora/ada", "parent": "m"}
        for engine in (*f.prefill, *f.decode):
            engine.models = [*(engine.models or listed(1)), adapter]
        f.prefill[1].models = [*listed(2000), adapter]
        assert (await f.ask([5] * 2000)).unknown is None
        for model in ("m", "ada", None):
            fields = {} if model is None else {"model": model}
            reply = await f.send("/v1/completions", json.dumps({"prompt": [5] * 2001, **fields}))
            assert (reply.status, "2001 tokens" in reply.error["message"]) == (400, True), model
        # Of a model that no engine lists nothing is known: they refuse it by its name.
        assert (await f.complete(model="other", prompt=[5] * 2001)).body == ANSWER


@in_loop
async def test_a_prompt_that_the_engine_truncates_is_not_refused() -> None:
    async with fleet() as f:
        await ready(f)
        routed = await f.ask([5] * 1500, truncate_prompt_tokens=100)
        assert "truncates" in (routed.unknown or "")


@in_loop
async def test_several_prompts_have_a_length_each() -> None:
    async with fleet() as f:
        await ready(f)
        routed = await f.ask([[5] * 900, [6] * 900])
        assert "several prompts" in (routed.unknown or "")


@in_loop
async def test_a_chat_that_cannot_fit_is_neither_parsed_nor_tokenized() -> None:
    async with fleet() as f:
        await ready(f)
        routed = await f.chat("x" * (1000 * CHAT_NBYTES_A_TOKEN))
        assert f"more than {1000 * CHAT_NBYTES_A_TOKEN} bytes" in (routed.unknown or "")
        assert not any(engine.tokenized for engine in (*f.prefill, *f.decode))
        assert (await f.chat("x" * 500)).unknown is None


async def longest_gap(until: asyncio.Task[Any]) -> float:
    """Seconds for which the event loop did nothing else, at most, until a task is done."""
    longest, last = 0.0, time.perf_counter()
    while not until.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


async def gap_share(f: Fleet, first: int) -> float:
    """The longest gap while a long prompt is routed, as a share of the time that this takes."""
    prompt = list(range(first, first + 800_000))
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    request = RoutedRequest(f"r{first}", CIMultiDict(), parse_body(Route.COMPLETIONS, body))
    deciding = asyncio.create_task(f.router.decide(request))
    gap_s = await longest_gap(deciding)
    decision = await deciding
    assert decision.unknown is None
    assert decision.num_hashes == 50_000
    return gap_s / decision.took_s


@pytest.mark.parametrize("in_turns", [True, False])
@in_loop
async def test_hashing_a_long_prompt_does_not_stop_the_event_loop(
    in_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every other request waits until a prompt of a million tokens is hashed.

    A busy machine stops the loop, too: the best of up to three counts.  The control hashes in one
    go.
    """

    async def in_one_go(caches: PrefixCaches, *asked: Any) -> PrefixLookup:
        return caches.lookup(*asked)

    if not in_turns:
        monkeypatch.setattr(PrefixCaches, "lookup_in_turns", in_one_go)
    async with fleet() as f:
        await ready(f, None)
        shares: list[float] = []
        while len(shares) < TRIES and not any(share < 0.5 for share in shares):
            shares.append(await gap_share(f, len(shares)))  # each is another prompt
        assert (min(shares) < 0.5) is in_turns, shares
