"""Sessions through the router: kept, told, released, prefetched; and clients that ask too much."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pdconn.router.metric_table import PrefetchEnd
from pdconn.router.openai.requests import RANK_HEADER
from pdconn.router.routing.session_table import SessionTable
from tests.fakes.deployment import Deployment, Reply, deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import MODEL, FakeEngine, Seen
from tests.fakes.routed import ASKED, PROMPT, fleet, other_prompt
from tests.router.pulls.pulling import asked_for, held_by_decode, pulling

SESSION: dict[str, Any] = {"session_id": "agent", "keep": 60}


def telling(**kept: Any) -> Any:
    """A prefill engine that tells what it keeps."""

    async def script(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
        answer = await engine.answer(seen, http)
        if "keep" not in seen.ours or not isinstance(answer, web.Response):
            return answer
        assert isinstance(answer.body, bytes)
        body = json.loads(answer.body)
        params = body.get("kv_transfer_params") or {}
        params["pdconn"] = {**params.get("pdconn", {}), "kept": {"session": "agent", **kept}}
        return web.json_response({**body, "kv_transfer_params": params})

    return script


async def prefetch(made: Deployment, headers: Any = None, **body: Any) -> Reply:
    body = {"model": MODEL, "prompt": "hi", **body}
    url = made.url("/v1/kv/prefetch")
    async with made.client.post(url, json=body, headers=headers) as reply:
        return Reply(reply.status, reply.headers, await reply.read())


async def release(made: Deployment, **body: Any) -> Reply:
    async with made.client.post(made.url("/v1/kv/release"), json=body) as reply:
        return Reply(reply.status, reply.headers, await reply.read())


@in_loop
async def test_both_engines_are_asked_to_keep_and_get_none_of_the_routers_fields() -> None:
    async with deployment() as made:
        reply = await made.complete(**SESSION)
        assert reply.status == 200
        for engine in (*made.prefill, *made.decode):
            [seen] = engine.seen
            assert seen.ours["keep"] == {"session": "agent", "seconds": 60.0, "tenant": ""}
            assert seen.body["session_id"] == "agent", "vLLM's own field"
            assert "keep" not in seen.body
        assert made.decode[0].seen[0].params["do_remote_prefill"] is True
        assert not made.leases.held, "the ticket was used as without a session"


@in_loop
async def test_a_request_without_a_session_is_as_it_was() -> None:
    async with deployment() as made:
        await made.complete()
        for engine in (*made.prefill, *made.decode):
            assert "keep" not in engine.seen[0].ours


@in_loop
async def test_the_client_is_told_what_is_kept_and_that_a_promise_was_broken() -> None:
    async with deployment() as made:
        made.prefill[0].script = telling(tokens=320, used=True)
        reply = await made.complete(**SESSION)
        assert reply.headers["X-Session-Kept"] == "320"
        assert "X-Session-Broken" not in reply.headers
        made.prefill[0].script = telling(tokens=640, broken="room")
        reply = await made.complete(**SESSION, stream=True)
        assert (reply.headers["X-Session-Kept"], reply.headers["X-Session-Broken"]) == (
            "640",
            "room",
        )
        counts = {
            end: made.metric("promises_total", outcome=end) for end in ("made", "used", "broken")
        }
        assert counts == {"made": 2, "used": 1, "broken": 1}
        state = json.loads((await made.send("/debug/state", method="GET")).body)
        [shown] = state["sessions"]
        assert (shown["session"], shown["turns"], shown["kept_tokens"]) == ("agent", 2, 640)
        assert (state["num_sessions"], shown["broken"]) == (1, "room")
        assert set(shown["kept_at"]) == {made.prefill[0].url, made.decode[0].url}


def displacing(engine: FakeEngine, seen: Seen, http: web.Request) -> Any:
    """A prefill engine that reports the session to be broken, in answers to others."""
    asked_by = (seen.ours.get("keep") or {}).get("session")
    told = {"broken": [{"session": "agent", "tenant": "", "why": "share"}]}
    return reporting(told if asked_by != "agent" else {})(engine, seen, http)


def reporting(ours: dict[str, Any]) -> Any:
    """A prefill engine whose tickets have this beside what they have."""

    async def script(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
        answer = await engine.answer(seen, http)
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        body = json.loads(answer.body)
        params = body.get("kv_transfer_params") or {}
        params["pdconn"] = {**params.get("pdconn", {}), **ours}
        return web.json_response({**body, "kv_transfer_params": params})

    return script


async def told_elsewhere() -> tuple[list[str | None], float]:
    """What the turns of a session are told that is kept at the first engine, and broken there.

    The second and third one go to another engine; in between, the first has answered a stranger.
    Also the router's count.
    """
    async with deployment(num_prefill=2, policy="round-robin") as made:
        first = await made.complete(**SESSION)
        [keeper] = [engine for engine in made.prefill if engine.seen]
        [other] = [engine for engine in made.prefill if not engine.seen]
        await made.complete()
        keeper.script = displacing
        await made.complete()
        later = [await made.complete(**SESSION)]
        await made.complete()
        later.append(await made.complete(session_id="agent"))
        assert (len(keeper.seen), len(other.seen)) == (3, 3)
        broken = made.metric("promises_total", outcome="broken")
        return [one.headers.get("X-Session-Broken") for one in (first, *later)], broken


@in_loop
async def test_a_session_that_comes_back_elsewhere_is_told_what_the_first_engine_broke() -> None:
    assert await told_elsewhere() == ([None, "share", None], 1)


@in_loop
async def test_without_reports_in_answers_to_others_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control."""
    monkeypatch.setattr(SessionTable, "note_broken", lambda self, engine, reports: None)
    assert await told_elsewhere() == ([None, None, None], 0)


