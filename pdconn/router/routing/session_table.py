"""The sessions that clients have named, and the engines that keep them.

A session's name is a hint, never a proof: it says which engine to ask first where the router does
not see what caches hold, and whom to ask for a release.  What a prompt hits is decided by its
tokens, at the engine.

Engines report promises that they have broken in any answer that the router reads, since the next
turn may go elsewhere.  The table tells the session with its next answer, whichever engine gives it,
and once: an engine that the session comes back to reports its own promise again.

The table is bounded.  A new name takes the place of the oldest one of its own tenant, if that one
has as many as others may have, else of the tenant that has most.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from pdconn.router.metric_table import PromiseEnd
from pdconn.router.openai.session_orders import OF_STORE, BrokenReport, SessionName, SessionOrder
from pdconn.router.routing.request_events import Event, RequestEnded, TurnKept
from pdconn.router.routing.routed_request import RoutedRequest

MOST_SESSIONS = 10_000
MOST_KEEPERS = 8
"""Engines of one session that are remembered."""
MOST_REPORTED = 64
"""Broken promises that are read of one answer; an engine reports fewer."""
MOST_REASONS = 8
"""Reasons that are remembered of one engine, or for one answer; there are six."""


@dataclass(slots=True)
class SessionKeeper:
    """An engine that was asked to keep a session.

    Attributes:
        until: it was asked to, by ``time.monotonic``.
        broken: why its promises were broken, by answers to other requests.
        blocks_until: it keeps blocks, if it has granted less than was asked.
    """

    until: float
    broken: set[str] = field(default_factory=set)
    blocks_until: float = math.inf

    def blocks_left_s(self, now: float) -> float:
        """For how long it should keep blocks."""
        return min(self.until, self.blocks_until) - now

    def keeps_blocks(self, now: float) -> bool:
        """Whether it should keep the session's blocks."""
        return self.blocks_left_s(now) > 0 and all(why.startswith(OF_STORE) for why in self.broken)


@dataclass(slots=True)
class KnownSession:
    """One session.

    Attributes:
        seen_s: when its last turn ended, by ``time.monotonic``.
        turns: that have ended.
        keepers: by engine; oldest first.
        tokens: that prefill keeps, by its last answer.
        ends: what became of its promises.
        untold: why promises were broken, for its next answer.
        broken: as the last answer told; empty if it told of none.
        cut: what prefill has granted of more that was asked, for the next answer.
    """

    seen_s: float
    turns: int = 0
    keepers: dict[str, SessionKeeper] = field(default_factory=dict)
    tokens: int = 0
    ends: Counter[PromiseEnd] = field(default_factory=Counter)
    untold: list[str] = field(default_factory=list)
    broken: tuple[str, ...] = ()
    cut: str | None = None


