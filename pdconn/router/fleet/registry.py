"""The engines a proxy knows, and which of them get requests.  Pure: no clock, no IO.

    up ──asked in vain──► down ──/health answers──► up
                           │ ▲
                           └─┘ /health fails: the next probe waits twice as long

An engine is believed to be up until it was asked in vain; nothing is probed
while everything works.  One engine may hold both roles, and is down for both.

Engines come, drain and go while requests run (``update``).  One that drains is
offered to nobody and finishes what it has; one that is gone is forgotten, and
what it still answers reaches its clients.  Those who keep something per engine
(probes, metrics, loads) compare what they keep with this after an update, so
that a change they were not told of does no lasting harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Self

from pdconn.router.errors import Miss
from pdconn.router.fleet.member import Member, engine_name, merged
from pdconn.router.routing.policy import Role

__all__ = ["Changes", "EngineRegistry", "Outage", "engine_name"]

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 15.0


@dataclass(frozen=True, slots=True)
class Outage:
    """An engine is down: why, and how often in a row it was asked in vain."""

    why: str
    num_failures: int

    @property
    def backoff_s(self) -> float:
        """Seconds to wait before the next probe: 1, 2, 4, 8, 15, 15, ..."""
        doublings = min(self.num_failures - 1, 16)  # keeps the power small
        return min(FIRST_BACKOFF_S * float(2**doublings), LONGEST_BACKOFF_S)


@dataclass(frozen=True, slots=True)
class Changes:
    """What an update changed, by name; an engine is ``recast`` when its roles are others."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    revived: tuple[str, ...] = ()
    recast: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        """For the log: ``added=http://a:1,http://b:1 drained=http://c:1``."""
        told = ((field.name, getattr(self, field.name)) for field in fields(self))
        return " ".join(f"{name}={','.join(engines)}" for name, engines in told if engines)


@dataclass(frozen=True, slots=True)
class _Standing:
    """What members say of an engine, as two moments are compared."""

    roles: tuple[Role, ...]
    draining: bool


class EngineRegistry:
    """Every engine by role, those that drain, and the outage of each that is down."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._by_role = {Role.PREFILL: tuple(prefill), Role.DECODE: tuple(decode)}
        self._draining: frozenset[str] = frozenset()
        self._outages: dict[str, Outage] = {}

    @classmethod
    def from_members(cls, members: Iterable[Member]) -> Self:
        """A fleet as its sources tell of it."""
        engines = cls((), ())
        engines.update(members)
        return engines

    def update(self, members: Iterable[Member]) -> Changes:
        """Make these the fleet: the outages of those that stay, stay."""
        before = self._standings()
        fleet = merged(members)
        self._by_role = {role: tuple(m.url for m in fleet if role in m.roles) for role in Role}
        self._draining = frozenset(member.url for member in fleet if member.draining)
        after = self._standings()
        for name in before.keys() - after.keys():
            self._outages.pop(name, None)
        return _compare(before, after)

    def _standings(self) -> dict[str, _Standing]:
        return {name: _Standing(self.roles(name), self.is_draining(name)) for name in self.names}

    def __contains__(self, engine: str) -> bool:
        return any(engine in names for names in self._by_role.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Every engine once, prefill first."""
        return tuple(dict.fromkeys(self._by_role[Role.PREFILL] + self._by_role[Role.DECODE]))

    def of(self, role: Role) -> tuple[str, ...]:
        """The engines of a role, up, draining or down."""
        return self._by_role[role]

    def roles(self, engine: str) -> tuple[Role, ...]:
        """The roles an engine holds."""
        return tuple(role for role in Role if engine in self._by_role[role])

    def live(self, role: Role) -> tuple[str, ...]:
        """The engines of a role that get requests: up, as far as we know, and not draining."""
        out = self._outages.keys() | self._draining
        return tuple(name for name in self._by_role[role] if name not in out)

    def is_draining(self, engine: str) -> bool:
        """Whether an engine finishes what it has and gets nothing new."""
        return engine in self._draining

    def outage(self, engine: str) -> Outage | None:
        """Why an engine is down, or None when it is up."""
        return self._outages.get(engine)

    def misses(self, role: Role, tried: Sequence[Miss] = ()) -> tuple[Miss, ...]:
        """Why each engine of a role did not do: those tried, then those not offered."""
        asked = {miss.engine for miss in tried}
        known = ((name, self._why_not(name)) for name in self._by_role[role] if name not in asked)
        return (*tried, *(Miss(name, why) for name, why in known if why is not None))

    def _why_not(self, engine: str) -> str | None:
        if self.is_draining(engine):
            return "draining"  # it would not be asked if it were up either
        outage = self._outages.get(engine)
        return None if outage is None else outage.why

    def mark_down(self, engine: str, why: str) -> Outage:
        """Note that an engine was asked in vain, once more if it is down already.

        Raises:
            KeyError: it is none of the fleet, and its outage would stay for ever.
        """
        if engine not in self:
            raise KeyError(engine)
        before = self._outages.get(engine)
        outage = Outage(why, 1 if before is None else before.num_failures + 1)
        self._outages[engine] = outage
        return outage

    def mark_up(self, engine: str) -> bool:
        """Note that an engine answers; True when it was down until now."""
        return self._outages.pop(engine, None) is not None


def _compare(before: dict[str, _Standing], after: dict[str, _Standing]) -> Changes:
    stayed = [(name, before[name], now) for name, now in after.items() if name in before]
    return Changes(
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        drained=tuple(n for n, was, now in stayed if now.draining and not was.draining),
        revived=tuple(n for n, was, now in stayed if was.draining and not now.draining),
        recast=tuple(n for n, was, now in stayed if was.roles != now.roles),
    )
