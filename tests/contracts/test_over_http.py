"""Recorded requests over real HTTP: a router that is nothing but its record."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.contracts.engines import CHAT, COMPLETIONS, claim, engines
from tests.contracts.over_http import TEXT, EngineServer, serving
from tests.contracts.recorded import MODES, ROUTERS, Mode, request_id

CLIENT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "What does a router send?"}],
    "max_completion_tokens": 32,
}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[EngineServer, EngineServer]]:
    with engines() as (prefill, decode), serving(prefill) as at_p, serving(decode) as at_d:
        yield at_p, at_d


def post(url: str, body: dict[str, Any], name: str = "") -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"X-Request-Id": name} if name else {})
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", [one for one in MODES if one.outcome != "refused"], ids=str)
def test_recorded_requests_hand_a_prompt_over(
    servers: tuple[EngineServer, EngineServer], mode: Mode
) -> None:
    prefill, decode = servers
    router = ROUTERS[mode.router]
    name = request_id(router, prefill.url, f"{decode.url}/{mode.name}")
    name = name if router["request_id_header"] else ""
    answer = post(prefill.url + CHAT, mode.prefill_body(CLIENT), name)
    overwrites = "$prefill_host" in mode.decode["sets"].values()
    host = "localhost" if overwrites else "127.0.0.1"
    said = post(decode.url + CHAT, mode.decode_body(CLIENT, answer, host), name)
    assert said["choices"][0]["message"]["content"] == TEXT
    found = decode.engine.decoded[-1]
    if mode.outcome == "computed by decode":
        assert found.commands == []
        return
    assert found.ticket.host == host
    if name:
        assert found.ticket.request_id == name
    claim(found.ticket)


def test_what_vllm_refuses_is_a_bad_request(servers: tuple[EngineServer, EngineServer]) -> None:
    """Control of the engines: they do not take everything."""
    body = {"model": "m", "prompt": "p", "max_tokens": 1, "min_tokens": 8}
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(servers[0].url + COMPLETIONS, body)
    assert refused.value.code == 400
    refused.value.close()
