"""What engines say of their models (``GET /v1/models``): names, adapters, and the longest prompt.

Asked with a client's key, as an engine may want one, and kept for a while.  Where the lists of
engines differ a request goes to those that serve its model, and an engine that has not told of its
models gets none.  Where all list the same, as they mostly do, names are the engines' to judge.
Where the lengths of one model differ the longest prompt of any counts: what none of them takes is
refused here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from multidict import CIMultiDict

from pdconn.router.errors import BadBody, UnknownModel
from pdconn.router.fleet.client import ConnectFailed, ConnectionLost
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.routing.policy import Role

MODELS_FOR_S = 30.0
"""How long a list of models is used."""
UNKNOWN_AGAIN_S = 1.0
"""How soon a name that no engine lists makes the router ask again."""
MOST_SHOWN = 500
"""Characters of the names of models in an error."""

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
    """The models of every engine that has told of them.

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
        self._asked_at = 0.0
        self._asked: set[str] = set()
        self._round: asyncio.Task[None] | None = None
        self._differ = False

    async def close(self) -> None:
        """Stop asking."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)

    def fleet_changed(self) -> None:
        """Ask the engines that joined, with the next request."""
        self._until = 0.0

    async def update(self, headers: CIMultiDict[str]) -> None:
        """Ask all engines again, if it is time.

        Waits only for engines that were never asked, and only for half of the time-out.
        """
        if asyncio.get_running_loop().time() >= self._until:
            await self._refresh(headers)

    async def _refresh(self, headers: CIMultiDict[str], *, waits: bool = False) -> None:
        self._asked_at = asyncio.get_running_loop().time()
        names = dict.fromkeys((*self._engines.live(Role.DECODE), *self._engines.live(Role.PREFILL)))
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._ask_all(names, headers), name="ask for models")
        if waits or not names.keys() <= self._asked:
            await asyncio.wait([self._round], timeout=self._timeout_s / 2)
        else:
            self._until = self._asked_at + self._timeout_s  # a round is under way

    async def _ask_all(self, names: Iterable[str], headers: CIMultiDict[str]) -> None:
        names = list(names)
        found = await asyncio.gather(*(self._cards_of(name, headers) for name in names))
        told = {name: cards for name, cards in zip(names, found, strict=True) if cards is not None}
        fleet = self._engines.names
        known = {**self._cards, **told}
        self._cards = {name: cards for name, cards in known.items() if name in fleet}
        self._asked = {*self._asked, *names}.intersection(fleet)
        self._differ = len({frozenset(cards) for cards in self._cards.values()}) > 1
        complete = self._cards.keys() == set(fleet) and len(told) == len(names)
        now = asyncio.get_running_loop().time()
        self._until = now + (MODELS_FOR_S if complete else self._timeout_s)

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

    def matters(self) -> bool:
        """Whether ``serving`` has anything to do; not if all engines list the same models."""
        return self._differ or asyncio.get_running_loop().time() >= self._until

    async def serving(
        self, model: Callable[[], str | None], headers: CIMultiDict[str]
    ) -> frozenset[str] | None:
        """The engines that serve a model; None where all serve the same, or none has told.

        ``model`` reads the name from the request, and is not called where all serve the same.

        Raises:
            UnknownModel: no engine serves it.
            BadBody: the request names none, and there are several.
        """
        await self.update(headers)
        if not self._differ:
            return None
        name = model()
        if name is None:
            bases = self._base_names()
            if len(bases) != 1:
                known = f"one of {', '.join(bases)[:MOST_SHOWN]}" if bases else "a model's name"
                raise BadBody("model", known, "nothing")
            name = bases[0]
        found = self._with(name)
        age_s = asyncio.get_running_loop().time() - self._asked_at
        if not found and age_s >= UNKNOWN_AGAIN_S:  # perhaps an adapter that was loaded just now
            await self._refresh(headers, waits=True)
            found = self._with(name)
        if not found:
            raise UnknownModel(name)
        return found

    def _with(self, model: str) -> frozenset[str]:
        return frozenset(name for name, cards in self._cards.items() if model in cards)

    def _base_names(self) -> list[str]:
        found = {card.id for cards in self._cards.values() for card in _bases(cards)}
        return sorted(found)

    def adapter_path(self, model: str | None) -> str | None:
        """Where the adapter of this name comes from; None if it is none."""
        cards = (cards.get(model or "") for cards in self._cards.values())
        return next((card.root for card in cards if card and card.parent and card.root), None)

    def max_tokens(self, model: str | None) -> int | None:
        """Tokens of the longest prompt and its answer that any engine takes, if they tell."""
        found = [_max_tokens(cards, model) for cards in self._cards.values()]
        return max((one for one in found if one is not None), default=None)


def base_models(listed: bytes) -> list[str]:
    """The models, without adapters, in an engine's answer to ``GET /v1/models``.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is no such answer.
    """
    cards = msgspec.json.decode(listed, type=_Cards).data
    return [card.id for card in cards if card.parent is None]


def _bases(cards: dict[str, _Card]) -> list[_Card]:
    return [card for card in cards.values() if card.parent is None]


def _max_tokens(cards: dict[str, _Card], model: str | None) -> int | None:
    """Of one engine: an adapter takes what its model does, no name is the only model's."""
    bases = _bases(cards)
    card = cards.get(model) if model is not None else bases[0] if bases else None
    if card is not None and card.max_model_len is None and card.parent is not None:
        card = cards.get(card.parent)
    longest = None if card is None else card.max_model_len
    return longest if longest is not None and longest > 0 else None
