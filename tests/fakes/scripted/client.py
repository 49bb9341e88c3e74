"""The router's connections to engines, of which a test says how each ends.

What the router makes of an answer is real (``EngineAnswer`` of its ``fleet.engine_client``).
``test_client.py`` beside it gives it and the real client the same ends.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import ConnectFailed, Delivery, EngineAnswer
from pdconn.router.openai.bodies import RETURN_MODEL
from tests.fakes.fake_engine import ANSWER, MODEL, ticket_of


class ScriptedResponse:
    """As much of an ``EngineResponse`` as an answer uses: its body has arrived whole."""

    def __init__(self, status: int, body: bytes, **headers: str) -> None:
        self.status = status
        self.headers = CIMultiDict({"Content-Type": "application/json", **headers})
        self.body = self._left = body
        self.num_closed = 0

    @property
    def content(self) -> ScriptedResponse:
        """The stream of its body."""
        return self

    async def readany(self) -> bytes:
        left, self._left = self._left, b""
        return left

    def is_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.num_closed += 1


@dataclass(eq=False)
class EngineAsk:
    """A request on its way to an engine.

    Attributes:
        answer: what becomes of it: a response, or an error.
        is_seen: whether the engine can have seen it.
    """

    engine: str
    request_id: str
    body: dict[str, Any]
    delivery: Delivery
    may_repeat: bool
    answer: asyncio.Future[ScriptedResponse] = field(default_factory=asyncio.Future)

    @property
    def lease(self) -> str | None:
        """What its ticket names."""
        return (self.body.get("kv_transfer_params") or {}).get("lease")

    @property
    def stream(self) -> str | None:
        """The stream that prefill is to name its request, or that decode is to follow."""
        return self._ours.get("stream")

    @property
    def followed(self) -> tuple[str, str] | None:
        """What an early ticket names: a boot, and a stream of it."""
        if self.stream is None or "incarnation" not in self._ours:
            return None
        return self._ours["incarnation"], self.stream

    @property
    def _ours(self) -> dict[str, Any]:
        return (self.body.get("kv_transfer_params") or {}).get("pdconn") or {}

    @property
    def is_return(self) -> bool:
        """Whether it only gives a ticket back."""
        return bool(self.body.get("model") == RETURN_MODEL)

    @property
    def is_seen(self) -> bool:
        return self.delivery.begun

    def send(self) -> None:
        """There is a connection, and the request leaves."""
        self.delivery.begun = True

    def respond(self, status: int, body: bytes = ANSWER, **headers: str) -> ScriptedResponse:
        """The engine answers."""
        self.send()
        response = ScriptedResponse(status, body, **headers)
        self.answer.set_result(response)
        return response

    def fail(self, error: Exception) -> None:
        """There is no connection, or it breaks."""
        if not isinstance(error, ConnectFailed):
            self.send()
        self.answer.set_exception(error)


class ScriptedClient:
    """Stands for :class:`~pdconn.router.fleet.engine_client.EngineClient`.

    Attributes:
        asks: every request with a body, in order.
        down: engines that cannot be reached.
        ill: engines whose ``/health`` is not well.
        responses: every response.
    """

    def __init__(self) -> None:
        self.asks: list[EngineAsk] = []
        self.down: set[str] = set()
        self.ill: set[str] = set()
        self.responses: list[ScriptedResponse] = []

    @property
    def open(self) -> list[EngineAsk]:
        """Requests that wait for an answer."""
        return [ask for ask in self.asks if not ask.answer.done()]

    async def post_body(
        self,
        engine: str,
        path: str,
        body: bytes,
        headers: CIMultiDict[str],
        delivery: Delivery | None = None,
        *,
        may_repeat: bool = True,
    ) -> EngineAnswer:
        """As the client's own."""
        del path
        name = headers.get("X-Request-Id", "")
        ask = EngineAsk(engine, name, json.loads(body), delivery or Delivery(), may_repeat)
        self.asks.append(ask)
        if engine in self.down:
            ask.fail(ConnectFailed("Connection refused"))
        return self._answer(engine, await ask.answer)

    async def get_page(self, engine: str, path: str, headers: CIMultiDict[str]) -> EngineAnswer:
        """As the client's own, at once: of health and models."""
        del headers
        if engine in self.down:
            raise ConnectFailed("Connection refused")
        body = json.dumps({"data": [{"id": MODEL}]}).encode() if path == "/v1/models" else b""
        return self._answer(engine, ScriptedResponse(503 if engine in self.ill else 200, body))

    def _answer(self, engine: str, response: ScriptedResponse) -> EngineAnswer:
        self.responses.append(response)
        made: Any = response
        return EngineAnswer(engine, made)

    async def close(self) -> None:
        """Nothing is open."""


def ticket_answer(lease: str | None, boot: str) -> bytes:
    """Prefill's answer, with the ticket of a lease at a boot, or none."""
    ticket = "null" if lease is None else ticket_of(boot, lease)
    return f'{{"id": "x", "choices": [], "kv_transfer_params": {ticket}}}'.encode()
