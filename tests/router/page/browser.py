"""A headless Chromium that tests drive by its own protocol, without a further package.

One page at a time.  What the page says on its console, throws or is refused (its policy, a request)
is kept in ``complaints``.  ``seen`` drives nothing: it gives a page's HTML as it ends up.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_START_S = 60.0
_LOUD = ("error", "warning", "assert")


class Page:
    """The one page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._next += 1
        answer = self._answers[self._next] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._next, "method": method, "params": params})
        async with asyncio.timeout(_START_S):
            return await answer

    async def read(self) -> None:
        """Take answers and events until the browser goes."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said.get("result", said.get("error", {})))
                continue
            complaint = _complaint(said["method"], said["params"])
            if complaint:
                self.complaints.append(complaint)

    async def show(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the window's size, and what the system prefers."""
        mobile = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", media="", features=[scheme])

    async def open(self, url: str) -> None:
        """Load a page; what an earlier one complained of is forgotten."""
        self.complaints.clear()
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """What an expression of JavaScript comes to."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(_START_S):
            while not await self.value(f"Boolean({expression})"):
                await asyncio.sleep(0.05)

    async def picture(self, *, whole: bool = True, clip: dict[str, float] | None = None) -> bytes:
        """A PNG of the page, down to its end, or of a part of it."""
        more: dict[str, Any] = {} if clip is None else {"clip": {**clip, "scale": 1}}
        shot = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **more
        )
        return base64.b64decode(shot["data"])


def _complaint(method: str, params: dict[str, Any]) -> str | None:
    if method == "Runtime.exceptionThrown":
        return f"thrown: {params['exceptionDetails'].get('text')}"
    if method == "Runtime.consoleAPICalled" and params["type"] in _LOUD:
        return f"console: {[one.get('value') for one in params['args']]}"
    if method == "Log.entryAdded" and params["entry"]["level"] in _LOUD:
        return f"log: {params['entry']['text']} {params['entry'].get('url', '')}"
    return None


@asynccontextmanager
async def browser(tmp_path: Path) -> AsyncIterator[Page]:
    """A browser with one page, gone at the end."""
    home = tmp_path / "chromium"
    driven = ("--hide-scrollbars", "--remote-debugging-port=0", "about:blank")
    quiet = asyncio.subprocess.DEVNULL
    async with _chromium(home, *driven, stdout=quiet), aiohttp.ClientSession() as client:
        url = await _page_url(client, home / "DevToolsActivePort")
        async with client.ws_connect(url, max_msg_size=0) as socket:
            page = Page(socket)
            reading = asyncio.create_task(page.read())
            for domain in ("Page", "Runtime", "Log"):
                await page.call(f"{domain}.enable")
            yield page
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading


async def seen(url: str, tmp_path: Path) -> str:
    """The page as HTML, after some polls, with its script's doings in it."""
    dumping = ("--virtual-time-budget=5000", "--dump-dom", url)
    piped = asyncio.subprocess.PIPE
    async with _chromium(tmp_path / "chromium", *dumping, stdout=piped) as process:
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
    return out.decode()


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Pages of a test's own; their address."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _chromium(
    home: Path, *how: str, stdout: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of the browser, killed with its children at the end."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        f"--user-data-dir={home}",
        *how,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _page_url(client: aiohttp.ClientSession, ports: Path) -> str:
    """Where the browser lets its page be driven; it writes its port to a file."""
    async with asyncio.timeout(_START_S):
        while True:
            await asyncio.sleep(0.05)
            if not ports.exists() or not ports.read_text(encoding="utf-8").strip():
                continue
            port = ports.read_text(encoding="utf-8").split()[0]
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"http://127.0.0.1:{port}/json") as reply:
                    for one in await reply.json(content_type=None):
                        if one["type"] == "page":
                            return str(one["webSocketDebuggerUrl"])
