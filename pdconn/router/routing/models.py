"""The engines that serve a request's model, according to their lists (``GET /v1/models``).

Where the lists of engines differ, a request goes to those that serve its model, and an engine
without a list gets none.  Where all lists are equal, as is usual, the engines check names
themselves.  Where the lengths of one model differ the longest counts: a prompt beyond it is refused
here.

The key of the question depends on the configuration:

1. the router's own, if it has one (``--engine-key-file``): one list for all clients;
2. otherwise none: a list that an engine returns without a key is also valid for all clients;
3. an engine that refuses this is asked with the client's key, and its list is used for requests
   with that key alone.  So a client with a wrong key affects no other client's list, and no client
   sees a list that an engine returned to another.

A client whose key is refused has no list: its request goes to an engine, which refuses it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import Authorization, ConnectFailed, ConnectionLost
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.member import Role
from pdconn.router.openai.bodies import Card, ModelCards
from pdconn.router.openai.requests import asking, text
from pdconn.router.router_errors import BadBody, UnknownModel
from pdconn.router.routing.routed_request import RoutedRequest

MODELS_FOR_S = 30.0
"""Seconds for which a list of models is used."""
MOST_SHOWN = 500
"""Maximum characters of model names in an error."""

Ask = Callable[[str, str, CIMultiDict[str]], Awaitable[bytes]]
"""Requests a path of an engine, with headers."""


class CannotTokenise(Exception):
    """The prompt cannot be tokenized here; the message says why."""


class KeyRefused(CannotTokenise):
    """The engine requires another key."""


Cards = Mapping[str, Mapping[str, Card]]
"""Cards by engine and name."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """The models that are visible to one client.

    Attributes:
        cards: of the engines that have returned a list.
        is_shown: whether errors for the client may contain names; else the engines check names.
        differ: whether engines list different models.
    """

    cards: Cards
    is_shown: bool = True
    differ: bool = field(init=False)

    def __post_init__(self) -> None:
        different = len({frozenset(cards) for cards in self.cards.values()}) > 1
        object.__setattr__(self, "differ", different)

    def engines_serving(self, model: str) -> frozenset[str]:
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
        """The path of an adapter; None if the name is no adapter's."""
        cards = (cards.get(model or "") for cards in self.cards.values())
        return next((card.root for card in cards if card and card.parent and card.root), None)

    def max_tokens_at(self, engine: str, model: str | None) -> int | None:
        """Maximum tokens of prompt and answer at one engine, if it reports them."""
        return _max_tokens(self.cards.get(engine, {}), model)

    def max_tokens(self, model: str | None) -> int | None:
        """Maximum tokens of prompt and answer at any engine, if they report them."""
        found = [_max_tokens(cards, model) for cards in self.cards.values()]
        return max((one for one in found if one is not None), default=None)


class ModelList:
    """The models that engines list to one key, or without a key; refreshed periodically.

    Args:
        ask: requests a path of an engine.
        timeout_s: for an answer, and before the next try after a failure.

    Attributes:
        cards: by engine; a failing engine keeps its list, one that refuses the key has none.
        refused: engines that require another key.
        asked_at: time of the last refresh.
        rounds: number of changes.
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
        """Whether a refresh is in progress."""
        return self._round is not None and not self._round.done()

    def expire(self) -> None:
        """Refresh with the next request."""
        self._until = 0.0

    def is_fresh(self) -> bool:
        """Whether no refresh is due."""
        return asyncio.get_running_loop().time() < self._until

    async def refresh(
        self,
        engines: Iterable[str],
        headers: CIMultiDict[str],
        *,
        among: frozenset[str],
        waits: bool = False,
    ) -> None:
        """Refresh, unless a refresh is in progress; ``among``: all engines that are to list theirs.

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
            self._until = self.asked_at + self._timeout_s  # a refresh is in progress

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

    def keep_engines(self, engines: Collection[str]) -> None:
        """Forget all other engines."""
        kept = frozenset(engines)
        if self.cards.keys() <= kept and self._asked <= kept:
            return
        self.cards = {name: one for name, one in self.cards.items() if name in kept}
        self._asked &= kept
        self.refused &= kept
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
    """The length at one engine: an adapter has its base model's, no name means the only model."""
    bases = _bases(cards)
    card = cards.get(model) if model is not None else bases[0] if bases else None
    if card is not None and card.max_model_len is None and card.parent is not None:
        card = cards.get(card.parent)
    longest = None if card is None else card.max_model_len
    return longest if longest is not None and longest > 0 else None


