"""Engines that stop or are paused beside others: no client of the router gets an empty answer.

vLLM answers what it does not compute any more with status 200.  The router's fakes do the same
(``tests/router/openai/aborted.py``), and are compared with it here.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from multidict import CIMultiDict

from pdconn.router.openai.event_stream import DONE, event_data
from pdconn.router.openai.first_output import FirstOutput, OutputSearch
from pdconn.router.openai.requests import Route
from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.proxy import running_proxy
from pdconn.tools.lab.spec import SERVED_NAME
from tests.forked.engines import running
from tests.router.openai.aborted import BODIES, EVENTS
from tests.vllm.engines.engines import (
    LEASE_S,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    Configuration,
    Expected,
    cache_beside,
    engine,
)

WAIT_S = 60.0
KINDS = list(product(Route, (False, True)))
"""Each route, without a stream and with one."""


@dataclass
class Fleet:
    """One prefill engine, and two decode engines of which one stops."""

    prefill: Engine
    decode: Engine
    stopping: Engine
    proxy: str


@pytest.fixture(scope="module")
def fleet(model: Path, work: Path, expected: Expected) -> Iterator[Fleet]:
    del expected  # its engine starts first
    configuration = Configuration("LBHNC", False, one_process=True, policy="recompute")
    specs = [
        engine("lends", model, configuration, "kv_producer", 0),
        engine("stays", model, configuration, "kv_consumer", 0),
        engine("stops", model, configuration, "kv_consumer", 0),
    ]
    args = ("--policy", "round-robin")
    with running(specs, work / "stopping", cache=cache_beside(model)) as engines:
        urls = [one.url for one in engines]
        with running_proxy(urls[:1], urls[1:], work / "stopping", args=args) as proxy:
            yield Fleet(*engines, proxy)


@dataclass(frozen=True)
class Got:
    """An answer as it came: pieces as the socket had them."""

    status: int
    headers: CIMultiDict[str]
    pieces: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


def body_of(route: Route, *, stream: bool, words: str = "w5 w6 w7") -> dict[str, Any]:
    prompt: Any = words
    if route in (Route.CHAT, Route.MESSAGES):
        prompt = [{"role": "user", "content": words}]
    bound = "max_output_tokens" if route is Route.RESPONSES else "max_tokens"
    return {"model": SERVED_NAME, route.prompt: prompt, bound: 6, "temperature": 0,
            "stream": stream}  # fmt: skip


def ask(url: str, route: Route, *, stream: bool) -> Got:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=WAIT_S)
    try:
        body = json.dumps(body_of(route, stream=stream))
        connection.request("POST", route.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        pieces = list(iter(lambda: response.read1(1 << 16), b""))
        return Got(response.status, CIMultiDict(response.getheaders()), pieces)
    finally:
        connection.close()


@contextmanager
def paused(one: Engine) -> Iterator[None]:
    """What comes to an engine waits there; at the end it is aborted, and the engine goes on."""
    client = Client(one.url)
    client.post_json("/pause?mode=keep", {})
    try:
        yield
    finally:
        client.post_json("/pause?mode=abort", {})
        client.post_json("/resume", {})


def await_done(asked: Sequence[Future[Got]], count: int) -> None:
    """Until so many have their answers; the others wait then."""
    give_up = time.monotonic() + WAIT_S
    while (done := sum(one.done() for one in asked)) < count:
        assert time.monotonic() < give_up, f"{done} of {count} are answered"
        time.sleep(0.05)
    time.sleep(0.5)
    assert sum(one.done() for one in asked) == count


def await_freed(prefill: Engine, within_s: float) -> None:
    """Until nothing is lent: an engine that drains has not told the lender of what it rejects."""
    client, give_up = Client(prefill.url), time.monotonic() + within_s
    used = 1.0
    while used:
        assert time.monotonic() < give_up, f"{used:.3f} of its blocks are still lent"
        client.complete((5, 6, 7), 1)  # the figure is of the last step
        used = client.metrics()["vllm:kv_cache_usage_perc"]
        time.sleep(0.2)


def shape(value: Any, like: Any) -> Any:
    """As much of ``value`` as ``like`` has; of a number that is not 0, that it is one."""
    if isinstance(like, dict) and isinstance(value, dict):
        return {name: shape(value.get(name), like[name]) for name in like}
    if isinstance(like, list) and isinstance(value, list) and len(value) == len(like):
        return [shape(*both) for both in zip(value, like, strict=True)]
    return type(like)() if isinstance(like, int) and isinstance(value, int) and like else value


def events_in(body: bytes) -> list[dict[str, Any]]:
    found = [event_data(line) for line in body.split(b"\n")]
    return [json.loads(data) for data in found if data not in (None, DONE)]


def test_the_fakes_say_what_vllm_says_to_a_request_that_it_ends(fleet: Fleet) -> None:
    with ThreadPoolExecutor(len(KINDS)) as pool:
        with paused(fleet.stopping):
            asked = [pool.submit(ask, fleet.stopping.url, r, stream=s) for r, s in KINDS]
            time.sleep(1.0)
            assert not any(one.done() for one in asked)
        answers = [one.result(WAIT_S) for one in asked]
    for (route, stream), got in zip(KINDS, answers, strict=True):
        assert got.status == 200
        if stream:
            like: Any = EVENTS[route]
            said: Any = events_in(got.body)
            assert (b"data: [DONE]" in got.body) == (route in (Route.COMPLETIONS, Route.CHAT))
        else:
            like, said = BODIES[route], json.loads(got.body)
        assert shape(said, like) == shape(like, like), (route, stream)
        search, found = OutputSearch(got.headers), FirstOutput.NOT_YET
        for number in range(len(got.body)):
            is_whole = number == len(got.body) - 1
            found = search.read(got.body[number : number + 1], is_whole=is_whole)
            if found is not FirstOutput.NOT_YET:
                break
        assert found is FirstOutput.ABORTED, (route, stream)


def test_those_that_wait_at_an_engine_that_aborts_them_are_answered_by_another(
    fleet: Fleet,
) -> None:
    """In every form; the texts are those of an engine that is not paused."""
    right = [ask(fleet.decode.url, route, stream=stream) for route, stream in KINDS]
    with ThreadPoolExecutor(2 * len(KINDS)) as pool:
        with paused(fleet.stopping):
            asked: list[Future[Got]] = []
            for route, stream in KINDS:
                # In turns: one of two goes to the engine that is paused.
                asked += [pool.submit(ask, fleet.proxy, route, stream=stream) for _ in range(2)]
            await_done(asked, len(KINDS))
        answers = [one.result(WAIT_S) for one in asked]
    for number, got in enumerate(answers):
        route, stream = KINDS[number // 2]
        assert got.status == 200
        whole = right[number // 2]
        assert len(words_in(whole.body)) > 0
        assert words_in(got.body) == words_in(whole.body), (route, stream)


def words_in(body: bytes) -> list[str]:
    """The words that the model said, of any form of answer."""
    found: list[str] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            for name, one in value.items():
                if name in ("text", "content", "delta") and isinstance(one, str):
                    found.extend(one.split())
                look(one)
        elif isinstance(value, list):
            for one in value:
                look(one)

    for event in events_in(body) or [json.loads(body)]:
        look(event)
    return found


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_an_engine_that_drains_beside_others_costs_no_request(
    fleet: Fleet, expected: Expected, role: str
) -> None:
    """SIGTERM, with ``--shutdown-timeout``, before the router has been told."""
    stopping = fleet.stopping if role == "decode" else fleet.prefill
    prompts = make_prompts([3, 11, 40, 108, 300] * 4, seed=71 if role == "decode" else 72)
    long = make_prompts([20], seed=73)[0]
    with ThreadPoolExecutor(4) as pool:
        held = pool.submit(Client(stopping.url).complete, long, MAX_MODEL_LEN - 30)
        time.sleep(0.5)
        stopping.ask_to_stop()
        time.sleep(0.5)
        # It serves nothing new, and says so with an empty answer.
        assert not Client(stopping.url).complete(long, 2).tokens
        client = Client(fleet.proxy)
        asked = [(one, pool.submit(client.complete, one, MAX_TOKENS)) for one in prompts]
        streamed = [(one, pool.submit(client.stream, one, MAX_TOKENS)) for one in prompts]
        seen = {prompt: answer.result(WAIT_S) for prompt, answer in asked}
        also = {prompt: timed.result(WAIT_S).answer for prompt, timed in streamed}
        assert not held.done(), "it has stopped before all were asked"
        stopping.kill_command()
        assert held.exception(WAIT_S) is not None
    assert expected.mismatches(seen) == []
    assert expected.mismatches(also) == []
    if role == "decode":
        await_freed(fleet.prefill, LEASE_S / 2)
