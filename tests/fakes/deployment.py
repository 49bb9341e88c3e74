"""A router over fake engines, and a client that asks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from multidict import CIMultiDictProxy

from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_server import LIMITS, Limits, Running, running_proxy
from tests.fakes.fake_engine import MODEL, FakeEngine, Leases


@dataclass(frozen=True)
class Reply:
    """What a client got, whole."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


@dataclass
class Deployment:
    """A proxy over fake engines, and a client."""

    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    leases: Leases
    proxy: Running
    client: aiohttp.ClientSession

    def url(self, path: str) -> str:
        """Of a path; those of the admin pages have a listener of their own."""
        if path.startswith("http"):
            return path
        return (self.proxy.admin_url if is_admin(path) else self.proxy.url) + path

    def metric(self, name: str, **labels: str) -> float:
        value = self.proxy.metrics.registry.get_sample_value(f"pdconn_router_{name}", labels)
        return 0.0 if value is None else value

    def outcome(self, outcome: str, path: str = "/v1/completions") -> float:
        return self.metric("requests_total", route=path, outcome=outcome)

    def num_listed(self) -> int:
        """How often engines were asked for their models."""
        return sum(engine.num_listed for engine in (*self.prefill, *self.decode))

    async def complete(self, path: str = "/v1/completions", **body: Any) -> Reply:
        """Ask the proxy, and read its answer."""
        prompt: dict[str, Any] = {"prompt": "hi"}
        if "chat" in path or "messages" in path:
            prompt = {"messages": [{"role": "user", "content": "hi"}]}
        elif "responses" in path:
            prompt = {"input": "hi"}
        body = {"model": MODEL, **prompt, **body}
        async with self.client.post(self.url(path), json=body) as response:
            return Reply(response.status, response.headers, await response.read())

    async def send(self, path: str, raw: Any = None, method: str = "POST") -> Reply:
        """Ask the proxy something odd."""
        async with self.client.request(method, self.url(path), data=raw) as response:
            return Reply(response.status, response.headers, await response.read())

    async def open(self, **body: Any) -> asyncio.StreamWriter:
        """Ask the proxy over a bare socket, to leave at will (``leave``)."""
        text = json.dumps({"model": MODEL, "prompt": "hi", **body})
        port = int(self.proxy.url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())
        await writer.drain()
        return writer


def is_admin(path: str) -> bool:
    """Whether a path is one of the admin pages."""
    return path == "/" or path.startswith(("/debug/", "/metrics"))


async def leave(writer: asyncio.StreamWriter) -> None:
    """The client goes, without waiting for an answer."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@asynccontextmanager
async def deployment(
    num_prefill: int = 1,
    num_decode: int = 1,
    word: Callable[[FakeEngine], str] = lambda engine: engine.url,
    limits: Limits = LIMITS,
    running: Callable[..., AbstractAsyncContextManager[Running]] | None = None,
    **settings: Any,
) -> AsyncIterator[Deployment]:
    """Engines, a proxy over them and a client, all gone at the end.

    ``running``: what serves clients in place of a proxy.

    ``word`` is how the command line names an engine.  With ``streams`` on, engines know them.
    """
    leases = Leases()
    engines = [FakeEngine(leases) for _ in range(num_prefill + num_decode)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            if settings.get("streams") == "on":
                engine.boot = f"boot of {engine.port}"
            stack.push_async_callback(engine.stop)
        prefill, decode = engines[:num_prefill], engines[num_prefill:]
        turns = {"policy": "round-robin"}  # what an engine is asked is then known beforehand
        shown = {"show_engines": True}
        settings = {"port": 0, "drain_timeout_s": 1.0, **turns, **shown, **settings}
        config = ProxyConfig.from_options(
            [word(e) for e in prefill], [word(e) for e in decode], **settings
        )
        client = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        proxy = await stack.enter_async_context(  # goes before its client
            (running or running_proxy)(config, limits=limits)
        )
        yield Deployment(prefill, decode, leases, proxy, client)
