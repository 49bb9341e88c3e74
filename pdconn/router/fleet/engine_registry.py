"""The engines of the fleet, and their eligibility for requests.  Pure: no clock, no IO.

    up ──a request failed──► down ──/health answers 200──► up
                              │ ▲
                              └─┘ /health fails: the next probe waits twice as long

An engine counts as up until a request to it fails; nothing is probed while requests succeed.  An
engine with both roles goes down in both.

An engine that is up and answers 429, 500, 502, 503 or 504, or breaks connections, keeps its share
of requests until ``MOST_IN_A_ROW`` of them have failed without a success in between.  Then it
rests: 1 s, 2, 4, 8, 15, 15, ... until the next failure; its next successful answer ends that.  An
engine that sends ``Retry-After`` rests for that long, from its first failure.

    ANSWERS ──fails, three in a row──► RESTS ──time──► gets requests again ──fails──► RESTS, longer
       ▲                                                         │
       └──────────────────────────answers────────────────────────┘

A resting engine is asked only if no other is left.

Engines join, drain and leave while requests run (``update``).  A draining engine finishes its
requests and gets no new ones; an engine that left is removed, and answers that it still sends reach
their clients.  Components with state per engine (probes, metrics, loads) compare it with the
registry after each update, so a missed notification has no lasting effect.

An engine that is listed in both roles may serve one of them at a time (``assign_roles``); it is
asked for the other only if no engine serves that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self

from pdconn.router.fleet.lenders import KnownLenders
from pdconn.router.fleet.member import Member, Role, merged
from pdconn.router.router_errors import EngineFailure

MOST_IN_A_ROW = 3
"""Small, but above 1: one failure may be the request's own, and a client could repeat it."""
FIRST_REST_S = 1.0
LONGEST_REST_S = 15.0
"""Bounds of a rest, as of the pauses between two probes of an engine that is down."""
LONGEST_NAMED_S = 60.0
"""Maximum of ``Retry-After``: no header removes an engine for good."""


@dataclass(slots=True)
class _Failing:
    in_a_row: int = 0
    until_s: float = 0.0


class EngineRests:
    """Tracks which engines rest."""

    def __init__(self) -> None:
        self._failing: dict[str, _Failing] = {}

    def __len__(self) -> int:
        """Engines whose last request failed; usually 0."""
        return len(self._failing)

    def note_failure(self, engine: str, now: float, named_s: float | None = None) -> float | None:
        """Note a failure; returns the seconds that the engine rests from now on, if it does.

        Failures of requests that were sent before the rest began count once.
        """
        failing = self._failing.setdefault(engine, _Failing())
        # 1. It rests already: the request was sent before.
        if now < failing.until_s and named_s is None:
            return None
        # 2. From MOST_IN_A_ROW failures on, each one doubles the rest.
        failing.in_a_row += 1
        over = failing.in_a_row - MOST_IN_A_ROW
        rest_s = min(FIRST_REST_S * 2.0 ** min(over, 16), LONGEST_REST_S) if over >= 0 else 0.0
        # 3. The engine names a time itself (Retry-After), also at its first failure.
        if named_s is not None:
            rest_s = max(rest_s, min(named_s, LONGEST_NAMED_S))
        if not rest_s:
            return None
        failing.until_s = max(failing.until_s, now + rest_s)
        return rest_s

    def note_success(self, engine: str) -> None:
        """Note an answer that is not such a failure."""
        self._failing.pop(engine, None)

    def is_resting(self, engine: str, now: float) -> bool:
        """Whether other engines are preferred now."""
        failing = self._failing.get(engine)
        return failing is not None and now < failing.until_s

    def keep_engines(self, engines: Collection[str]) -> None:
        """Forget all other engines."""
        self._failing = {name: one for name, one in self._failing.items() if name in engines}


FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 15.0


class KeptPerEngine(Protocol):
    """State per engine, without a reference to the registry."""

    def keep_engines(self, engines: Collection[str]) -> None:
        """Forget all other engines."""


class FleetFollower(Protocol):
    """A component with state per engine, which it compares with the registry after an update."""

    def fleet_changed(self) -> None:
        """React to engines that joined or left."""
        ...


@dataclass(frozen=True, slots=True)
class Outage:
    """Why an engine is down, and how many requests and probes in a row have failed."""

    why: str
    num_failures: int
    first_backoff_s: float = FIRST_BACKOFF_S

    @property
    def backoff_s(self) -> float:
        """Seconds to wait before the next probe: 1, 2, 4, 8, 15, 15, ..."""
        doublings = min(self.num_failures - 1, 16)  # keeps the power small
        return min(self.first_backoff_s * float(2**doublings), LONGEST_BACKOFF_S)


@dataclass(frozen=True, slots=True)
class Changes:
    """The engines that an update changed; ``resumed`` ones no longer drain."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    roles_changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        """For the log: ``added=http://a:1,http://b:1 drained=http://c:1``."""
        changes = ((field.name, getattr(self, field.name)) for field in fields(self))
        return " ".join(f"{name}={','.join(engines)}" for name, engines in changes if engines)


@dataclass(frozen=True, slots=True)
class _Standing:
    """The state of an engine that ``Changes`` compares."""

    roles: tuple[Role, ...]
    draining: bool


