"""Pages of other origins: which may send requests, and the headers of the answers."""

from __future__ import annotations

import pytest
from aiohttp import web

from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop
from tests.fakes.fake_engine import error

MINE, OTHER = "https://chat.example", "https://evil.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
PATH = "/v1/chat/completions"
BODY = {"model": "m", "messages": []}


def cors(headers) -> dict[str, str]:
    named = ((name.lower(), value) for name, value in headers.items())
    return {
        name.removeprefix("access-control-"): value
        for name, value in named
        if name.startswith("access-control-")
    }


async def ask(d, method: str, path: str = PATH, **headers: str) -> tuple[int, dict[str, str], str]:
    json = BODY if method == "POST" else None
    async with d.client.request(method, d.url(path), headers=headers, json=json) as reply:
        return reply.status, cors(reply.headers), reply.headers.get("Vary", "")


@in_loop
async def test_a_page_of_a_named_origin_may_ask_and_read() -> None:
    async with deployment(cors_origins=(MINE,)) as d:
        status, allowed, vary = await ask(d, "OPTIONS", Origin=MINE, **PREFLIGHT)
        assert (status, vary) == (204, "Origin")
        assert allowed["allow-origin"] == MINE
        assert allowed["allow-methods"] == "GET, POST"
        assert allowed["allow-headers"] == "authorization,content-type"
        status, allowed, vary = await ask(d, "POST", Origin=MINE)
        assert (status, allowed["allow-origin"], vary) == (200, MINE, "Origin")
        assert "X-Request-Id" in allowed["expose-headers"]
        assert "allow-credentials" not in allowed


@in_loop
async def test_a_page_of_another_origin_is_told_nothing() -> None:
    async with deployment(cors_origins=(MINE,)) as d:
        for origin in (OTHER, "https://chat.example.evil", "http://chat.example", "null"):
            status, allowed, _ = await ask(d, "OPTIONS", Origin=origin, **PREFLIGHT)
            assert (status, allowed) == (204, {})
            assert (await ask(d, "POST", Origin=origin))[1] == {}


@in_loop
async def test_any_origin_may_where_all_are_named() -> None:
    async with deployment(cors_origins=("*",)) as d:
        assert (await ask(d, "OPTIONS", Origin=OTHER, **PREFLIGHT))[1]["allow-origin"] == "*"
        _, allowed, vary = await ask(d, "POST", Origin=OTHER)
        assert (allowed["allow-origin"], vary) == ("*", "")


@in_loop
async def test_errors_can_be_read_too_and_preflights_need_no_key(tmp_path) -> None:
    """Else a page sees "failed to fetch" where its user should see what is wrong."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n", encoding="utf-8")
    keys.chmod(0o600)
    async with deployment(cors_origins=(MINE,), api_key_file=str(keys)) as d:
        assert (await ask(d, "OPTIONS", Origin=MINE, **PREFLIGHT))[0] == 204
        status, allowed, _ = await ask(d, "POST", Origin=MINE)
        assert (status, allowed["allow-origin"]) == (401, MINE)
        status, allowed, _ = await ask(d, "GET", "/no", Origin=MINE, Authorization="Bearer secret")
        assert (status, allowed["allow-origin"]) == (404, MINE)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_what_an_engine_allows_counts_for_nothing(stream: bool) -> None:
    async def lenient(engine, seen, http):
        headers = {"Access-Control-Allow-Origin": "*", "access-control-allow-credentials": "true"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(http)
        await response.write(b"x")
        if stream:
            await response.write(b"y")
        await response.write_eof()
        return response

    async with deployment(cors_origins=(MINE,)) as d:
        d.decode[0].script = lenient
        assert (await ask(d, "POST", Origin=OTHER))[1] == {}
        allowed = (await ask(d, "POST", Origin=MINE))[1]
        assert (allowed["allow-origin"], "allow-credentials" in allowed) == (MINE, False)


@in_loop
async def test_header_names_are_not_repeated_unchecked() -> None:
    async with deployment(cors_origins=(MINE,)) as d:
        odd = {**PREFLIGHT, "Access-Control-Request-Headers": "a; b=<script>"}
        assert "allow-headers" not in (await ask(d, "OPTIONS", Origin=MINE, **odd))[1]


@in_loop
async def test_without_the_option_nothing_is_added() -> None:
    async with deployment() as d:
        status, allowed, _ = await ask(d, "OPTIONS", Origin=MINE, **PREFLIGHT)
        assert (status, allowed) == (405, {})
        d.decode[0].script = lambda engine, seen, http: refuse()
        assert (await ask(d, "POST", Origin=MINE))[1] == {}


async def refuse() -> web.Response:
    return error(400, "no")
