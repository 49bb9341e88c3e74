"""Sends concurrent requests to one OpenAI-compatible server.

All requests share one thread, so that on a small machine the engines have the other cores.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import quote

import aiohttp
import msgspec

from pdconn.tools.bench.bench_errors import BenchError
from pdconn.tools.bench.serving.answer_stream import TimedLine, read_answer
from pdconn.tools.bench.serving.replies import CompleteReply, FailedReply, Reply
from pdconn.tools.bench.serving.schedule import Prompt
from pdconn.tools.openai.async_client import OK, AsyncClient
from pdconn.tools.openai.completions import BrokenAnswer, completion_request
from pdconn.tools.openai.served_models import listed_models

#: vLLM closes a connection that is idle for 5 s; ours must close earlier.
_KEEPALIVE_S = 4.0
#: vLLM repeats the prompt's token ids in the first event, which makes a long line.
_LINE_NBYTES = 1 << 23
_CONNECT_S = 10.0


class TargetFailed(BenchError):
    """A service to be measured does not answer."""

    def __init__(self, name: str, url: str, reason: str) -> None:
        super().__init__(f"{name} at {url}: {reason}")
        self.name = name


class _RouteTimes(msgspec.Struct):
    ticket_ms: float | None = None
    first_byte_ms: float | None = None


class Service:
    """One server, accessed through ``session``; ``timeout_s`` bounds a complete answer.

    ``admin``: the URL of the admin pages, if it is a ``pdconn proxy`` and they are reachable.
    """

    def __init__(
        self,
        url: str,
        model: str,
        timeout_s: float,
        session: aiohttp.ClientSession,
        *,
        admin: str | None = None,
    ) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._client = AsyncClient(url, session)
        self._admin = None if admin is None else AsyncClient(admin, session)
        self._ids: dict[int, str] = {}

    async def complete_prompt(
        self, number: int, prompt: Prompt, max_tokens: int, due_s: float | None = None
    ) -> Reply:
        """Continue ``prompt`` greedily by ``max_tokens`` tokens.

        Times count from ``due_s``, the scheduled send time, or from sending without one.
        """
        request = completion_request(self._model, prompt, max_tokens, stream=True)
        body = json.dumps(request)  # before the clock starts
        self._ids[number] = request_id = f"bench-{uuid.uuid4().hex}"
        began_s = time.perf_counter() if due_s is None else due_s
        try:
            async with asyncio.timeout(self._timeout_s):
                lines = await self._lines(body, request_id)
            return read_answer(number, began_s, lines)
        except TimeoutError:
            return FailedReply(number, began_s, f"no complete answer within {self._timeout_s:g} s")
        except (BrokenAnswer, aiohttp.ClientError, OSError, ValueError) as error:
            return FailedReply(number, began_s, str(error) or type(error).__name__)

    async def _lines(self, body: str, request_id: str) -> list[TimedLine]:
        async with self._client.post_completion(body, {"X-Request-Id": request_id}) as response:
            if response.status != OK:
                text = (await response.content.read(500)).decode(errors="replace")
                raise BrokenAnswer(f"status {response.status}: {text}")
            return [(time.perf_counter(), line) async for line in response.content]

    async def with_handover(self, reply: Reply) -> Reply:
        """``reply`` with the handover time that ``pdconn proxy`` reports for it.

        Unchanged if its admin pages are unknown, or there was no handover.
        """
        if not isinstance(reply, CompleteReply) or self._admin is None:
            return reply
        try:
            async with asyncio.timeout(_CONNECT_S):
                page = await self._admin.get_page(f"/debug/route/{quote(self._ids[reply.prompt])}")
            route = msgspec.json.decode(page.body, type=_RouteTimes)
        except (TimeoutError, aiohttp.ClientError, OSError, msgspec.DecodeError):
            return reply
        if route.ticket_ms is None or route.first_byte_ms is None:
            return reply
        return replace(reply, handover_s=route.first_byte_ms / 1000)


@asynccontextmanager
async def service(
    name: str, url: str, model: str | None, timeout_s: float, *, admin: str | None = None
) -> AsyncIterator[Service]:
    """A client of the server at ``url``; without ``model``, for the first listed model.

    Raises:
        TargetFailed: the server does not list its models.
    """
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        read_bufsize=_LINE_NBYTES,
    ) as session:
        model = model or await _first_model(name, url, session)
        yield Service(url, model, timeout_s, session, admin=admin)


async def _first_model(name: str, url: str, session: aiohttp.ClientSession) -> str:
    try:
        async with asyncio.timeout(_CONNECT_S):
            page = await AsyncClient(url, session).get_page("/v1/models")
        models = listed_models(page.body)
    except TimeoutError:
        raise TargetFailed(
            name, url, f"/v1/models did not answer within {_CONNECT_S:g} s"
        ) from None
    except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
        raise TargetFailed(name, url, str(error) or type(error).__name__) from error
    if not models:
        raise TargetFailed(name, url, "/v1/models lists no model; name one with --model")
    return models[0].name