class EngineRegistry:
    """All engines by role, the draining ones, and the outage of each that is down.

    Attributes:
        rests: engines that are up but keep failing requests.
        lenders: where engines lend from, since they came up.
    """

    def __init__(
        self,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        *,
        first_backoff_s: float = FIRST_BACKOFF_S,
    ) -> None:
        self._first_backoff_s = first_backoff_s
        self._by_role = {Role.PREFILL: tuple(prefill), Role.DECODE: tuple(decode)}
        self._draining: frozenset[str] = frozenset()
        self._outages: dict[str, Outage] = {}
        self._assigned: dict[str, Role | None] = {}
        self.rests = EngineRests()
        self.lenders = KnownLenders()

    @classmethod
    def from_members(
        cls, members: Iterable[Member], *, first_backoff_s: float = FIRST_BACKOFF_S
    ) -> Self:
        """The fleet of these members."""
        engines = cls(first_backoff_s=first_backoff_s)
        engines.update(members)
        return engines

    def update(self, members: Iterable[Member]) -> Changes:
        """Replace the fleet; engines that stay keep their outages."""
        before = self._standings()
        fleet = merged(members)
        self._by_role = {role: tuple(m.url for m in fleet if role in m.roles) for role in Role}
        self._draining = frozenset(member.url for member in fleet if member.draining)
        after = self._standings()
        for name in before.keys() - after.keys():
            self._outages.pop(name, None)
            self._assigned.pop(name, None)
        kept: tuple[KeptPerEngine, ...] = (self.rests, self.lenders)
        for one in kept:
            one.keep_engines(after)
        return _compare(before, after)

    def _standings(self) -> dict[str, _Standing]:
        return {name: _Standing(self.roles(name), self.is_draining(name)) for name in self.names}

    def __contains__(self, engine: str) -> bool:
        return any(engine in names for names in self._by_role.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Every engine once, prefill first."""
        return tuple(dict.fromkeys(self._by_role[Role.PREFILL] + self._by_role[Role.DECODE]))

    def in_role(self, role: Role) -> tuple[str, ...]:
        """The engines of a role, up, draining or down."""
        return self._by_role[role]

    def roles(self, engine: str) -> tuple[Role, ...]:
        """The roles of an engine."""
        return tuple(role for role in Role if engine in self._by_role[role])

    def live(self, role: Role, among: frozenset[str] | None = None) -> tuple[str, ...]:
        """The engines of a role that get requests: up and not draining; restricted to ``among``."""
        all_are_live = not (self._outages or self._draining or self._assigned)
        if among is None and all_are_live:  # nearly always
            return self._by_role[role]
        out = self._outages.keys() | self._draining
        live = (name for name in self._by_role[role] if name not in out)
        found = tuple(live if among is None else (name for name in live if name in among))
        if not self._assigned:
            return found
        # Any engine is better than none: a request is not lost to a change of roles.
        return tuple(name for name in found if self._assigned.get(name, role) is role) or found

    def assign_roles(self, serves: Mapping[str, Role | None]) -> None:
        """Let engines serve one role of those that they are listed in; None: neither, for now."""
        self._assigned = {name: role for name, role in serves.items() if len(self.roles(name)) > 1}

    def between_roles(self, among: frozenset[str] | None = None) -> tuple[str, ...]:
        """Engines that are up and change their role; they lend what they hold."""
        changing = [name for name, role in self._assigned.items() if role is None]
        return tuple(
            name
            for name in changing
            if name not in self._outages and (among is None or name in among)
        )

    def answering(self) -> tuple[str, ...]:
        """Engines that are up and not draining, whatever they serve."""
        out = self._outages.keys() | self._draining
        return tuple(name for name in self.names if name not in out)

    def awake(self, role: Role, among: frozenset[str] | None, now: float) -> tuple[str, ...]:
        """The engines of ``live`` that do not rest."""
        live = self.live(role, among)
        if not len(self.rests):
            return live
        return tuple(name for name in live if not self.rests.is_resting(name, now))

    def is_draining(self, engine: str) -> bool:
        """Whether an engine gets no new requests."""
        return engine in self._draining

    def outage(self, engine: str) -> Outage | None:
        """The outage of an engine; None if it is up."""
        return self._outages.get(engine)

    def failures(
        self, role: Role, tried: Sequence[EngineFailure] = ()
    ) -> tuple[EngineFailure, ...]:
        """Why each engine of a role failed: the tried ones, then those that get no requests."""
        asked = {one.engine for one in tried}
        known = ((name, self._why_not(name)) for name in self._by_role[role] if name not in asked)
        return (*tried, *(EngineFailure(name, why) for name, why in known if why is not None))

    def _why_not(self, engine: str) -> str | None:
        if self.is_draining(engine):
            return "draining"  # regardless of whether it is up
        outage = self._outages.get(engine)
        return None if outage is None else outage.why

    def mark_down(self, engine: str, why: str) -> Outage:
        """Note that a request or a probe failed.

        Raises:
            KeyError: the engine is not in the fleet; its outage would never be removed.
        """
        if engine not in self:
            raise KeyError(engine)
        before = self._outages.get(engine)
        num_failures = 1 if before is None else before.num_failures + 1
        self.lenders.forget_engine(engine)
        outage = Outage(why, num_failures, self._first_backoff_s)
        self._outages[engine] = outage
        return outage

    def mark_up(self, engine: str) -> bool:
        """Note that an engine answers; returns True if it was down."""
        return self._outages.pop(engine, None) is not None


def _compare(before: dict[str, _Standing], after: dict[str, _Standing]) -> Changes:
    stayed = [(name, before[name], now) for name, now in after.items() if name in before]
    return Changes(
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        drained=tuple(n for n, was, now in stayed if now.draining and not was.draining),
        resumed=tuple(n for n, was, now in stayed if was.draining and not now.draining),
        roles_changed=tuple(n for n, was, now in stayed if was.roles != now.roles),
    )
