"""What the router counts of real engines: mistakes of clients are theirs, and all else is ok."""

from __future__ import annotations

import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from pdconn.router.labels import Fault, RequestEnd
from pdconn.tools.lab.proxy import admin_url
from tests.vllm.engines.engines import PdPair

ONE_PAIR = pytest.mark.only(layout="BHLNC", prefix_caching=True)
_LINE = re.compile(r'pdconn_router_requests_total\{.*outcome="(\w+)".*\} ([\d.]+)')

MISTAKES: dict[str, tuple[dict[str, Any], type[openai.APIStatusError]]] = {
    "a wrong model": ({"model": "no-such-model"}, openai.NotFoundError),
    "a prompt that is too long": ({"text": "w1 " * 20_000}, openai.BadRequestError),
    "a temperature below 0": ({"temperature": -1.0}, openai.BadRequestError),
    "a field that is no number": ({"extra_body": {"top_k": "x"}}, openai.BadRequestError),
}


@pytest.fixture
def url(pair: PdPair) -> Iterator[str]:
    with pair.proxy() as made:
        yield made


def outcomes(url: str) -> Counter[RequestEnd]:
    with urllib.request.urlopen(f"{admin_url(url)}/metrics", timeout=10) as reply:
        found = _LINE.findall(reply.read().decode())
    counted: Counter[RequestEnd] = Counter()
    for outcome, number in found:
        counted[RequestEnd(outcome)] += int(float(number))
    return +counted


def settled(url: str, number: int) -> Counter[RequestEnd]:
    """The outcomes once ``number`` requests have one: a client has its answer a moment earlier."""
    give_up_s = time.monotonic() + 10
    while (found := outcomes(url)).total() < number and time.monotonic() < give_up_s:
        time.sleep(0.05)
    return found


def completion(client: openai.OpenAI, model: str, text: str, stream: bool, **more: Any) -> None:
    answer = client.completions.create(
        model=model, prompt=text, max_tokens=6, stream=stream, **more
    )
    assert not stream or list(answer)  # vLLM joins tokens that a busy client has not taken yet


def chat(client: openai.OpenAI, model: str, text: str, stream: bool, **more: Any) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=6,
        stream=stream,
        **more,
    )
    assert not stream or list(answer)  # vLLM joins tokens that a busy client has not taken yet


@ONE_PAIR
@pytest.mark.parametrize("ask", [completion, chat], ids=lambda ask: ask.__name__)
def test_what_the_openai_package_receives_is_ok_and_its_mistakes_are_its_own(
    pair: PdPair, url: str, ask: Callable[..., None]
) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for number in range(12):
            ask(client, pair.decode.model, f"w{number} w7 w8", stream=number % 3 > 0)
        assert settled(url, 12) == {RequestEnd.OK: 12}
        for wrong, error in MISTAKES.values():
            given = {"model": pair.decode.model, "text": "w1 w2", **wrong}
            for stream in (False, True):
                with pytest.raises(error):
                    ask(client, stream=stream, **given)
    found = settled(url, 12 + 2 * len(MISTAKES))
    assert found.pop(RequestEnd.OK) == 12
    assert found.total() == 2 * len(MISTAKES)
    assert {end.fault for end in found} == {Fault.CLIENT}
    assert RequestEnd.CLIENT_LEFT not in found
