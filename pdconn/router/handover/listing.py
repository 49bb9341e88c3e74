"""``GET /v1/models`` and ``/v1/models/NAME``: the models of all engines, merged.

The engines are asked at each client request, with the client's key, so that no client sees models
that engines would hide from it.  Each request goes to every engine, so concurrent requests of one
client share an answer, and the number of concurrent rounds is bounded.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw
from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import (
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    EngineTimedOut,
)
from pdconn.router.fleet.member import Role
from pdconn.router.handover.handover import Handover
from pdconn.router.router_errors import EngineFailure, UnknownModel

GIVE_UP_S = 5.0
"""Time-out of an engine's list; a later list is left out."""
MAX_NBYTES = 8 << 20
"""Maximum bytes of one engine's list."""
_OK = 200
MOST_QUESTIONS = 16
"""Concurrent rounds; further ones wait."""

_OF_ONE_REQUEST = frozenset({"x-request-id", "traceparent", "tracestate"})
"""Headers that may differ between requests that share an answer."""


class _ListedCard(msgspec.Struct):
    id: str


class _ListedCards(msgspec.Struct):
    data: list[Raw]


_Card: TypeAlias = tuple[str, Raw]
_Question: TypeAlias = tuple[tuple[str, str], ...]
"""The client headers on which engines may base their answer."""


@dataclass(frozen=True, slots=True)
class Listing:
    """An answer to a client: the list, or one engine's refusal."""

    body: bytes
    status: int = 200
    headers: CIMultiDict[str] = field(
        default_factory=lambda: CIMultiDict({"Content-Type": "application/json; charset=utf-8"})
    )
    engine: str | None = None

    def pick_model(self, name: str) -> Listing:
        """The answer for one model: its description, or the refusal unchanged.

        Raises:
            UnknownModel: the model is not in the list.
        """
        if self.status != _OK:
            return self
        for listed, card in _cards(self.body):
            if listed == name:
                return Listing(bytes(card))
        raise UnknownModel(name)


@dataclass(slots=True)
class _SharedQuestion:
    """A round in progress, and the number of requests that wait for it."""

    answer: asyncio.Task[Listing]
    num_waiting: int = 0


class ListedModels:
    """Collects the models of all engines."""

    def __init__(self, handover: Handover[Any]) -> None:
        self._handover = handover
        self._under_way: dict[_Question, _SharedQuestion] = {}
        self._places = asyncio.Semaphore(MOST_QUESTIONS)

    async def list_models(self, headers: CIMultiDict[str], request_id: str) -> Listing:
        """All models, each as described by the first engine that lists it, decode before prefill.

        If no engine lists any, the answer of an engine that gives a reason.

        Raises:
            NoEngineLeft: no engine answers.
            OutOfResources: the router cannot open a connection.
        """
        question = _question(headers)
        asked = self._under_way.get(question)
        if asked is None:
            list_all = self._list(headers, request_id)
            asked = _SharedQuestion(asyncio.create_task(list_all, name="list models"))
            self._under_way[question] = asked
        asked.num_waiting += 1
        try:
            return await asyncio.shield(asked.answer)
        finally:
            asked.num_waiting -= 1
            is_over = asked.answer.done() or not asked.num_waiting
            if is_over and self._under_way.get(question) is asked:
                del self._under_way[question]
            if not asked.num_waiting:
                asked.answer.cancel()  # a no-op if it is done

    async def _list(self, headers: CIMultiDict[str], request_id: str) -> Listing:
        headers = headers.copy()
        headers["Accept-Encoding"] = "identity"  # the router parses these answers
        engines = self._handover.engines
        async with self._places:
            decode, prefill = engines.live(Role.DECODE), engines.live(Role.PREFILL)
            roles = dict.fromkeys(decode, Role.DECODE)
            roles.update((name, Role.PREFILL) for name in prefill if name not in roles)
            asking = (self._ask(name, role, headers, request_id) for name, role in roles.items())
            found = await asyncio.gather(*asking, return_exceptions=True)
        cards: dict[str, Raw] = {}
        for one in found:
            if isinstance(one, list):
                for name, card in one:
                    cards.setdefault(name, card)
        refusals = [one for one in found if isinstance(one, Listing)]
        if cards:
            return Listing(msgspec.json.encode({"object": "list", "data": [*cards.values()]}))
        if refusals:
            return refusals[0]
        for one in found:
            if isinstance(one, BaseException):
                raise one
        failures = [one for one in found if isinstance(one, EngineFailure)]
        raise self._handover.tries.no_decode_left(*failures)

    async def _ask(
        self, engine: str, role: Role, headers: CIMultiDict[str], request_id: str
    ) -> list[_Card] | Listing | EngineFailure:
        try:
            async with asyncio.timeout(GIVE_UP_S):
                answer = await self._handover.client.get_page(engine, "/v1/models", headers)
                async with answer:
                    raw = await _whole(answer)
                if answer.status == _OK:
                    return _cards(raw)
                headers = answer.headers
                headers.popall("Content-Length", None)  # the body may have been truncated
                return Listing(raw, answer.status, headers, engine)
        except TimeoutError:
            error: ConnectFailed | ConnectionLost = EngineTimedOut(f"no list in {GIVE_UP_S:g} s")
        except (ConnectFailed, ConnectionLost) as failed:
            error = failed
        return self._handover.tries.engine_failed(role, engine, request_id, error)


def _question(headers: CIMultiDict[str]) -> _Question:
    named = ((name.lower(), value) for name, value in headers.items())
    return tuple(sorted(pair for pair in named if pair[0] not in _OF_ONE_REQUEST))


async def _whole(answer: EngineAnswer) -> bytes:
    """The body, truncated where it is too long, so that it does not parse."""
    raw = bytearray()
    while len(raw) <= MAX_NBYTES and (piece := await answer.next_chunk()):
        raw += piece
    return bytes(raw)


def _cards(raw: bytes) -> list[_Card]:
    """Models by name, unchanged; empty if the engine's answer does not parse."""
    try:
        cards = msgspec.json.decode(raw, type=_ListedCards).data
        return [(msgspec.json.decode(card, type=_ListedCard).id, card) for card in cards]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
