"""Which engines serve a request's model, by what they list (``GET /v1/models``).

Where the lists of engines differ a request goes to those that serve its model, and an engine that
has not told of its models gets none.  Where all list the same, as they mostly do, names are the
engines' to judge.  Where the lengths of one model differ the longest prompt of any counts: what
none of them takes is refused here.

With whose key engines are asked:

1. the router's own, if it has one (``--engine-key-file``): one list for all;
2. otherwise with none: what an engine tells everybody is one list for all, too;
3. an engine that refuses that is asked with the client's key, and what it lists then is used for
   requests with that key alone.  So a client with a wrong key spoils no other's list, and no
   client learns what an engine told another.

A client whose key is refused has no list: its request goes to an engine, which refuses it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

from multidict import CIMultiDict

from pdconn.router.errors import UnknownModel
from pdconn.router.fleet.client import Authorization
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.routing.model_list import Ask, ModelList, ModelView
from pdconn.router.routing.policy import Role

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
        is_told: whether clients may be told of the list that was got with that key.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        ask: Ask,
        timeout_s: float,
        authorization: Authorization = lambda: None,
        *,
        is_told: bool = True,
    ) -> None:
        self._engines = engines
        self._ask = ask
        self._timeout_s = timeout_s
        self._authorization = authorization
        self._is_told = is_told
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
            return self._shared_view(is_told=key is None or self._is_told)
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

    def _shared_view(self, *, is_told: bool) -> ModelView:
        if self._view_of != self._shared.rounds or self._view.is_told != is_told:
            self._view = ModelView(self._shared.cards, is_told)
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

    async def serving(
        self, model: Callable[[], str | None], headers: CIMultiDict[str]
    ) -> frozenset[str] | None:
        """The engines that serve a model; None where all serve the same, or none has told.

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
        if view.is_told:
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
