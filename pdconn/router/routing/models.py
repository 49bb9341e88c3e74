"""What engines say of their models (``GET /v1/models``): adapters, and the longest prompt.

Asked with a client's key, as an engine may want one, and kept for a while.  Where engines differ
the longest prompt of any counts: what none of them takes is refused here, the rest is theirs to
judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from multidict import CIMultiDict

from pdconn.router.fleet.client import ConnectFailed, ConnectionLost
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.routing.policy import Role

MODELS_FOR_S = 30.0
"""How long a list of models is used."""

Ask = Callable[[str, str, CIMultiDict[str]], Awaitable[bytes]]
"""Requests a path of an engine, with headers."""


class CannotTokenise(Exception):
    """The prompt cannot be tokenized here; the text says why."""


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class ModelCatalog:
    """The models of every engine that is up.

    Args:
        engines: those to ask.
        ask: how.
        timeout_s: for an answer, and until the next try after one that failed.
    """

    def __init__(self, engines: EngineRegistry, ask: Ask, timeout_s: float) -> None:
        self._engines = engines
        self._ask = ask
        self._timeout_s = timeout_s
        self._cards: dict[str, dict[str, _Card]] = {}
        self._until = 0.0

    async def update(self, headers: CIMultiDict[str]) -> None:
        """Ask all engines again, if it is time."""
        now = asyncio.get_running_loop().time()
        if now < self._until:
            return
        self._until = now + self._timeout_s  # no second round meanwhile
        names = dict.fromkeys((*self._engines.live(Role.DECODE), *self._engines.live(Role.PREFILL)))
        found = await asyncio.gather(*(self._cards_of(name, headers) for name in names))
        known = {name: self._cards.get(name, {}) for name in names}
        told = {name: cards for name, cards in zip(names, found, strict=True) if cards is not None}
        self._cards = known | told
        if len(told) == len(names):
            self._until = now + MODELS_FOR_S

    async def _cards_of(self, engine: str, headers: CIMultiDict[str]) -> dict[str, _Card] | None:
        try:
            async with asyncio.timeout(self._timeout_s / 2):
                raw = await self._ask(engine, "/v1/models", headers)
            cards = msgspec.json.decode(raw, type=_Cards).data
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
            TimeoutError,
            CannotTokenise,
            ConnectFailed,
            ConnectionLost,
        ):
            return None
        return {card.id: card for card in cards}

    def adapter_path(self, model: str | None) -> str | None:
        """Where the adapter of this name comes from; None if it is none."""
        cards = (cards.get(model or "") for cards in self._cards.values())
        return next((card.root for card in cards if card and card.parent and card.root), None)

    def max_tokens(self, model: str | None) -> int | None:
        """Tokens of the longest prompt and its answer that any engine takes, if they tell."""
        found = [_max_tokens(cards, model) for cards in self._cards.values()]
        return max((one for one in found if one is not None), default=None)


def _max_tokens(cards: dict[str, _Card], model: str | None) -> int | None:
    """Of one engine: an adapter takes what its model does, no name is the only model's."""
    bases = [card for card in cards.values() if card.parent is None]
    card = cards.get(model) if model is not None else bases[0] if bases else None
    if card is not None and card.max_model_len is None and card.parent is not None:
        card = cards.get(card.parent)
    longest = None if card is None else card.max_model_len
    return longest if longest is not None and longest > 0 else None