@in_loop
async def test_what_a_prefetch_is_told_reaches_the_next_answer() -> None:
    async with deployment() as made:
        await made.complete(**SESSION)
        made.prefill[0].script = telling(tokens=9, broken="room")
        await prefetch(made, **SESSION)
        await until(lambda: made.metric("prefetches_total", outcome="done"))
        made.prefill[0].script = None
        reply = await made.complete(session_id="agent")
        assert reply.headers["X-Session-Broken"] == "room"


@in_loop
async def test_a_strange_word_of_an_engine_makes_no_header_of_its_own() -> None:
    async with deployment() as made:
        made.prefill[0].script = telling(tokens=1, broken="a\r\nSet-Cookie: b")
        reply = await made.complete(**SESSION)
        assert reply.status == 200
        assert "Set-Cookie" not in reply.headers


@in_loop
async def test_an_engine_that_keeps_and_lends_nothing_has_given_no_ticket() -> None:
    async with deployment() as made:
        made.prefill[0].lends = False
        made.prefill[0].script = telling(tokens=320)
        reply = await made.complete(**SESSION)
        assert reply.status == 200
        assert made.decode[0].seen[0].params.get("do_remote_prefill") is None


@pytest.mark.parametrize(
    ("body", "named"),
    [({"keep": 9}, "session_id"), ({"session_id": "s", "keep": "long"}, "keep")],
)
@in_loop
async def test_a_bad_field_is_refused_by_name(body: dict[str, Any], named: str) -> None:
    async with deployment() as made:
        for reply in (await made.complete(**body), await prefetch(made, **body)):
            assert (reply.status, reply.error["param"]) == (400, named)
        assert not made.prefill[0].seen


@in_loop
async def test_a_session_goes_back_to_the_engine_that_keeps_it_where_caches_are_unknown() -> None:
    """Its prompts begin differently each time, so that nothing else leads there."""
    async with deployment(num_prefill=4, policy="prefix") as made:
        for engine in made.prefill:
            engine.script = telling(tokens=5000)
        await made.complete(**SESSION, prompt="0" * 20_000)
        [first] = [engine for engine in made.prefill if engine.seen]
        for number in range(1, 9):
            await made.complete(**SESSION, prompt=f"{number}" * 20_000)
        assert len(first.seen) == 9


@in_loop
async def test_without_a_name_such_prompts_are_spread() -> None:
    """Negative control."""
    async with deployment(num_prefill=4, policy="prefix") as made:
        for number in range(9):
            await made.complete(prompt=f"{number}" * 20_000)
        assert sum(bool(engine.seen) for engine in made.prefill) > 1


