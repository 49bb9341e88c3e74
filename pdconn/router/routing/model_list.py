"""What engines list at ``GET /v1/models`` to one who asks: names, adapters, the longest prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from multidict import CIMultiDict

from pdconn.router.errors import BadBody
from pdconn.router.fleet.client import ConnectFailed, ConnectionLost

MODELS_FOR_S = 30.0
"""How long a list of models is used."""
MOST_SHOWN = 500
"""Characters of the names of models in an error."""

Ask = Callable[[str, str, CIMultiDict[str]], Awaitable[bytes]]
"""Requests a path of an engine, with headers."""


class CannotTokenise(Exception):
    """The prompt cannot be tokenized here; the text says why."""


class KeyRefused(CannotTokenise):
    """The engine wants another key."""


class Card(msgspec.Struct):
    """A model as an engine lists it; ``parent`` is an adapter's model, ``root`` its path."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[Card]


Cards = Mapping[str, Mapping[str, Card]]
"""By engine and name."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """The models that one client may know of.

    Attributes:
        cards: of the engines that have told of theirs.
        is_told: whether names in it may be told to the client; else engines judge names.
        differ: whether engines list different models.
    """

    cards: Cards
    is_told: bool = True
    differ: bool = field(init=False)

    def __post_init__(self) -> None:
        different = len({frozenset(cards) for cards in self.cards.values()}) > 1
        object.__setattr__(self, "differ", different)

    def serving(self, model: str) -> frozenset[str]:
        """The engines that list a model."""
        return frozenset(name for name, cards in self.cards.items() if model in cards)

    def only_model(self) -> str:
        """The model of a request that names none.

        Raises:
            BadBody: there are several.
        """
        found = sorted({card.id for cards in self.cards.values() for card in _bases(cards)})
        if len(found) == 1:
            return found[0]
        listed = f"one of {', '.join(found)[:MOST_SHOWN]}"
        raise BadBody("model", listed if found and self.is_told else "a model's name", "nothing")

    def adapter_path(self, model: str | None) -> str | None:
        """Where the adapter of this name comes from; None if it is none."""
        cards = (cards.get(model or "") for cards in self.cards.values())
        return next((card.root for card in cards if card and card.parent and card.root), None)

    def max_tokens_at(self, engine: str, model: str | None) -> int | None:
        """Tokens of the longest prompt and its answer that one engine takes, if it tells."""
        return _max_tokens(self.cards.get(engine, {}), model)

    def max_tokens(self, model: str | None) -> int | None:
        """Tokens of the longest prompt and its answer that any engine takes, if they tell."""
        found = [_max_tokens(cards, model) for cards in self.cards.values()]
        return max((one for one in found if one is not None), default=None)


class ModelList:
    """The models that engines list to one key, or to those without one; asked now and then.

    Args:
        ask: how to ask an engine.
        timeout_s: for an answer, and until the next try after one that failed.

    Attributes:
        cards: by engine; one that fails keeps its list, one that refuses the key has none.
        refused: engines that want another key.
        asked_at: when it was last asked for.
        rounds: how often it has changed.
    """

    def __init__(self, ask: Ask, timeout_s: float) -> None:
        self._ask = ask
        self._timeout_s = timeout_s
        self._until = 0.0
        self._asked: set[str] = set()
        self._round: asyncio.Task[None] | None = None
        self.cards: dict[str, Mapping[str, Card]] = {}
        self.refused: frozenset[str] = frozenset()
        self.asked_at = 0.0
        self.rounds = 0

    async def close(self) -> None:
        """Stop asking."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)

    @property
    def is_asking(self) -> bool:
        """Whether a round is under way."""
        return self._round is not None and not self._round.done()

    def expire(self) -> None:
        """Ask with the next request."""
        self._until = 0.0

    def is_fresh(self) -> bool:
        """Whether it need not be asked for now."""
        return asyncio.get_running_loop().time() < self._until

    async def refresh(
        self,
        engines: Iterable[str],
        headers: CIMultiDict[str],
        *,
        among: frozenset[str],
        waits: bool = False,
    ) -> None:
        """Ask engines, unless they are being asked; ``among``: all that are to tell.

        Waits only for engines that were never asked, or if told to, and only for half of the
        time-out.
        """
        self.asked_at = asyncio.get_running_loop().time()
        names = frozenset(engines)
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(
                self._ask_all(names, headers, among), name="ask for models"
            )
        if waits or not names <= self._asked:
            await asyncio.wait([self._round], timeout=self._timeout_s / 2)
        else:
            self._until = self.asked_at + self._timeout_s  # a round is under way

    async def _ask_all(
        self, names: frozenset[str], headers: CIMultiDict[str], among: frozenset[str]
    ) -> None:
        order = list(names)
        found = await asyncio.gather(*(self._cards_of(name, headers) for name in order))
        answers = dict(zip(order, found, strict=True))
        told = {name: one for name, one in answers.items() if isinstance(one, dict)}
        self.refused = frozenset(
            name for name, one in answers.items() if isinstance(one, KeyRefused)
        )
        known = {**self.cards, **told}
        self.cards = {name: one for name, one in known.items() if name not in self.refused}
        self._asked |= names
        self.rounds += 1
        now = asyncio.get_running_loop().time()
        is_complete = among <= told.keys() | self.refused
        self._until = now + (MODELS_FOR_S if is_complete else self._timeout_s)

    def keep(self, engines: frozenset[str]) -> None:
        """Forget the engines that are not among these."""
        if self.cards.keys() <= engines and self._asked <= engines:
            return
        self.cards = {name: one for name, one in self.cards.items() if name in engines}
        self._asked &= engines
        self.refused &= engines
        self.rounds += 1

    async def _cards_of(
        self, engine: str, headers: CIMultiDict[str]
    ) -> dict[str, Card] | KeyRefused | None:
        try:
            async with asyncio.timeout(self._timeout_s / 2):
                raw = await self._ask(engine, "/v1/models", headers)
            cards = msgspec.json.decode(raw, type=_Cards).data
        except KeyRefused as refusal:
            return refusal
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


def base_models(listed: bytes) -> list[str]:
    """The models, without adapters, in an engine's answer to ``GET /v1/models``.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is no such answer.
    """
    cards = msgspec.json.decode(listed, type=_Cards).data
    return [card.id for card in cards if card.parent is None]


def _bases(cards: Mapping[str, Card]) -> list[Card]:
    return [card for card in cards.values() if card.parent is None]


def _max_tokens(cards: Mapping[str, Card], model: str | None) -> int | None:
    """Of one engine: an adapter takes what its model does, no name is the only model's."""
    bases = _bases(cards)
    card = cards.get(model) if model is not None else bases[0] if bases else None
    if card is not None and card.max_model_len is None and card.parent is not None:
        card = cards.get(card.parent)
    longest = None if card is None else card.max_model_len
    return longest if longest is not None and longest > 0 else None
