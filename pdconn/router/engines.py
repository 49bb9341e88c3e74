"""The engines a proxy knows, and which of them are down.  Pure: no clock, no IO.

    up ──asked in vain──► down ──/health answers──► up
                           │ ▲
                           └─┘ /health fails: the next probe waits twice as long

An engine is believed to be up until it was asked in vain; nothing is probed
while everything works.  One engine may hold both roles, and is down for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pdconn.router.errors import BadSetting, Miss
from pdconn.router.policy import Role

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


class Engines:
    """Every engine by role, and the outage of each that is down."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._by_role = {Role.PREFILL: tuple(prefill), Role.DECODE: tuple(decode)}
        self._outages: dict[str, Outage] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every engine once, prefill first."""
        return tuple(dict.fromkeys(self._by_role[Role.PREFILL] + self._by_role[Role.DECODE]))

    def of(self, role: Role) -> tuple[str, ...]:
        """The engines of a role, up or down."""
        return self._by_role[role]

    def roles(self, engine: str) -> tuple[Role, ...]:
        """The roles an engine holds."""
        return tuple(role for role in Role if engine in self._by_role[role])

    def live(self, role: Role) -> tuple[str, ...]:
        """The engines of a role that are believed to be up."""
        return tuple(name for name in self._by_role[role] if name not in self._outages)

    def outage(self, engine: str) -> Outage | None:
        """Why an engine is down, or None when it is up."""
        return self._outages.get(engine)

    def misses(self, role: Role, tried: Sequence[Miss] = ()) -> tuple[Miss, ...]:
        """Why each engine of a role did not do: those tried, then those down before."""
        asked = {miss.engine for miss in tried}
        outages = ((name, self._outages.get(name)) for name in self._by_role[role])
        known = [Miss(name, outage.why) for name, outage in outages if outage]
        return (*tried, *(miss for miss in known if miss.engine not in asked))

    def mark_down(self, engine: str, why: str) -> Outage:
        """Note that an engine was asked in vain, once more if it is down already."""
        before = self._outages.get(engine)
        outage = Outage(why, 1 if before is None else before.num_failures + 1)
        self._outages[engine] = outage
        return outage

    def mark_up(self, engine: str) -> bool:
        """Note that an engine answers; True when it was down until now."""
        return self._outages.pop(engine, None) is not None


def engine_name(field: str, url: str) -> str:
    """Check an engine's base URL and write it in the one way we compare and show.

    Raises:
        BadSetting: not an http or https URL of a host, or more than that.

    >>> engine_name("--prefill", "http://localhost:8100/")
    'http://localhost:8100'
    """
    expected = "http://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port  # raises when it is no number or out of range
    except ValueError as error:
        raise BadSetting(field, f"{expected} ({error})", url) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise BadSetting(field, expected, url)
    if parts.username is not None or parts.query or parts.fragment:
        raise BadSetting(field, f"{expected} without user, query or fragment", url)
    if any(letter.isspace() for letter in url):
        raise BadSetting(field, f"{expected} without spaces", url)
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"