@in_loop
async def test_the_openai_package_passes_all_of_it() -> None:
    """As docs/router.md says."""
    openai = pytest.importorskip("openai")
    messages = [{"role": "user", "content": "hi"}]
    async with deployment() as made:
        made.prefill[0].script = telling(tokens=320)
        client = openai.AsyncOpenAI(base_url=made.url("/v1"), api_key="none", max_retries=0)
        body = {"model": MODEL, "messages": messages}
        raw = await client.chat.completions.with_raw_response.create(**body, extra_body=SESSION)
        assert raw.headers["X-Session-Kept"] == "320"
        told = await client.post(
            "/kv/prefetch", body={**body, "session_id": "agent"}, cast_to=object
        )
        assert told["action"] == "prefill"
        await until(lambda: made.metric("prefetches_total", outcome="done"))
        await client.chat.completions.create(
            **body, extra_body={"session_id": "agent", "release": True}
        )
        assert made.decode[0].seen[-1].ours["keep"]["seconds"] == 0
        await client.chat.completions.create(**body, extra_headers={
            "X-Session-ID": "agent", "X-Session-Keep": "60",
        })  # fmt: skip
        told = await client.post("/kv/release", body={"session_id": "agent"}, cast_to=object)
        assert told == {"engines": 2}
        await client.close()


# Release


@in_loop
async def test_a_release_reaches_the_engines_that_keep_the_session_and_no_others() -> None:
    async with deployment(num_prefill=2, num_decode=2) as made:
        await made.complete(**SESSION)
        keepers = [engine for engine in (*made.prefill, *made.decode) if engine.seen]
        reply = await release(made, session_id="agent", model=MODEL)
        assert (reply.status, json.loads(reply.body)) == (202, {"engines": 2})
        await until(lambda: all(len(engine.seen) == 2 for engine in keepers))
        for engine in keepers:
            seen = engine.seen[-1]
            assert seen.ours["keep"] == {"session": "agent", "seconds": 0.0, "tenant": ""}
            assert (seen.body["max_tokens"], seen.has_one_token) == (1, True)
        again = await release(made, session_id="agent")
        assert json.loads(again.body) == {"engines": 0}
        assert sum(len(engine.seen) for engine in (*made.prefill, *made.decode)) == 4


@in_loop
async def test_a_release_reaches_every_rank_of_an_engine() -> None:
    """A turn that named no rank was kept by any of them."""
    async with fleet(num_prefill=1, ranks=3, alone_below=0) as made:
        await made.ask(other_prompt(1), **SESSION)
        await release(made, session_id="agent", model=MODEL)
        (engine,) = made.prefill
        await until(lambda: len(engine.seen) == 4)
        named = [seen.headers.get(RANK_HEADER) for seen in engine.seen]
        assert named[0] is None
        assert set(named[1:]) == {"0", "1", "2"}
        await until(lambda: len(made.decode[0].seen) == 2)
        assert RANK_HEADER not in made.decode[0].seen[-1].headers


@in_loop
async def test_a_release_names_its_session() -> None:
    async with deployment() as made:
        reply = await release(made, model=MODEL)
        assert (reply.status, reply.error["param"]) == (400, "session_id")


# Prefetch


@in_loop
async def test_a_prefetch_is_a_request_of_one_token_that_lends_nothing() -> None:
    async with deployment() as made:
        reply = await prefetch(made, **SESSION, max_tokens=500, stream=True)
        told = json.loads(reply.body)
        assert (reply.status, told["action"], told["engine"]) == (
            202,
            "prefill",
            made.prefill[0].url,
        )
        await until(lambda: made.metric("prefetches_total", outcome="done"))
        [seen] = made.prefill[0].seen
        assert (seen.path, seen.body["max_tokens"], seen.body["stream"]) == (
            "/v1/completions",
            1,
            False,
        )
        assert seen.body["priority"] > 0
        assert not seen.params.get("do_remote_decode")
        assert seen.ours["keep"]["seconds"] == 60.0
        assert not made.decode[0].seen
        assert made.metric("prefetches_running") == 0


@in_loop
async def test_nothing_is_fetched_that_is_there_unless_it_is_to_be_kept() -> None:
    async with fleet() as made:
        await made.pod(made.prefill[0]).store(PROMPT)
        await made.events_applied()
        assert await planned(made, prompt=ASKED) == ("nothing", PrefetchEnd.HELD)
        assert await planned(made, prompt=ASKED, **SESSION) == ("prefill", PrefetchEnd.DONE)
        assert await planned(made, prompt=other_prompt(7)) == ("prefill", PrefetchEnd.DONE)


@in_loop
async def test_what_another_engine_holds_is_pulled_by_the_one_that_will_be_asked() -> None:
    async with pulling() as made:
        holder = await held_by_decode(made)
        assert await planned(made, prompt=ASKED) == ("pull", PrefetchEnd.DONE)
        assert len(asked_for(holder)) == 1
        [seen] = [seen for engine in made.prefill for seen in engine.seen]
        assert seen.source["remote_block_ids"] == [[1, 2], [0, 7]], "as the holder wrote it"
        assert not seen.params.get("do_remote_decode")


