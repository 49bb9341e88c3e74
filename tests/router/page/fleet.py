"""A router over engines whose caches it knows, and three requests, for the contents of the page.

Two engines publish KV events over real sockets.  16-token blocks, hashed as vLLM does:

    prompt      tokens   prefill holds    decode holds
    LONG        100      4 blocks = 64    2 blocks = 32
    STRANGE      60      0                0
    SHORT        40      (not asked)      2 blocks = 32, lacks 8: decode serves it alone
    hit rate             64 of 160        64 of 200
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pdconn.router.prefix.hashing import HashScheme, chain, external
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_server import Running, running_proxy
from tests.fakes.deployment import Reply
from tests.fakes.fake_engine import FakeEngine, Leases
from tests.router.events.publisher import Publisher, two_ports

BLOCK = 16
SCHEME = HashScheme("sha256_cbor", BLOCK)
LONG = list(range(1, 101))
STRANGE = list(range(1000, 1060))
SHORT = LONG[:40]
ALONE_BELOW = 10
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
METRICS = """\
vllm:num_requests_running 3
vllm:num_requests_waiting 4
vllm:kv_cache_usage_perc 0.25
vllm:prefix_cache_queries_total 800
vllm:prefix_cache_hits_total 600
"""


class Engine:
    """A fake engine with a publisher beside it."""

    def __init__(self, leases: Leases) -> None:
        self.http = FakeEngine(leases)
        self.ports = two_ports()
        self.events = Publisher(self.ports)

    @property
    def url(self) -> str:
        return self.http.url

    def entry(self, role: str) -> str:
        """Of a fleet file."""
        events, replay = (f"tcp://{{host}}:{port}" for port in self.ports)
        return (
            f'[[engine]]\nurl = "{self.url}"\nroles = ["{role}"]\n'
            f'events = "{events}"\nreplay = "{replay}"\n'
        )

    async def hold(self, tokens: list[int]) -> None:
        """Say that the blocks of these tokens are stored."""
        hashes = [external(full) for full in chain(SCHEME, tokens)]
        await self.events.publish(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": None,
                "token_ids": tokens[: BLOCK * len(hashes)],
                "block_size": BLOCK,
                "medium": "GPU",
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )


@dataclass
class Fleet:
    """A router over engines of a fleet file, and a client."""

    prefill: Engine
    decode: Engine
    busy: Engine
    path: Path
    router: Running
    client: aiohttp.ClientSession

    async def get(self, path: str) -> Reply:
        async with self.client.get(self.router.admin_url + path) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    async def state(self) -> dict[str, Any]:
        return json.loads((await self.get("/debug/state")).body)

    async def ask(self, prompt: list[int], request_id: str) -> None:
        url, body = f"{self.router.url}/v1/completions", {"model": "m", "prompt": prompt}
        headers = {"X-Request-Id": request_id}
        async with self.client.post(url, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()

    async def state_with(self, true: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while not true(state := await self.state()):
                await asyncio.sleep(0.02)
        return state

    def remove_busy(self) -> None:
        """The third engine leaves the fleet."""
        text = self.prefill.entry("prefill") + self.decode.entry("decode")
        written = self.path.with_suffix(".new")
        written.write_text(text, encoding="utf-8")
        written.replace(self.path)


@asynccontextmanager
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Three engines whose caches the router knows."""
    leases = Leases()
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for held in (LONG[: 4 * BLOCK], LONG[: 2 * BLOCK], STRANGE[:BLOCK]):
            engine = Engine(leases)
            stack.push_async_callback(engine.events.die)
            await engine.http.start()
            stack.push_async_callback(engine.http.stop)
            engine.http.metrics_page = METRICS
            await engine.hold(held)
            engines.append(engine)
        prefill, decode, busy = engines
        # The second decode engine is so busy that it is asked nothing.
        busy.http.metrics_page = "vllm:num_requests_running 900\n"
        path = tmp_path / "fleet.toml"
        path.write_text(
            prefill.entry("prefill") + decode.entry("decode") + busy.entry("decode"),
            encoding="utf-8",
        )
        config = ProxyConfig.from_options(
            [], [], fleet=str(path), port=0, alone_below=ALONE_BELOW, drain_timeout_s=1.0
        )
        client = await stack.enter_async_context(aiohttp.ClientSession())
        router = await stack.enter_async_context(running_proxy(config))
        made = Fleet(prefill, decode, busy, path, router, client)
        await made.state_with(is_known)
        yield made


def is_known(state: dict[str, Any]) -> bool:
    loads = [one["load"] for one in state["engines"]]
    live = [pod["state"] == "live" and pod["hashing"] for pod in state["pods"]]
    return all(loads) and len(live) == 3 and all(live)


async def send_three(made: Fleet) -> None:
    """The requests of the table above."""
    await made.ask(LONG, "the-long-one")
    await made.ask(STRANGE, "the-strange-one")
    await made.ask(SHORT, "the-short-one")
