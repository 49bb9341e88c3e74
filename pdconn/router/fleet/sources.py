"""Sources of the fleet, and the watch that polls them.

    static ──┐
    file  ───┼── members ──► merged ──► changed? ──► on_change
    DNS   ───┘

A source may fail at any time: a file is half written, a name server restarts.  That must not remove
engines, so a source that fails repeats its last valid answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import urlsplit

from pdconn.router.fleet.file import read_fleet
from pdconn.router.fleet.member import Member, Role, engine_name, merged, parse_member
from pdconn.router.router_errors import BadSetting

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
#: Seconds that addresses are kept after the last DNS answer that had any.
KEEP_S = 60.0
_RESOLVE_TIMEOUT_S = 2.0
DNS = "dns+"

Members = tuple[Member, ...]
Resolve = Callable[[str], Awaitable[Sequence[str]]]


class FleetSource(Protocol):
    """A source of engines."""

    async def members(self) -> Members:
        """The current engines; never called concurrently.

        Raises:
            BadSetting: on the first call only, when there is no earlier valid answer.
        """
        ...

    async def close(self) -> None:
        """Stop."""
        ...


def parse_source(option: str, word: str, roles: Iterable[Role]) -> FleetSource:
    """The source for a word of the command line: an engine, or all engines behind a DNS name.

    Raises:
        BadSetting: the word is malformed; names the option.
    """
    if not word.startswith(DNS):
        return Static((parse_member(option, word, roles),))
    if not word.startswith(f"{DNS}http://"):  # certificates name hosts, not addresses
        raise BadSetting(option, f"{DNS}http://NAME:PORT", word)
    return DnsName(parse_member(option, word.removeprefix(DNS), roles))


@dataclass(frozen=True, slots=True)
class Static:
    """The engines of the command line."""

    engines: Members

    async def members(self) -> Members:
        """The same engines on every call."""
        return self.engines

    async def close(self) -> None:
        """No-op."""


class WatchedFile:
    """A fleet file, reloaded when its stat changes."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        read: Callable[[str | os.PathLike[str]], Members] = read_fleet,
    ) -> None:
        self._path = path
        self._read = read
        self._good: Members | None = None
        self._stamp: tuple[int, ...] | None = None

    async def members(self) -> Members:
        """The engines of the last valid version; the file is read in a thread."""
        return await asyncio.to_thread(self._load)

    async def close(self) -> None:
        """No-op."""

    def _load(self) -> Members:
        # The stamp is taken before reading, so that a concurrent write is detected next time.
        stamp = _stamp(self._path)
        if self._good is not None and stamp == self._stamp:
            return self._good
        self._stamp = stamp
        try:
            self._good = self._read(self._path)
        except BadSetting as error:
            if self._good is None:
                raise
            log.error("pdconn: bad fleet file, keeping the last valid version: %s", error)  # noqa: TRY400
        return self._good


def _stamp(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """A stamp that differs between versions; ctime detects changes that keep the mtime (cp -p)."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino, stat.st_dev)


async def resolve(name: str) -> Sequence[str]:
    """Every A and AAAA address of a name, from the system's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsName:
    """One engine at each address of a DNS name, identical except for the address.

    ``like`` is an engine with the name as its host.  An answer without addresses counts as a
    failure: a headless service gives one while its pods restart.  After ``keep_s`` without a valid
    answer the engines are removed.
    """

    def __init__(
        self,
        like: Member,
        resolve: Resolve = resolve,
        *,
        keep_s: float = KEEP_S,
        timeout_s: float = _RESOLVE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._like = like
        self._resolve = resolve
        self._keep_s = keep_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._good: Members = ()
        self._good_at_s = clock()
        self._failing = False
        self._asking: asyncio.Task[Sequence[str]] | None = None

    async def members(self) -> Members:
        """One engine per address, sorted by address: the order of DNS answers is random."""
        try:
            addresses = await self._ask()
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            return self._last_good(getattr(error, "strerror", None) or str(error))
        if not addresses:
            return self._last_good("no address")
        if self._failing:
            log.info("pdconn: DNS answers again name=%s", self._like.host)
        self._failing = False
        self._good = tuple(self._at(address) for address in sorted(set(addresses)))
        self._good_at_s = self._clock()
        return self._good

    async def close(self) -> None:
        """Stop waiting for an answer."""
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self) -> Sequence[str]:
        """An answer, possibly to the previous query.

        Resolving occupies a thread of a small pool and cannot be cancelled: while one query hangs,
        no further one is sent.
        """
        if self._asking is None:
            self._asking = asyncio.create_task(self._query(), name="resolve")
        done, _ = await asyncio.wait({self._asking}, timeout=self._timeout_s)
        if not done:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s")
        asked, self._asking = self._asking, None
        return asked.result()

    async def _query(self) -> Sequence[str]:
        return await self._resolve(self._like.host.strip("[]"))

    def _last_good(self, why: str) -> Members:
        if not self._failing:
            self._failing = True
            log.warning(
                "pdconn: DNS fails, keeping the last addresses name=%s why=%r engines=%d keep_s=%g",
                self._like.host,
                why,
                len(self._good),
                self._keep_s,
            )
        if self._good and self._clock() - self._good_at_s >= self._keep_s:
            log.warning(
                "pdconn: DNS still fails, removing its engines name=%s why=%r", self._like.host, why
            )
            self._good = ()
        return self._good

    def _at(self, address: str) -> Member:
        parts = urlsplit(self._like.url)
        host = f"[{address}]" if ":" in address else address
        port = "" if parts.port is None else f":{parts.port}"
        return replace(self._like, url=engine_name("dns", f"http://{host}{port}{parts.path}"))


class FleetWatch:
    """Polls the sources, and calls ``on_change`` when the fleet changes.

    As a context manager, calls ``on_change`` with the first fleet before its block runs.

    >>> async with FleetWatch(sources, engines.update):  # doctest: +SKIP
    ...     await serve()
    """

    def __init__(
        self,
        sources: Sequence[FleetSource],
        on_change: Callable[[Members], object],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._sources = tuple(sources)
        self._on_change = on_change
        self._interval_s = interval_s
        self._known: Members | None = None
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def refresh_now(self) -> Members:
        """Poll every source; call ``on_change`` if the fleet changed.

        Raises:
            BadSetting: from a source on its first call.
        """
        async with self._lock:
            asked = (source.members() for source in self._sources)
            answers = await asyncio.gather(*asked, return_exceptions=True)
            known: list[Member] = []
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                known += answer
            fleet = merged(known)
            if fleet != self._known:
                self._on_change(fleet)
                self._known = fleet
            return fleet

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.refresh_now()
            except Exception:  # the outermost loop: the watch must go on
                log.exception("pdconn: polling the fleet failed retry_s=%g", self._interval_s)

    async def close(self) -> None:
        """Stop polling."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for source in self._sources:
            await source.close()

    async def __aenter__(self) -> Self:
        try:
            await self.refresh_now()
        except BaseException:
            await self.close()
            raise
        self._task = asyncio.create_task(self._run(), name="watch the fleet")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
