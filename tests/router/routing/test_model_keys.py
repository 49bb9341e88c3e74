"""Whose key engines are asked with for their models: no client spoils or learns another's list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdconn.router.handover import listing
from pdconn.router.routing import models
from pdconn.router.routing import models as model_list
from tests.fakes.deployment import Deployment, Reply, deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER
from tests.router.routing.test_models import A, B, asked, listed, two_models

GOOD, OTHER, WRONG = "Bearer good", "Bearer other", "Bearer wrong"
ONE_PATH = "/v1/completions"


@asynccontextmanager
async def keyed(**settings: Any) -> AsyncIterator[Deployment]:
    """Two models; every engine asks for a key, of which there are two."""
    async with two_models(**settings) as d:
        for engine in (*d.prefill, *d.decode):
            engine.keys = {GOOD: None, OTHER: None}
        yield d


async def ask(
    d: Deployment, key: str | None, model: str | None = None, path: str = ONE_PATH
) -> Reply:
    headers = {} if key is None else {"Authorization": key}
    method = "GET" if model is None else "POST"
    body = None if model is None else json.dumps({"model": model, "prompt": "x"}).encode()
    if body is not None:
        headers["Content-Type"] = "application/json"
    async with d.client.request(method, d.url(path), data=body, headers=headers) as reply:
        return Reply(reply.status, reply.headers, await reply.read())


def keys_asked(d: Deployment) -> set[str | None]:
    return {key for engine in (*d.prefill, *d.decode) for key in engine.list_keys}


@pytest.mark.parametrize("wrong", [WRONG, None])
@in_loop
async def test_a_wrong_key_hides_no_model_from_a_right_one(wrong: str | None) -> None:
    """The first key used to decide for all, for as long as a failed round is remembered."""
    async with keyed() as d:
        await ask(d, wrong, A)
        await ask(d, wrong, "nobody's")
        before = asked(d)
        for number in range(4):
            assert (await ask(d, GOOD, A if number % 2 else B)).body == ANSWER
        new = [
            [n - o for n, o in zip(now, was, strict=True)]
            for now, was in zip(asked(d), before, strict=True)
        ]
        assert [(sum(side[:2]), sum(side[2:])) for side in new] == [(2, 2), (2, 2)]
        assert (await ask(d, GOOD, "nobody's")).status == 404


@in_loop
async def test_a_wrong_key_under_way_does_not_answer_for_a_right_one() -> None:
    async with keyed() as d:
        await ask(d, None, A)
        engines = (*d.prefill, *d.decode)
        for engine in engines:
            engine.lists.clear()
        waiting = asyncio.create_task(ask(d, WRONG, A))
        await until(lambda: WRONG in keys_asked(d))
        right = asyncio.create_task(ask(d, GOOD, "nobody's"))
        await until(lambda: GOOD in keys_asked(d))
        for engine in engines:
            engine.lists.set()
        assert (await right).status == 404, "it knows its own models"
        await waiting


@in_loop
async def test_what_an_engine_lists_to_one_key_is_no_other_clients() -> None:
    async with keyed() as d:
        for engine in d.decode[:2]:
            engine.keys = {
                GOOD: [*listed(A), {"id": "secret", "root": "/s", "parent": A}],
                OTHER: listed(A),
            }
        assert (await ask(d, GOOD, "secret")).body == ANSWER
        assert (await ask(d, OTHER, "secret")).status == 404
        assert (await ask(d, GOOD, "secret")).body == ANSWER, "a shorter list takes nothing away"
        reply = await d.send(ONE_PATH, b'{"prompt": "x"}')
        assert "model-a" not in reply.body.decode(), "without a key no names are shown"


@in_loop
async def test_engines_without_keys_are_asked_once_for_all_clients() -> None:
    async with two_models() as d:
        await ask(d, None, A)
        before = d.num_listed()
        for number in range(20):
            assert (await ask(d, f"Bearer {number}", B)).body == ANSWER
        assert d.num_listed() == before
        assert keys_asked(d) == {None}


@in_loop
async def test_many_wrong_keys_do_not_push_a_right_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MOST_KEYS", 4)
    async with keyed() as d:
        await ask(d, GOOD, A)
        for number in range(12):
            await ask(d, f"Bearer wrong {number}", A)
        catalog = d.proxy.router.tokeniser.models
        assert len(catalog._of_keys) == 4
        for engine in (*d.prefill, *d.decode):
            engine.list_keys.clear()
        assert (await ask(d, GOOD, A)).body == ANSWER
        assert GOOD not in keys_asked(d)


# The router's own key


def engine_key(folder: Path, text: str = "good\n", mode: int = 0o600) -> str:
    path = folder / "engine-key"
    path.touch(0o600)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


@in_loop
async def test_with_a_key_of_its_own_the_router_asks_with_that_alone(tmp_path: Path) -> None:
    async with keyed(engine_key_file=engine_key(tmp_path)) as d:
        for key in (WRONG, OTHER, None):
            assert (await ask(d, key, A)).body == ANSWER
        assert keys_asked(d) == {GOOD}
        seen = [one.headers.get("Authorization") for e in (*d.prefill, *d.decode) for one in e.seen]
        assert sorted(map(str, seen)) == sorted([WRONG, WRONG, OTHER, OTHER, "None", "None"])
        assert (await ask(d, WRONG, path="/v1/models")).status == 401, "its own key, of no worth"
        reply = await d.send(ONE_PATH, b'{"prompt": "x"}')
        assert "model-a" not in reply.body.decode()


@in_loop
async def test_behind_keys_of_clients_engines_get_the_routers(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.touch(0o600)
    clients.write_text("mine\n", encoding="utf-8")
    settings = {"api_key_file": str(clients), "engine_key_file": engine_key(tmp_path)}
    async with keyed(**settings) as d:
        assert (await ask(d, "Bearer mine", B)).body == ANSWER
        assert (await ask(d, "Bearer mine", path="/v1/models")).status == 200
        assert (await ask(d, GOOD, B)).status == 401, "the engines' key is no client's"
        seen = [one.headers["Authorization"] for e in (*d.prefill, *d.decode) for one in e.seen]
        assert set(seen) | keys_asked(d) == {GOOD}


@in_loop
async def test_the_routers_key_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_list, "MODELS_FOR_S", 0.0)
    path = engine_key(tmp_path, "old\n")
    async with keyed(engine_key_file=path) as d:
        await ask(d, GOOD, A)
        Path(path).write_text("good\n", encoding="utf-8")
        assert await d.proxy.reload() == ()
        await ask(d, GOOD, A)
        await until(lambda: keys_asked(d) == {"Bearer old", GOOD})
        Path(path).write_text("two\nkeys\n", encoding="utf-8")
        assert [one.field for one in await d.proxy.reload()] == ["--engine-key-file"]


# GET /v1/models


@in_loop
async def test_each_client_sees_what_its_own_key_shows() -> None:
    async with keyed() as d:
        assert (await ask(d, WRONG, path="/v1/models")).status == 401
        reply = await ask(d, GOOD, path="/v1/models")
        assert [card["id"] for card in json.loads(reply.body)["data"]] == [A, B]
        assert (await ask(d, None, path="/v1/models")).status == 401
        assert d.outcome("ok", "/v1/models") == 1
        assert d.outcome("client_error", "/v1/models") == 2


@in_loop
async def test_lists_that_are_asked_for_at_once_share_a_question_by_key() -> None:
    async with keyed() as d:
        engines = (*d.prefill, *d.decode)
        for engine in engines:
            engine.lists.clear()
        keys = [GOOD, WRONG] * 20
        waiting = [asyncio.create_task(ask(d, key, path="/v1/models")) for key in keys]
        await until(lambda: d.metric("inflight_requests") == 40)
        waiting[0].cancel()  # the first leaves; the others do not wait for nothing
        await asyncio.sleep(0.05)
        for engine in engines:
            engine.lists.set()
        replies = await asyncio.gather(*waiting[1:])
        assert [one.status for one in replies] == [401, *[200, 401] * 19]
        assert d.num_listed() == 2 * len(engines)
        assert len({one.headers["X-Request-Id"] for one in replies}) == 39


@in_loop
async def test_lists_count_among_requests_in_flight() -> None:
    async with keyed(max_requests=2) as d:
        for engine in (*d.prefill, *d.decode):
            engine.lists.clear()
        waiting = [asyncio.create_task(ask(d, key, path="/v1/models")) for key in (GOOD, OTHER)]
        await until(lambda: d.metric("inflight_requests") == 2)
        reply = await ask(d, GOOD, path="/v1/models")
        assert (reply.status, "Retry-After" in reply.headers) == (503, True)
        for engine in (*d.prefill, *d.decode):
            engine.lists.set()
        assert [one.status for one in await asyncio.gather(*waiting)] == [200, 200]
        assert (await ask(d, GOOD, path="/v1/models")).status == 200, "places were given back"


@in_loop
async def test_few_questions_to_all_engines_are_under_way_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listing, "MOST_QUESTIONS", 2)
    async with deployment() as d:
        d.decode[0].lists.clear()
        paths = [asyncio.create_task(ask(d, f"Bearer {n}", path="/v1/models")) for n in range(6)]
        await until(lambda: d.metric("inflight_requests") == 6)
        await until(lambda: d.decode[0].num_listed == 2)
        await asyncio.sleep(0.05)
        assert d.decode[0].num_listed == 2
        d.decode[0].lists.set()
        assert {one.status for one in await asyncio.gather(*paths)} == {200}
        assert d.decode[0].num_listed == 6


@in_loop
async def test_a_question_ends_when_all_that_wait_have_left() -> None:
    async with deployment() as d:
        d.decode[0].lists.clear()
        waiting = [asyncio.create_task(ask(d, GOOD, path="/v1/models")) for _ in range(2)]
        await until(lambda: d.metric("inflight_requests") == 2)
        for one in waiting:
            one.cancel()
        await until(lambda: d.metric("inflight_requests") == 0)
        d.decode[0].lists.set()
        assert (await ask(d, GOOD, path="/v1/models")).status == 200
        assert d.decode[0].num_listed == 2, "the first was given up, and this is another"
