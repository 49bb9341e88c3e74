"""Addresses of engines, as a gateway knows its endpoints: ``IP:port``.

Names are looked up on threads that cannot be stopped, so that there is at most one look-up of a
name at a time, and those who need it wait for a bounded time::

    resolve ──known, and not old──────────────────────► endpoints, or why there are none
       └──look-up, begun by whoever comes first──► ...
                └──LOOK_UP_S is over────────────────► a failure, which counts for FAILED_FOR_S
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from urllib.parse import urlsplit

from pdconn.router.router_errors import EngineFailure

FOR_S = 5.0
"""Seconds for which the addresses of a name count: engines get others when they restart."""
FAILED_FOR_S = 1.0
"""Seconds for which a name counts as unknown after a failure."""
LOOK_UP_S = 2.0
"""Seconds that a request waits for a name."""
MOST_NAMED = 3
"""Endpoints that a gateway is given for one request."""
MOST_KNOWN = 4096
_PORTS = {"http": 80, "https": 443}

LookUp: TypeAlias = "Callable[[str, int], Awaitable[Iterable[str]]]"
"""The addresses of a host, best first; raises ``OSError``."""


async def addresses_of(host: str, port: int) -> Iterable[str]:
    """As ``LookUp``, by the system."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def normal(endpoint: str) -> str | None:
    """An endpoint as this module writes it; None if it is none.

    >>> normal("10.0.0.1:80"), normal("[0::1]:80"), normal("example:80"), normal("10.0.0.1")
    ('10.0.0.1:80', '[::1]:80', None, None)
    """
    host, _, port = endpoint.strip().rpartition(":")
    try:
        return _written(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")), int(port))
    except ValueError:
        return None


def _written(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> str:
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


@dataclass(frozen=True, slots=True)
class _Resolved:
    """What is known of one engine, and until when: its endpoints, or why it has none."""

    endpoints: tuple[str, ...]
    until_s: float = float("inf")
    why_none: str = ""


class Endpoints:
    """Resolves engines to endpoints.

    Args:
        look_up: finds the addresses of a name.
        clock: seconds.
        look_up_s: the longest wait for it.
    """

    def __init__(
        self,
        look_up: LookUp = addresses_of,
        clock: Callable[[], float] = time.monotonic,
        look_up_s: float = LOOK_UP_S,
    ) -> None:
        self._look_up = look_up
        self._clock = clock
        self._look_up_s = look_up_s
        self._known: dict[str, _Resolved] = {}
        self._asked: dict[str, asyncio.Task[_Resolved]] = {}

    async def resolve(
        self, engines: Iterable[str], subset: frozenset[str] | None = None
    ) -> tuple[dict[str, str], list[EngineFailure]]:
        """The engines by their endpoints, in order, and the engines that have none.

        At most ``MOST_NAMED`` endpoints: all addresses of the first engine, then of the next.  A
        gateway rewrites no path, so that an engine whose base URL has one has no endpoint.

        Args:
            subset: the endpoints that may be named, as ``normal`` writes them; None for all.
        """
        found: dict[str, str] = {}
        failures: list[EngineFailure] = []
        names = tuple(engines)
        for engine, known in zip(names, await self._resolve_all(names), strict=True):
            allowed = [one for one in known.endpoints if subset is None or one in subset]
            for endpoint in allowed:
                if len(found) < MOST_NAMED:
                    found.setdefault(endpoint, engine)
            if not allowed:
                why = known.why_none or "the gateway does not allow its endpoint"
                failures.append(EngineFailure(engine, why))
        return found, failures

    async def within(self, engines: Iterable[str], subset: frozenset[str]) -> frozenset[str]:
        """The engines with an endpoint in ``subset``."""
        names = tuple(engines)
        known = zip(names, await self._resolve_all(names), strict=True)
        return frozenset(name for name, one in known if not subset.isdisjoint(one.endpoints))

    def engine_at(self, endpoint: str, engines: Iterable[str]) -> str | None:
        """The engine at an endpoint, as far as that is known without a look-up."""
        for engine in engines:
            known = self._known.get(engine) or self._literal(engine)
            if known is not None and endpoint in known.endpoints:
                return engine
        return None

    def close(self) -> None:
        """Wait for no look-up any more.  Idempotent."""
        for asked in self._asked.values():
            asked.cancel()

    async def _resolve_all(self, engines: tuple[str, ...]) -> list[_Resolved]:
        now_s = self._clock()
        known = [self._fresh(engine, now_s) for engine in engines]
        if None not in known:  # nearly always
            return [one for one in known if one is not None]
        return list(await asyncio.gather(*map(self._resolve, engines)))

    def _fresh(self, engine: str, now_s: float) -> _Resolved | None:
        known = self._known.get(engine)
        return known if known is not None and now_s < known.until_s else None

    async def _resolve(self, engine: str) -> _Resolved:
        known = self._fresh(engine, self._clock()) or self._literal(engine)
        if known is not None:
            return known
        asked = self._asked.get(engine)
        if asked is None:
            asked = self._asked[engine] = asyncio.create_task(self._ask(engine))
            asked.add_done_callback(partial(self._answered, engine))
        try:
            async with asyncio.timeout(self._look_up_s):
                return await asyncio.shield(asked)
        except TimeoutError:
            return self._keep(engine, self._failed(f"no address within {self._look_up_s:g} s"))

    def _answered(self, engine: str, asked: asyncio.Task[_Resolved]) -> None:
        del self._asked[engine]
        if not asked.cancelled():
            self._keep(engine, asked.result())

    def _literal(self, engine: str) -> _Resolved | None:
        """What needs no look-up."""
        parts = urlsplit(engine)
        if parts.path:
            return self._keep(
                engine,
                _Resolved((), why_none="a gateway cannot ask an engine whose URL has a path"),
            )
        host, port = _place(engine)
        try:
            return self._keep(engine, _Resolved((_written(ipaddress.ip_address(host), port),)))
        except ValueError:
            return None

    async def _ask(self, engine: str) -> _Resolved:
        host, port = _place(engine)
        try:
            addresses = list(dict.fromkeys(await self._look_up(host, port)))
            endpoints = [_written(ipaddress.ip_address(one), port) for one in addresses]
        except (OSError, ValueError) as error:
            return self._failed(str(error))
        return _Resolved(tuple(endpoints), self._clock() + FOR_S, "it has no address")

    def _failed(self, why: str) -> _Resolved:
        return _Resolved((), self._clock() + FAILED_FOR_S, why)

    def _keep(self, engine: str, known: _Resolved) -> _Resolved:
        if len(self._known) >= MOST_KNOWN and engine not in self._known:  # of fleets that change
            self._known.clear()
        self._known[engine] = known
        return known


def _place(engine: str) -> tuple[str, int]:
    parts = urlsplit(engine)
    assert parts.hostname is not None  # checked where engines are named
    return parts.hostname, parts.port or _PORTS[parts.scheme]
