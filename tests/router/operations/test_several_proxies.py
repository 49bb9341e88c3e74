"""Several proxies over the same engines: they agree, and share nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import aiohttp

from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_server import running_proxy
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop
from tests.fakes.fake_engine import ANSWER
from tests.fakes.routed import SCHEME, fleet, other_prompt

NUM_PROXIES = 3


async def twin(stack: AsyncExitStack, d, **settings):
    """Another proxy that is started as the first one was."""
    config = ProxyConfig.from_options(
        d.proxy.config.engines.prefill, d.proxy.config.engines.decode, port=0, **settings
    )
    return await stack.enter_async_context(running_proxy(config))


async def ask(client: aiohttp.ClientSession, proxy, prompt) -> tuple[str | None, str | None]:
    """The engines that a proxy sends a prompt to."""
    body = {"model": "m", "prompt": prompt}
    async with client.post(proxy.url + "/v1/completions", json=body) as reply:
        assert (reply.status, await reply.read()) == (200, ANSWER)
    _, outcome = next(proxy.router.decisions.newest())
    return outcome.prefill, outcome.decode


@in_loop
async def test_prompts_that_begin_alike_meet_on_one_engine_whichever_proxy_they_come_by() -> None:
    """Without events, and though no proxy knows what the others have sent."""
    async with deployment(4, 3, policy="prefix") as d, AsyncExitStack() as stack:
        proxies = [d.proxy, *[await twin(stack, d, policy="prefix") for _ in range(2)]]
        seen = Counter()
        for number in range(24):
            chosen = {
                await ask(d.client, proxy, f"conversation {number}" * 40) for proxy in proxies
            }
            assert len(chosen) == 1, number
            seen[chosen.pop()] += 1
        assert len(seen) > 3, "not all went to one engine"


@in_loop
async def test_proxies_that_take_turns_do_not_agree() -> None:
    """The control of the test above: a policy that remembers what it did itself."""
    async with deployment(4, 3) as d, AsyncExitStack() as stack:
        other = await twin(stack, d, policy="round-robin")
        await ask(d.client, other, "x")
        chosen = [await ask(d.client, proxy, "conversation" * 40) for proxy in (d.proxy, other)]
        assert chosen[0] != chosen[1]


@in_loop
async def test_every_proxy_learns_what_engines_hold_from_the_engines() -> None:
    async with fleet(num_prefill=3) as f, AsyncExitStack() as stack:
        other = await twin(stack, f)
        prompt = other_prompt(3)
        holder = f.prefill[2]
        await f.pod(holder).store(prompt)

        def knows(proxy) -> bool:
            pods = proxy.router.caches.pods_by(SCHEME)
            return any(proxy.router.caches.index.num_hashes for _ in pods)

        async with asyncio.timeout(20):
            while not (knows(f.proxy) and knows(other)):
                await asyncio.sleep(0.01)
        for proxy in (f.proxy, other):
            prefill, _ = await ask(f.client, proxy, [*prompt, 7])
            assert prefill == holder.url


@in_loop
async def test_a_proxy_that_ends_takes_nothing_of_another_with_it() -> None:
    async with deployment() as d:
        async with AsyncExitStack() as stack:
            other = await twin(stack, d)
            await ask(d.client, other, "x")
            d.decode[0].admitting.clear()
            running = asyncio.create_task(ask(d.client, d.proxy, "x"))
            while len(d.decode[0].seen) < 2:
                await asyncio.sleep(0.005)
            assert other.metrics.registry.get_sample_value("pdconn_router_inflight_requests") == 0
        d.decode[0].admitting.set()
        await running
        assert d.leases.granted == 2
        assert not d.leases.held
