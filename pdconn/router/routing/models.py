"""Which engines serve a request's model, by what they list (``GET /v1/models``).

Where the lists of engines differ a request goes to those that serve its model, and an engine that
has not listed its models gets none.  Where all list the same, as they mostly do, names are the
engines' to judge.  Where the lengths of one model differ the longest prompt of any counts: what
none of them takes is refused here.

With whose key engines are asked:

1. the router's own, if it has one (``--engine-key-file``): one list for all;
2. otherwise with none: what an engine lists without a key is one list for all, too;
3. an engine that refuses that is asked with the client's key, and what it lists then is used for
   requests with that key alone.  So a client with a wrong key spoils no other's list, and no
   client learns what an engine listed to another.

A client whose key is refused has no list: its request goes to an engine, which refuses it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from multidict import CIMultiDict

from pdconn.router.errors import BadBody, UnknownModel
from pdconn.router.fleet.client import Authorization, ConnectFailed, ConnectionLost
from pdconn.router.fleet.member import Role
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.openai.bodies import Card, ModelCards
from pdconn.router.openai.requests import asking, text
from pdconn.router.routing.routed_request import RoutedRequest

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


Cards = Mapping[str, Mapping[str, Card]]
"""By engine and name."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """The models that one client may know of.

    Attributes:
        cards: of the engines that have listed theirs.
        is_shown: whether the client may read names in it; else engines judge names.
        differ: whether engines list different models.
    """

    cards: Cards
    is_shown: bool = True
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
        raise BadBody("model", listed if found and self.is_shown else "a model's name", "nothing")

    def adapter_path(self, model: str | None) -> str | None:
        """Where the adapter of this name comes from; None if it is none."""
        cards = (cards.get(model or "") for cards in self.cards.values())
        return next((card.root for card in cards if card and card.parent and card.root), None)

    def max_tokens_at(self, engine: str, model: str | None) -> int | None:
        """Tokens of the longest prompt and its answer that one engine takes, if it says so."""
        return _max_tokens(self.cards.get(engine, {}), model)

    def max_tokens(self, model: str | None) -> int | None:
        """Tokens of the longest prompt and its answer that any engine takes, if they say so."""
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
        """Ask engines, unless they are being asked; ``among``: all that are to list theirs.

        Waits only for engines that were never asked, or with ``waits``, and only for half of the
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
        listed = {name: one for name, one in answers.items() if isinstance(one, dict)}
        self.refused = frozenset(
            name for name, one in answers.items() if isinstance(one, KeyRefused)
        )
        known = {**self.cards, **listed}
        self.cards = {name: one for name, one in known.items() if name not in self.refused}
        self._asked |= names
        self.rounds += 1
        now = asyncio.get_running_loop().time()
        is_complete = among <= listed.keys() | self.refused
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
            cards = msgspec.json.decode(raw, type=ModelCards).data
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


UNKNOWN_AGAIN_S = 1.0
"""How soon a name that no engine lists makes the router ask again."""
MOST_KEYS = 256
"""Of clients, whose lists are kept; those that engines refuse are forgotten first."""
MOST_QUESTIONS = 32
"""To engines at a time that are asked with clients' keys."""