class SessionTable:
    """Sessions by tenant and name.

    Args:
        most: sessions.
        clock: seconds that never go back.

    Attributes:
        when_told: called with what became of a promise, once an engine has told.
    """

    kinds: ClassVar[frozenset[type[Event]]] = frozenset((TurnKept, RequestEnded))

    def __init__(
        self, most: int = MOST_SESSIONS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._clock = most, clock
        self.when_told: Callable[[PromiseEnd], object] = _nothing
        self._tenants: dict[str, OrderedDict[str, KnownSession]] = {}
        self._number = 0

    def __len__(self) -> int:
        return self._number

    def newest(self, most: int) -> Iterator[tuple[SessionName, KnownSession]]:
        """The sessions whose turns ended last."""
        found = [
            (SessionName(tenant, name), one)
            for tenant, sessions in self._tenants.items()
            for name, one in list(sessions.items())[-most:]
        ]
        found.sort(key=lambda pair: pair[1].seen_s, reverse=True)
        yield from found[:most]

    def find_session(self, session: SessionName) -> KnownSession | None:
        """A session; None if it is not known, any more."""
        return self._tenants.get(session.tenant, OrderedDict()).get(session.name)

    def tokens_kept_at(self, session: SessionName, engine: str) -> int:
        """Tokens that a prefill engine should keep of a session, by its last answer."""
        known = self.find_session(session)
        keeper = None if known is None else known.keepers.get(engine)
        if known is None or keeper is None or not keeper.keeps_blocks(self._clock()):
            return 0
        return known.tokens

    def tokens_kept(self) -> Counter[str]:
        """Tokens that each engine should keep, of all sessions, by the last answers."""
        kept: Counter[str] = Counter()
        now = self._clock()
        for sessions in self._tenants.values():
            for known in sessions.values():
                for engine, keeper in known.keepers.items():
                    kept[engine] += known.tokens if keeper.keeps_blocks(now) else 0
        return kept

    def ask_to_keep(self, order: SessionOrder | None, engine: str) -> dict[str, object] | None:
        """What an engine is asked for a request's session, from now on; None for nothing."""
        if order is None or order.keep_s is None:
            return None
        known = self._known(order.session)
        before = known.keepers.pop(engine, None)
        if order.keep_s > 0:
            # Until the engine answers, an earlier promise may still be reported as broken.
            broken = set() if before is None else before.broken
            known.keepers[engine] = SessionKeeper(self._clock() + order.keep_s, broken)
        else:
            known.cut = None
        while len(known.keepers) > MOST_KEEPERS:
            del known.keepers[next(iter(known.keepers))]
        return order.to_params()

    def release(self, session: SessionName) -> tuple[str, ...]:
        """Forget who keeps a session; returns the engines that may keep it still."""
        known, now = self.find_session(session), self._clock()
        if known is None:
            return ()
        keepers, known.keepers, known.tokens = known.keepers, {}, 0
        known.untold, known.cut = [], None
        return tuple(engine for engine, keeper in keepers.items() if keeper.until > now)

    def note_broken(self, engine: str, reports: Iterable[BrokenReport]) -> None:
        """Note promises that an engine has broken, as its answer to any request reports.

        What is reported of sessions that are not known, or that the engine was not asked to keep,
        is dropped.
        """
        now = self._clock()
        for report in itertools.islice(reports, MOST_REPORTED):
            known = self.find_session(report.name)
            keeper = None if known is None else known.keepers.get(engine)
            if known is None or keeper is None or keeper.until <= now:
                continue
            if report.why not in keeper.broken and len(keeper.broken) < MOST_REASONS:
                keeper.broken.add(report.why)
                self._note_end_broken(known, report.why)

    def take_untold(self, session: SessionName) -> tuple[str, ...]:
        """Why promises of a session were broken since its last answer; each is told once."""
        known = self.find_session(session)
        if known is None:
            return ()
        known.broken, known.untold = tuple(known.untold), []
        return known.broken

    def take_cut(self, session: SessionName) -> str | None:
        """What prefill has granted of more that was asked; told once.

        A stream's answer may begin before prefill's is there, and a prefetch is answered before it
        is sent: then it is for the session's next answer.
        """
        known = self.find_session(session)
        if known is None:
            return None
        cut, known.cut = known.cut, None
        return cut

    def _note_end_broken(self, known: KnownSession, why: str) -> None:
        known.ends[PromiseEnd.BROKEN] += 1
        self.when_told(PromiseEnd.BROKEN)
        if why not in known.untold and len(known.untold) < MOST_REASONS:
            known.untold.append(why)

    def saw(self, request: RoutedRequest, event: Event) -> None:
        """Note an event of a request with a session."""
        order = request.session
        if order is None:
            return
        known = self._known(order.session)
        if isinstance(event, TurnKept):
            known.ends.update(event.ends)
            for end in event.ends:
                self.when_told(end)
            keeper = known.keepers.get(event.engine) or SessionKeeper(0.0)
            for why in event.report.all_broken:
                if why not in keeper.broken:  # else another answer has reported it before
                    self._note_end_broken(known, why)
            keeper.broken.clear()
            if event.report.seconds is not None:
                keeper.blocks_until = self._clock() + event.report.seconds
            if event.is_prefill:
                known.tokens, known.cut = event.report.tokens, event.report.cut
        else:
            known.turns += 1

    def _known(self, session: SessionName) -> KnownSession:
        """A session, as the newest one of its tenant."""
        his = self._tenants.setdefault(session.tenant, OrderedDict())
        known = his.get(session.name)
        if known is None:
            known = his[session.name] = KnownSession(self._clock())
            self._number += 1
            if self._number > self._most:
                self._forget_one(session.tenant)
        known.seen_s = self._clock()
        his.move_to_end(session.name)
        return known

    def _forget_one(self, tenant: str) -> None:
        if len(self._tenants[tenant]) * len(self._tenants) <= self._number:
            tenant = max(self._tenants, key=lambda name: len(self._tenants[name]))
        his = self._tenants[tenant]
        his.popitem(last=False)
        self._number -= 1
        if not his:
            del self._tenants[tenant]


def _nothing(end: PromiseEnd) -> None:
    del end
