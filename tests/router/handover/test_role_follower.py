"""Roles that follow the load, in a router over fake engines."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.member import Member, Role
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import BadSetting
from pdconn.router.router_server import Running, running_proxy
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import MODEL, FakeEngine, Leases, Seen

A, B, C = "http://a:1", "http://b:1", "http://c:1"
PERIOD_S = 0.5


def registry(*engines: str, also: tuple[Member, ...] = ()) -> EngineRegistry:
    both = (Member(name, frozenset(Role)) for name in engines)
    return EngineRegistry.from_members((*both, *also))


def test_an_engine_gets_requests_of_the_role_that_it_serves() -> None:
    engines = registry(A, B, C)
    assert engines.live(Role.PREFILL) == engines.live(Role.DECODE) == (A, B, C)
    engines.assign_roles({A: Role.PREFILL, B: Role.DECODE, C: None})
    assert engines.live(Role.PREFILL) == (A,)
    assert engines.live(Role.DECODE) == (B,)
    assert engines.between_roles() == (C,)
    assert engines.answering() == (A, B, C)


def test_a_role_that_no_engine_serves_is_served_by_any_that_can() -> None:
    engines = registry(A, B)
    engines.assign_roles({A: Role.PREFILL, B: Role.DECODE})
    engines.mark_down(B, "gone")
    assert engines.live(Role.DECODE) == (A,)
    engines.mark_up(B)
    assert engines.live(Role.DECODE) == (B,)


def test_engines_of_one_role_are_not_assigned_another() -> None:
    engines = registry(A, also=(Member(B, frozenset({Role.DECODE})),))
    engines.assign_roles({A: Role.PREFILL, B: Role.PREFILL})
    assert engines.live(Role.DECODE) == (B,)
    assert engines.live(Role.PREFILL) == (A,)


def test_an_engine_that_leaves_is_forgotten() -> None:
    engines = registry(A, B)
    engines.assign_roles({A: Role.PREFILL, B: None})
    engines.update([Member(A, frozenset(Role))])
    assert engines.between_roles() == ()
    assert engines.live(Role.DECODE) == (A,)


@pytest.mark.parametrize("missing", ["ttft_target_s", "itl_target_s"])
def test_following_needs_both_targets(missing: str) -> None:
    given: dict[str, Any] = {"ttft_target_s": 1.0, "itl_target_s": 0.05, missing: None}
    with pytest.raises(BadSetting, match=missing.removesuffix("_s").replace("_", "-")):
        ProxyConfig.from_options([A], [A], roles="follow", **given)
    assert ProxyConfig.from_options([A], [A], **given).roles.roles == "static"


class Fleet:
    """Three engines with both roles, whose pages say how busy they are."""

    def __init__(self, engines: list[FakeEngine], proxy: Running, client: aiohttp.ClientSession):
        self.engines, self.proxy, self.client = engines, proxy, client
        self.itl_s = 0.01
        self._steps: Counter[str] = Counter()
        for engine in engines:
            engine.metrics_page = self.page(engine)

    def page(self, engine: FakeEngine) -> str:
        self._steps[engine.url] += 100
        count = self._steps[engine.url]
        return "\n".join(
            (
                "vllm:num_requests_running 0.0",
                "vllm:num_requests_waiting 0.0",
                "vllm:kv_cache_usage_perc 0.1",
                f"vllm:inter_token_latency_seconds_sum {count * self.itl_s}",
                f"vllm:inter_token_latency_seconds_count {count}.0",
                "",
            )
        )

    async def state(self) -> dict[str, Any]:
        async with self.client.get(f"{self.proxy.admin_url}/debug/state") as response:
            page: dict[str, Any] = json.loads(await response.read())
        return page

    async def complete(self, prompt: str = "hi", **more: Any) -> int:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, **more}
        async with self.client.post(f"{self.proxy.url}/v1/completions", json=body) as response:
            await response.read()
            return response.status

    def metric(self, name: str, **labels: str) -> float:
        found = self.proxy.metrics.registry.get_sample_value(f"pdconn_router_{name}", labels)
        assert found is not None
        return found

    async def until(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a state of the roles; requests flow meanwhile."""
        async with asyncio.timeout(30):
            while not what(roles := (await self.state())["roles"]):
                await asyncio.sleep(0.05)
        return roles


async def fleet(stack: AsyncExitStack, num_prefill: int | None = None, **settings: Any) -> Fleet:
    """A router; ``num_prefill``: engines that prefill alone, the others then decode alone."""
    leases = Leases()
    engines = [FakeEngine(leases) for _ in range(3)]
    for engine in engines:
        await engine.start()
        stack.push_async_callback(engine.stop)
    urls = [engine.url for engine in engines]
    given: dict[str, Any] = {
        "port": 0,
        "roles": "follow",
        "ttft_target_s": 1.0,
        "itl_target_s": 0.05,
        "role_period_s": PERIOD_S,
        "role_drain_s": 0.2,
        "drain_timeout_s": 1.0,
        **settings,
    }
    client = await stack.enter_async_context(aiohttp.ClientSession())
    proxy = await stack.enter_async_context(
        running_proxy(
            ProxyConfig.from_options(urls[:num_prefill], urls[num_prefill or 0 :], **given)
        )
    )
    return Fleet(engines, proxy, client)