@in_loop
async def test_nothing_is_fetched_for_a_request_that_decode_will_serve_alone() -> None:
    async with fleet(alone_below=64) as made:
        await made.pod(made.decode[0]).store(PROMPT)
        await made.events_applied()
        assert await planned(made, prompt=[*PROMPT, *range(64)]) == ("nothing", PrefetchEnd.ALONE)
        assert not made.prefill[0].seen


async def planned(made: Any, **body: Any) -> tuple[str, PrefetchEnd]:
    """What a prefetch is answered, and how it has ended."""

    def ends() -> dict[PrefetchEnd, float]:
        return {one: made.metric("prefetches_total", outcome=one.value) for one in PrefetchEnd}

    before = ends()
    reply = await prefetch(made, **body)
    assert reply.status == 202
    await until(lambda: ends() != before)
    now = ends()
    [end] = [end for end in now if now[end] > before[end]]
    return json.loads(reply.body)["action"], end


@in_loop
async def test_a_prefetch_of_messages_is_a_chat() -> None:
    async with deployment() as made:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        async with made.client.post(made.url("/v1/kv/prefetch"), json=body) as reply:
            assert reply.status == 202
        await until(lambda: made.prefill[0].seen)
        assert made.prefill[0].seen[0].path == "/v1/chat/completions"


@in_loop
async def test_a_prefetch_waits_for_requests_that_are_there() -> None:
    async with deployment() as made:
        made.prefill[0].computes.clear()
        asked = asyncio.create_task(made.complete(prompt="a" * 4000))
        await until(lambda: made.prefill[0].seen)
        assert (await prefetch(made)).status == 202
        await asyncio.sleep(0.1)
        assert len(made.prefill[0].seen) == 1
        made.prefill[0].computes.set()
        assert (await asked).status == 200
        await until(lambda: made.metric("prefetches_total", outcome="done"))
        assert len(made.prefill[0].seen) == 2


@in_loop
async def test_a_prefetch_that_never_has_its_turn_is_given_up() -> None:
    async with deployment(prefetch_timeout_s=0.05) as made:
        made.prefill[0].computes.clear()
        asked = asyncio.create_task(made.complete(prompt="a" * 4000))
        await until(lambda: made.prefill[0].seen)
        await prefetch(made)
        await until(lambda: made.metric("prefetches_total", outcome="late"))
        made.prefill[0].computes.set()
        await asked
        assert len(made.prefill[0].seen) == 1


def hanging(engine: FakeEngine, seen: Seen, http: web.Request) -> Any:
    return asyncio.sleep(60)


@in_loop
async def test_a_client_that_prefetches_without_end_is_bounded_and_others_are_served(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("greedy\nmodest\n")
    keys.chmod(0o600)
    async with deployment(api_key_file=str(keys), max_prefetches=6) as made:
        made.prefill[0].script = hanging
        greedy = {"Authorization": "Bearer greedy"}
        replies = [await prefetch(made, greedy, prompt=f"{n}") for n in range(20)]
        statuses = [reply.status for reply in replies]
        assert (statuses.count(202), statuses.count(429)) == (4, 16)
        assert replies[-1].headers["Retry-After"] == "1"
        assert made.metric("prefetches_total", outcome="too_many") == 16
        modest = {"Authorization": "Bearer modest"}
        assert [(await prefetch(made, modest)).status for _ in range(3)] == [202, 202, 429]
        made.prefill[0].script = None
        url, body = made.url("/v1/completions"), {"model": MODEL, "prompt": "hi"}
        async with made.client.post(url, json=body, headers=modest) as reply:
            assert reply.status == 200


@in_loop
async def test_a_client_that_names_ten_thousand_sessions_is_served_and_bounded() -> None:
    async with deployment(max_sessions=50) as made:
        for number in range(120):
            reply = await made.complete(session_id=f"s{number}", keep=60)
            assert reply.status == 200
        assert made.metric("sessions") == 50


@in_loop
async def test_an_engine_that_fails_a_prefetch_costs_no_request() -> None:
    async with deployment(num_prefill=1) as made:
        await made.prefill[0].stop()
        reply = await prefetch(made)
        assert reply.status == 202
        await until(lambda: made.metric("prefetches_total", outcome="failed"))
        assert made.metric("prefetches_running") == 0