UNKNOWN_AGAIN_S = 1.0
"""Least seconds between two refreshes that are caused by unknown names."""
MOST_KEYS = 256
"""Client keys whose lists are kept; keys that engines refuse are dropped first."""
MOST_QUESTIONS = 32
"""Concurrent requests to engines with clients' keys."""


class ModelCatalog:
    """The models of every engine, as visible to each client.

    Args:
        engines: the engines to ask.
        ask: requests a path of an engine.
        timeout_s: for an answer, and before the next try after a failure.
        authorization: the router's own key.
        is_shown: whether clients may see names from the list for that key.
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
        """Ask new engines with the next request."""
        for one in (self._shared, *(of_key.models for of_key in self._of_keys.values())):
            one.expire()

    async def view_for(self, headers: CIMultiDict[str], *, again: bool = False) -> ModelView:
        """The models visible to the client with these headers.

        Args:
            again: refresh and wait for the answers, unless that happened just now.
        """
        live = (*self._engines.live(Role.DECODE), *self._engines.live(Role.PREFILL))
        key = self._authorization()
        fleet = frozenset(self._engines.names)
        await self._update(self._shared, live, _with_key(headers, key), fleet, again=again)
        # 1. All engines answered with the router's own key, or without one: one list for all.
        refusing = [] if key is not None else [n for n in live if n in self._shared.refused]
        if not refusing or "Authorization" not in headers:
            return self._shared_view(is_shown=key is None or self._is_shown)
        # 2. Some refuse that: they are asked with the client's key, for requests with it.
        mine = self._list_of(headers["Authorization"])
        await self._update(mine.models, refusing, headers, self._shared.refused, again=again)
        return mine.view_beside(self._shared)

    async def _update(
        self,
        models: ModelList,
        engines: Sequence[str],
        headers: CIMultiDict[str],
        among: frozenset[str],
        *,
        again: bool,
    ) -> None:
        models.keep_engines(among)
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
        """Drop the least recently used key; first those that no engine accepts.

        A key with a refresh in progress goes last, since that would continue and be repeated.
        """
        idle = [name for name, one in self._of_keys.items() if not one.models.is_asking]
        refused = (name for name in idle if not self._of_keys[name].models.cards)
        del self._of_keys[next(refused, next(iter(idle or self._of_keys)))]

    async def _bounded(self, engine: str, path: str, headers: CIMultiDict[str]) -> bytes:
        async with self._questions:
            return await self._ask(engine, path, headers)

    def matters(self) -> bool:
        """Whether engines list different models, so that a request has to be matched."""
        shared = self._shared
        is_known = shared.is_fresh() and self._view_of == shared.rounds
        return not is_known or self._view.differ or bool(shared.refused)

    async def engines_for_request(self, request: RoutedRequest) -> frozenset[str] | None:
        """The engines that serve the model of a request; None for all.

        Raises:
            UnknownModel, BadBody: as :meth:`engines_for`.
        """
        if not self.matters():
            return None
        fields = request.body.fields
        return await self.engines_for(lambda: text(fields.get("model")), asking(request.headers))

    async def engines_for(
        self, model: Callable[[], str | None], headers: CIMultiDict[str]
    ) -> frozenset[str] | None:
        """The engines that serve a model; None if all serve the same, or none has returned a list.

        ``model`` reads the name from the request; it is not called if all serve the same.

        Raises:
            UnknownModel: no engine serves the model.
            BadBody: the request names no model, and there are several.
        """
        view = await self.view_for(headers)
        # 1. All engines list the same models: they check the name themselves.
        if not view.differ:
            return None
        # 2. Some list it, perhaps only after a refresh.
        name = model()
        if name is None:
            name = view.only_model()
        found = view.engines_serving(name)
        if not found:  # perhaps an adapter that was loaded just now
            view = await self.view_for(headers, again=True)
            found = view.engines_serving(name)
        if found:
            return found
        # 3. None lists it: the router refuses it, unless the client may not see the list.
        if view.is_shown:
            raise UnknownModel(name)
        return None


class _OfKey:
    """The lists for one client's key, beside those for all."""

    def __init__(self, models: ModelList) -> None:
        self.models = models
        self._made: tuple[tuple[int, int], ModelView] | None = None

    def view_beside(self, shared: ModelList) -> ModelView:
        """All models visible to the key."""
        state = (self.models.rounds, shared.rounds)
        if self._made is None or self._made[0] != state:
            self._made = state, ModelView({**shared.cards, **self.models.cards})
        return self._made[1]


def _with_key(headers: CIMultiDict[str], key: str | None) -> CIMultiDict[str]:
    """The headers of a question of the router itself."""
    ours = headers.copy()
    ours.popall("Authorization", None)
    if key is not None:
        ours["Authorization"] = key
    return ours