class ModelCatalog:
    """The models of every engine, as each client may know of them.

    Args:
        engines: those to ask.
        ask: how.
        timeout_s: for an answer, and until the next try after one that failed.
        authorization: with the router's own key.
        is_shown: whether clients may read the list that was got with that key.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        ask: Ask,
        timeout_s: float,
        authorization: Authorization = lambda: None,
        *,
        is_shown: bool = True,
    ) -> None:
        self._engines = engines
        self._ask = ask
        self._timeout_s = timeout_s
        self._authorization = authorization
        self._is_shown = is_shown
        self._shared = ModelList(ask, timeout_s)
        self._view = ModelView({})
        self._view_of = -1
        self._of_keys: OrderedDict[bytes, _OfKey] = OrderedDict()
        self._questions = asyncio.Semaphore(MOST_QUESTIONS)

    async def close(self) -> None:
        """Stop asking."""
        await self._shared.close()
        await asyncio.gather(*(one.models.close() for one in self._of_keys.values()))

    def fleet_changed(self) -> None:
        """Ask the engines that joined, with the next request."""
        for one in (self._shared, *(of_key.models for of_key in self._of_keys.values())):
            one.expire()

    async def view(self, headers: CIMultiDict[str], *, again: bool = False) -> ModelView:
        """What the client whose headers these are may know.

        Args:
            again: ask, and wait for the answers, unless that was done just now.
        """
        live = (*self._engines.live(Role.DECODE), *self._engines.live(Role.PREFILL))
        key = self._authorization()
        fleet = frozenset(self._engines.names)
        await self._update(self._shared, live, _with_key(headers, key), fleet, again=again)
        refusing = [] if key is not None else [n for n in live if n in self._shared.refused]
        if not refusing or "Authorization" not in headers:
            return self._shared_view(is_shown=key is None or self._is_shown)
        mine = self._list_of(headers["Authorization"])
        await self._update(mine.models, refusing, headers, self._shared.refused, again=again)
        return mine.view(self._shared)

    async def _update(
        self,
        models: ModelList,
        engines: Sequence[str],
        headers: CIMultiDict[str],
        among: frozenset[str],
        *,
        again: bool,
    ) -> None:
        models.keep(among)
        age_s = asyncio.get_running_loop().time() - models.asked_at
        if not models.is_fresh() or (again and age_s >= UNKNOWN_AGAIN_S):
            await models.refresh(engines, headers, among=among, waits=again)

    def _shared_view(self, *, is_shown: bool) -> ModelView:
        if self._view_of != self._shared.rounds or self._view.is_shown != is_shown:
            self._view = ModelView(self._shared.cards, is_shown)
            self._view_of = self._shared.rounds
        return self._view

    def _list_of(self, authorization: str) -> _OfKey:
        name = hashlib.sha256(authorization.encode(errors="surrogateescape")).digest()
        found = self._of_keys.get(name)
        if found is None:
            if len(self._of_keys) >= MOST_KEYS:
                self._forget_one()
            found = self._of_keys[name] = _OfKey(ModelList(self._bounded, self._timeout_s))
        self._of_keys.move_to_end(name)
        return found

    def _forget_one(self) -> None:
        """The key used least recently; first those that no engine takes.

        One that is being asked for goes last: its round would go on, and be asked for again.
        """
        idle = [name for name, one in self._of_keys.items() if not one.models.is_asking]
        refused = (name for name in idle if not self._of_keys[name].models.cards)
        del self._of_keys[next(refused, next(iter(idle or self._of_keys)))]

    async def _bounded(self, engine: str, path: str, headers: CIMultiDict[str]) -> bytes:
        async with self._questions:
            return await self._ask(engine, path, headers)

    def matters(self) -> bool:
        """Whether ``serving`` has anything to do; not if all engines list the same models."""
        shared = self._shared
        is_known = shared.is_fresh() and self._view_of == shared.rounds
        return not is_known or self._view.differ or bool(shared.refused)

    async def serving_request(self, request: RoutedRequest) -> frozenset[str] | None:
        """The engines that serve the model of a request; None: all do.

        Raises:
            UnknownModel, BadBody: as ``serving``.
        """
        if not self.matters():
            return None
        fields = request.body.fields
        return await self.serving(lambda: text(fields.get("model")), asking(request.headers))

    async def serving(
        self, model: Callable[[], str | None], headers: CIMultiDict[str]
    ) -> frozenset[str] | None:
        """The engines that serve a model; None where all serve the same, or none has listed any.

        ``model`` reads the name from the request, and is not called where all serve the same.

        Raises:
            UnknownModel: no engine serves it.
            BadBody: the request names none, and there are several.
        """
        view = await self.view(headers)
        if not view.differ:
            return None
        name = model()
        if name is None:
            name = view.only_model()
        found = view.serving(name)
        if not found:  # perhaps an adapter that was loaded just now
            view = await self.view(headers, again=True)
            found = view.serving(name)
        if found:
            return found
        if view.is_shown:
            raise UnknownModel(name)
        return None


class _OfKey:
    """What engines list to one client's key, beside what they list to all."""

    def __init__(self, models: ModelList) -> None:
        self.models = models
        self._made: tuple[tuple[int, int], ModelView] | None = None

    def view(self, shared: ModelList) -> ModelView:
        """All that the key may know of."""
        state = (self.models.rounds, shared.rounds)
        if self._made is None or self._made[0] != state:
            self._made = state, ModelView({**shared.cards, **self.models.cards})
        return self._made[1]


def _with_key(headers: CIMultiDict[str], key: str | None) -> CIMultiDict[str]:
    """The headers of a question that is the router's own."""
    ours = headers.copy()
    ours.popall("Authorization", None)
    if key is not None:
        ours["Authorization"] = key
    return ours
