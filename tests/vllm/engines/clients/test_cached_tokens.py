"""``cached_tokens`` of a prompt that was handed over is prefill's hit, on every route.

Prefill's own counter of cache hits says what is right: it is read before and after each request.
Decode's hits differ from them where they should, so that an answer with decode's number is noticed.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pdconn.tools.lab.lab_client import Client
from tests.vllm.engines.engines import BLOCK, PdPair

ONE_PAIR = pytest.mark.only(layout="BHLNC", prefix_caching=True)
LONG, SHORT = 330, 170
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True)
class Told:
    """What an answer says of its prompt, and what engines found in their caches."""

    prompt: int
    cached: int
    by_prefill: int
    by_decode: int


@pytest.fixture(scope="module")
def url(pair: PdPair) -> Iterator[str]:
    """One proxy for all, which loads the model's tokenizer in seconds; no two texts are alike."""
    with pair.proxy() as made:
        yield made


def body_of(route: str, text: str, stream: bool) -> dict[str, Any]:
    """A request for three tokens after ``text``."""
    message = [{"role": "user", "content": text}]
    made: dict[str, Any] = {"temperature": 0.0, "stream": stream}
    if route == "/v1/responses":
        return {**made, "input": text, "max_output_tokens": 3, "store": False}
    if stream and route != "/v1/messages":
        made["stream_options"] = {"include_usage": True}
    prompt = {"prompt": text} if route == "/v1/completions" else {"messages": message}
    return {**made, **prompt, "max_tokens": 3}


def usages(found: Any) -> Iterator[dict[str, Any]]:
    """Every ``usage`` in an answer or an event."""
    if isinstance(found, dict):
        if isinstance(found.get("usage"), dict):
            yield found["usage"]
        for value in found.values():
            yield from usages(value)


def usage_of(url: str, route: str, model: str, text: str, stream: bool) -> tuple[int, int]:
    """Tokens of the prompt and cached ones, as the last usage of the answer has them."""
    raw = json.dumps({"model": model, **body_of(route, text, stream)}).encode()
    request = urllib.request.Request(url + route, raw, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = reply.read().decode()
    lines = [line[5:].strip() for line in answer.splitlines() if line.startswith("data:")]
    parts = [json.loads(line) for line in lines if line != "[DONE]"] if stream else [answer]
    found = [one for part in parts for one in usages(part if stream else json.loads(part))]
    last = found[-1]
    if route == "/v1/messages":
        cached = last["cache_read_input_tokens"]
        return last["input_tokens"] + cached, cached
    kind = "input" if route == "/v1/responses" else "prompt"
    return last[f"{kind}_tokens"], last[f"{kind}_tokens_details"]["cached_tokens"]


def hits(client: Client) -> int:
    return int(client.metrics().get("vllm:prefix_cache_hits_total", 0))


def told(pair: PdPair, url: str, route: str, text: str, stream: bool) -> Told:
    before = hits(pair.prefill), hits(pair.decode)
    prompt, cached = usage_of(url, route, pair.decode.model, text, stream)
    return Told(prompt, cached, hits(pair.prefill) - before[0], hits(pair.decode) - before[1])


def words(number: int, count: int) -> str:
    return " ".join(f"w{(97 * number + step) % 1900}" for step in range(count))


@ONE_PAIR
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
def test_cached_tokens_are_those_of_prefill(
    pair: PdPair, url: str, route: str, stream: bool
) -> None:
    number = 2 * ROUTES.index(route) + stream + 3
    text = f"s{number} {words(number, LONG)}"

    cold = told(pair, url, route, text, stream)
    assert (cold.cached, cold.by_prefill) == (0, 0)
    assert cold.prompt > LONG

    warm = told(pair, url, route, text, stream)
    assert warm.cached == warm.by_prefill > 0
    assert warm.cached >= cold.prompt - 1 - BLOCK

    # Decode holds all of it and prefill nothing: the answer says nothing is cached.
    assert pair.prefill.post_json("/reset_prefix_cache", {}) is not None
    held_by_decode = told(pair, url, route, text, stream)
    assert (held_by_decode.cached, held_by_decode.by_prefill) == (0, 0)
    assert held_by_decode.by_decode > 0, "control: its own number is another one"

    # Prefill holds a part: what was asked for in full a moment ago goes on otherwise.
    other = f"{text} {words(number + 40, SHORT)}"
    partly = told(pair, url, route, other, stream)
    assert partly.cached == partly.by_prefill
    assert partly.cached < partly.prompt
    if route == "/v1/completions":  # a chat's template ends after the text, too
        assert partly.cached > 0
