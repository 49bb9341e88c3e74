"""An engine of the fleet: its URL, its roles, and where it publishes KV events.  Pure.

::

    http://10.0.0.1:8000,events=tcp://{host}:5557,replay=tcp://{host}:5657,ranks=2
    └─────── url ──────┘ └─────── of data-parallel rank 0; rank r's are port + r ─┘

The URL is the engine's name: two members with one URL are one engine.  ``{host}`` stands for the
URL's host, so that one line describes every engine behind a DNS name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple
from urllib.parse import urlsplit

from pdconn.router.router_errors import BadSetting
from transport.errors import did_you_mean

_HOST = "{host}"
_MOST_RANKS = 4096
_LAST_PORT = 65535
_KEYS = ("events", "replay", "ranks")

#: ``*`` is an address to bind; this must be an address to connect to.
_ENDPOINT = re.compile(r"tcp://(\{host\}|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


class Role(Enum):
    """The part of a request that an engine serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class BadMember(BadSetting):
    """A field of an engine is invalid; the reader adds the engine's position."""


class EventEndpoints(NamedTuple):
    """The endpoints of one data-parallel rank's KV events, and of their replay."""

    rank: int
    events: str
    replay: str | None


@dataclass(frozen=True, slots=True)
class Member:
    """One engine.

    Attributes:
        url: base URL, normalized by ``engine_name``.
        roles: at least one.
        events, replay: ZeroMQ endpoints of rank 0, ``tcp://{host}:5557``; None where the engine
            publishes or replays no events.
        ranks: number of data-parallel ranks behind the URL.
        draining: the engine finishes its requests and gets no new ones.

    Raises:
        BadSetting: a value is invalid; ``BadMember`` names the field.
    """

    url: str
    roles: frozenset[Role]
    events: str | None = None
    replay: str | None = None
    ranks: int = 1
    draining: bool = False

    def __post_init__(self) -> None:
        name = engine_name("url", self.url)
        if name != self.url:
            raise BadMember("url", name, self.url)
        if not self.roles:
            raise BadMember("roles", "at least one role", "none")
        if not 1 <= self.ranks <= _MOST_RANKS:
            raise BadMember("ranks", f"a whole number from 1 to {_MOST_RANKS}", self.ranks)
        if self.replay is not None and self.events is None:
            raise BadMember("replay", "events beside it", "none")
        self._check_apart()

    def _check_apart(self) -> None:
        """Check that the ports of events and replay do not overlap: vLLM adds the rank to both."""
        events = self._endpoint("events", self.events)
        replay = self._endpoint("replay", self.replay)
        if events is None or replay is None or events[0] != replay[0]:
            return
        if abs(events[1] - replay[1]) < self.ranks:
            expected = f"a port at least {self.ranks} (ranks) away from {self.events}"
            raise BadMember("replay", expected, self.replay)

    def _endpoint(self, field: str, template: str | None) -> tuple[str, int] | None:
        """An endpoint's host and port, checked for every rank."""
        if template is None:
            return None
        found = _ENDPOINT.fullmatch(template)
        if found is None:
            raise BadMember(field, "tcp://{host}:PORT, an address to connect to", template)
        port = int(found[2])
        if not 1 <= port <= _LAST_PORT + 1 - self.ranks:
            expected = f"a port from 1 to {_LAST_PORT} for each of {self.ranks} ranks"
            raise BadMember(field, expected, template)
        return found[1].replace(_HOST, self.host), port

    @property
    def host(self) -> str:
        """The URL's host in the form of endpoints: IPv6 in brackets."""
        host = urlsplit(self.url).hostname or ""
        return f"[{host}]" if ":" in host else host

    def event_endpoints(self) -> tuple[EventEndpoints, ...]:
        """One entry per rank; empty where the engine publishes no events.

        >>> one = parse_member("-p", "http://[::1]:8000,events=tcp://{host}:5557", Role)
        >>> one.event_endpoints()
        (EventEndpoints(rank=0, events='tcp://[::1]:5557', replay=None),)
        """
        if self.events is None:
            return ()
        return tuple(
            EventEndpoints(
                rank,
                self._of_rank(self.events, rank),
                None if self.replay is None else self._of_rank(self.replay, rank),
            )
            for rank in range(self.ranks)
        )

    def _of_rank(self, template: str, rank: int) -> str:
        address, _, port = template.replace(_HOST, self.host).rpartition(":")
        return f"{address}:{int(port) + rank}"

    def joined(self, other: Member) -> Member:
        """This engine merged with another entry: all roles, the endpoints of the first with any."""
        first = other if self.events is None and other.events is not None else self
        roles, draining = self.roles | other.roles, self.draining or other.draining
        return replace(first, roles=roles, draining=draining)


def merged(members: Iterable[Member]) -> tuple[Member, ...]:
    """Each engine once, in the order of first mention."""
    by_url: dict[str, Member] = {}
    for member in members:
        known = by_url.get(member.url)
        by_url[member.url] = member if known is None else known.joined(member)
    return tuple(by_url.values())


def parse_member(option: str, word: str, roles: Iterable[Role]) -> Member:
    """Parse an engine from the command line: ``URL[,key=value...]``.

    Raises:
        BadSetting: names the option, and for an unknown key the nearest known one.
    """
    url, *pairs = word.split(",")
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key not in _KEYS:
            raise BadSetting(option, "a known key", key, did_you_mean(key, _KEYS))
        if not equals or key in given:
            raise BadSetting(option, f"one {key}=VALUE", pair)
        given[key] = value
    try:
        return Member(
            engine_name(option, url),
            frozenset(roles),
            given.get("events"),
            given.get("replay"),
            _whole(given.get("ranks", "1")),
        )
    except BadMember as error:
        raise BadSetting(option, f"{error.field}: {error.expected}", error.seen) from error


def engine_name(field: str, url: str) -> str:
    """Check an engine's base URL and normalize it.

    Raises:
        BadSetting: not an http or https URL of a host, or a URL with further parts.

    >>> engine_name("--prefill", "http://localhost:8100/")
    'http://localhost:8100'
    """
    expected = "http://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port  # raises for a port that is no number or out of range
    except ValueError as error:
        raise BadSetting(field, f"{expected} ({error})", url) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        hint = "" if "://" in url or not url else f"did you mean {'http://' + url!r}?"
        raise BadSetting(field, expected, url, hint)
    before, openai, _ = f"{parts.path}/".partition("/v1/")
    if openai:
        # Base URLs of OpenAI clients end in /v1; requests would go to /v1/v1/...
        hint = f"did you mean {f'{parts.scheme}://{parts.netloc}{before}'!r}?"
        raise BadSetting(field, f"{expected} without /v1, which is of each request", url, hint)
    if parts.username is not None or parts.query or parts.fragment:
        raise BadSetting(field, f"{expected} without user, query or fragment", url)
    if any(letter.isspace() for letter in url):
        raise BadSetting(field, f"{expected} without spaces", url)
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadMember("ranks", "a whole number", text)
    return int(text)