@in_loop
async def test_each_engine_serves_one_role_at_a_time() -> None:
    async with AsyncExitStack() as stack:
        one = await fleet(stack)
        roles = (await one.state())["roles"]
        assert sorted(roles["serves"].values()) == ["decode", "prefill", "prefill"]
        assert await one.complete() == 200
        asked = {
            engine.url: {bool(seen.params.get("do_remote_decode")) for seen in engine.seen}
            for engine in one.engines
        }
        for engine, kinds in asked.items():
            assert kinds <= {roles["serves"][engine] == "prefill"}
        assert one.metric("role_engines", role="prefill") == 2.0


@in_loop
async def test_with_static_roles_nothing_changes() -> None:
    async with AsyncExitStack() as stack:
        one = await fleet(stack, roles="static")
        assert (await one.state())["roles"] is None
        assert one.metric("role_engines_wanted", role="decode") == 3.0
        assert one.metric("role_verdicts_total", verdict="in_target") == 0.0


@asynccontextmanager
async def slow_decode(one: Fleet, decode: FakeEngine, **more: Any) -> AsyncIterator[None]:
    """Forty requests, of which those at ``decode`` are answered when the block has ended."""
    held = asyncio.Event()

    async def slow(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
        await held.wait()
        return web.json_response({"choices": [{"text": "t"}]})

    async def pages() -> None:
        while True:
            for engine in one.engines:
                engine.metrics_page = one.page(engine)
            await asyncio.sleep(0.1)

    one.itl_s, decode.script = 0.2, slow
    async with asyncio.TaskGroup() as group:
        refreshing = group.create_task(pages())
        asked = [group.create_task(one.complete(f"prompt {n}", **more)) for n in range(40)]
        yield
        held.set()
        assert Counter(await asyncio.gather(*asked)) == Counter({200: 40})
        refreshing.cancel()


@in_loop
async def test_a_fleet_in_which_nothing_can_move_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncExitStack() as stack:
        await fleet(stack, num_prefill=2)
        assert "no engine is listed in both roles" in caplog.text
        caplog.clear()
        await fleet(stack)
        await fleet(stack, num_prefill=2, roles="dry-run")
        assert "no engine is listed in both roles" not in caplog.text


@in_loop
async def test_decode_that_is_slow_gets_an_engine_and_every_request_its_answer() -> None:
    async with AsyncExitStack() as stack:
        one = await fleet(stack)
        serves = (await one.until(lambda roles: roles["verdict"] == "in_target"))["serves"]
        decode = next(engine for engine in one.engines if serves[engine.url] == "decode")
        async with slow_decode(one, decode):
            roles = await one.until(lambda roles: bool(roles["changes"]))
            assert roles["changes"][-1]["to"] == "decode"
            await one.until(lambda roles: roles["serving"] == {"prefill": 1, "decode": 2})
        assert one.metric("role_changes_total", role="decode") == 1.0
        assert one.metric("role_engines", role="decode") == 2.0


@in_loop
async def test_an_engine_that_dies_while_it_changes_loses_no_request() -> None:
    async with AsyncExitStack() as stack:
        one = await fleet(stack, role_drain_s=30.0)
        serves = (await one.until(lambda roles: roles["verdict"] == "in_target"))["serves"]
        decode = next(engine for engine in one.engines if serves[engine.url] == "decode")
        prefill = [engine for engine in one.engines if engine is not decode]
        for engine in prefill:
            engine.computes.clear()
        stuck: list[asyncio.Task[int]] = []
        while not all(engine.seen for engine in prefill):  # a router may prefer one of them
            stuck += [asyncio.create_task(one.complete(f"stuck {n}")) for n in range(8)]
            await asyncio.sleep(0.2)
        # With two choices a request goes to decode alone.
        async with slow_decode(one, decode, n=2):
            changing = (await one.until(lambda roles: roles["changing"] is not None))["changing"]
            assert serves[changing] == "prefill"
            await next(engine for engine in prefill if engine.url == changing).stop()
            for engine in prefill:
                engine.computes.set()
            # Its connections have broken: if that is seen before it is known to be down, it is
            # done with its requests, and has changed.
            ends = {"change given up", "changed"}
            await one.until(lambda roles: any(end["what"] in ends for end in roles["changes"]))
            await until(lambda: changing not in one.proxy.router.engines.answering())
        assert await asyncio.gather(*stuck) == [200] * len(stuck)
        verdicts = (one.metric("role_verdicts_total", verdict=end) for end in ("given_up", "ended"))
        assert sum(verdicts) == 1.0


@in_loop
async def test_a_dry_run_says_what_it_would_do_and_does_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with AsyncExitStack() as stack:
        one = await fleet(stack, num_prefill=2, roles="dry-run")
        engines = one.proxy.router.engines
        before = {role: engines.live(role) for role in Role}
        await one.until(lambda roles: roles["verdict"] == "in_target")
        async with slow_decode(one, one.engines[2]):
            roles = await one.until(lambda roles: bool(roles["changes"]))
            assert roles["mode"] == "dry-run"
            assert one.metric("role_engines_wanted", role="decode") > 1
        assert {role: engines.live(role) for role in Role} == before
        assert "role would change, dry run" in caplog.text
