"""``GET /v1/models``: what the engines list, together.

Asked when a client asks, with its key, so that nobody learns of models that engines would not tell.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from msgspec import Raw
from multidict import CIMultiDict

from pdconn.router.errors import EngineFailure, NoEngineLeft
from pdconn.router.fleet.client import ConnectFailed, ConnectionLost, EngineAnswer, EngineTimedOut
from pdconn.router.handover.handover import Handover
from pdconn.router.routing.policy import Role

GIVE_UP_S = 5.0
"""An engine that has not answered by then is left out of the list."""
MAX_NBYTES = 8 << 20
"""Bound of one engine's list."""


class _ListedCard(msgspec.Struct):
    id: str


class _ListedCards(msgspec.Struct):
    data: list[Raw]


_Card: TypeAlias = tuple[str, Raw]


@dataclass(frozen=True, slots=True)
class ListedModels:
    """Asks all engines for their models."""

    handover: Handover

    async def answer(self, headers: CIMultiDict[str], request_id: str) -> bytes | EngineAnswer:
        """A list of every model once, as the first engine describes it, decode before prefill.

        Where no engine lists any, the answer of one that says why not.

        Raises:
            NoEngineLeft: no engine answers.
            OutOfResources: the router cannot open a connection.
        """
        headers = headers.copy()
        headers["Accept-Encoding"] = "identity"  # the router reads these answers
        engines = self.handover.engines
        decode, prefill = engines.live(Role.DECODE), engines.live(Role.PREFILL)
        roles = dict.fromkeys(decode, Role.DECODE)
        roles.update((name, Role.PREFILL) for name in prefill if name not in roles)
        asking = (self._ask(name, role, headers, request_id) for name, role in roles.items())
        found = await asyncio.gather(*asking, return_exceptions=True)
        answers = [one for one in found if isinstance(one, EngineAnswer)]
        cards: dict[str, Raw] = {}
        for one in found:
            if isinstance(one, list):
                for name, card in one:
                    cards.setdefault(name, card)
        refusal = None if cards or not answers else answers[0]
        for answer in answers:
            if answer is not refusal:
                answer.close()
        if cards:
            return msgspec.json.encode({"object": "list", "data": list(cards.values())})
        if refusal is not None:
            return refusal
        for one in found:
            if isinstance(one, BaseException):
                raise one
        failures = [one for one in found if isinstance(one, EngineFailure)]
        raise NoEngineLeft(Role.DECODE.value, engines.failures(Role.DECODE, tuple(failures)))

    async def _ask(
        self, engine: str, role: Role, headers: CIMultiDict[str], request_id: str
    ) -> list[_Card] | EngineAnswer | EngineFailure:
        try:
            async with asyncio.timeout(GIVE_UP_S):
                answer = await self.handover.client.get(engine, "/v1/models", headers)
                if answer.status != 200:
                    return answer
                async with answer:
                    return _cards(await _whole(answer))
        except TimeoutError:
            error: ConnectFailed | ConnectionLost = EngineTimedOut(f"no list in {GIVE_UP_S:g} s")
        except (ConnectFailed, ConnectionLost) as failed:
            error = failed
        return self.handover.tries.failed(role, engine, request_id, error)


async def _whole(answer: EngineAnswer) -> bytes:
    """A body that is cut where it is too long, and then no JSON."""
    raw = bytearray()
    while len(raw) <= MAX_NBYTES and (piece := await answer.next()):
        raw += piece
    return bytes(raw)


def _cards(raw: bytes) -> list[_Card]:
    """Models by name, as the engine wrote them; none where it wrote something else."""
    try:
        cards = msgspec.json.decode(raw, type=_ListedCards).data
        return [(msgspec.json.decode(card, type=_ListedCard).id, card) for card in cards]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
