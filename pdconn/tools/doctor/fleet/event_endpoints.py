"""Checks KV events: whether their ports answer, and how each engine hashes its blocks.

The hash scheme is detected as in the router: an event carries tokens and their hashes, so the known
schemes are tried on the oldest event that an engine still replays.  It stays unknown for an engine
that has stored nothing since its start, or whose algorithm starts from a random root (no
``PYTHONHASHSEED``).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import zmq

from pdconn.router.fleet.member import EventEndpoints, Member
from pdconn.router.prefix.detect import can_tell, detect
from pdconn.router.prefix.hashing import HashScheme
from pdconn.router.prefix.kv_events import MAX_NBYTES, BadBatch, Stored, decode_batch
from pdconn.tools.doctor.findings import Finding, fault, one_line, warning

_AT_ONCE = 16
_MOST_BATCHES = 2000
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class EventFacts:
    """One data-parallel rank's endpoints.

    Attributes:
        closed: endpoints without a listener, with the reason.
        silent: the replay endpoint is open but does not answer a replay.
        scheme: the hash scheme of its blocks; None if unknown.
        has_stored: whether it replayed a stored block, which reveals the scheme.
    """

    engine: str
    rank: int
    closed: tuple[tuple[str, str], ...] = ()
    silent: bool = False
    scheme: HashScheme | None = None
    has_stored: bool = False

    @property
    def name(self) -> str:
        """The engine, and the rank if it is not the first."""
        return self.engine if self.rank == 0 else f"{self.engine} rank {self.rank}"


async def read_events(
    members: Sequence[Member], seed: str | None, timeout_s: float
) -> list[EventFacts]:
    """Query the endpoints of all ranks of all engines that publish."""
    asked = [(member.url, one) for member in members for one in member.event_endpoints()]
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = [
            loop.run_in_executor(pool, _rank, url, endpoints, seed, timeout_s)
            for url, endpoints in asked
        ]
        return list(await asyncio.gather(*found))


def _rank(url: str, endpoints: EventEndpoints, seed: str | None, timeout_s: float) -> EventFacts:
    named = (endpoints.events, endpoints.replay)
    closed = tuple(
        (where, why)
        for where in named
        if where is not None and (why := _closed(where, timeout_s)) is not None
    )
    if closed or endpoints.replay is None:
        return EventFacts(url, endpoints.rank, closed)
    stored = _replayed(endpoints.replay, timeout_s)
    if stored is None:
        return EventFacts(url, endpoints.rank, silent=True)
    usable = [one for one in stored if can_tell(one)]
    schemes = (detect(one, seed) for one in usable[:8])
    scheme = next((one for one in schemes if one is not None), None)
    return EventFacts(url, endpoints.rank, scheme=scheme, has_stored=bool(usable))


def _closed(endpoint: str, timeout_s: float) -> str | None:
    """The reason why ``tcp://HOST:PORT`` cannot be reached; None if there is a listener."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        return one_line(error.strerror or error)
    return None


def _replayed(endpoint: str, timeout_s: float) -> list[Stored] | None:
    """The stored blocks that an engine still replays; None if it does not answer."""
    stored: list[Stored] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.ipv6, dealer.maxmsgsize = 0, True, MAX_NBYTES
        dealer.connect(endpoint)
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        until = time.monotonic() + timeout_s
        for _ in range(_MOST_BATCHES):
            left_s = until - time.monotonic()
            if left_s <= 0 or not dealer.poll(int(left_s * 1e3) + 1):
                return stored or None
            frames = dealer.recv_multipart()
            if len(frames) != 4 or frames[2] == _END:
                return stored
            try:
                batch = decode_batch(frames[3])
            except BadBatch:
                continue
            stored += [event for event in batch.events if isinstance(event, Stored)]
    return stored


def seen_events(facts: Sequence[EventFacts]) -> list[str]:
    """One line per rank."""
    return [f"{one.name}: {_told(one)}" for one in facts]


def _told(one: EventFacts) -> str:
    if one.closed or one.silent:
        return "does not answer"
    if one.scheme is not None:
        return f"hashes by {one.scheme.algorithm}, {one.scheme.block_tokens} tokens a block"
    return "hash not known" if one.has_stored else "answers; nothing stored that shows its hash"


def judge_events(facts: Sequence[EventFacts]) -> Iterator[Finding]:
    """Findings that keep the router from knowing the caches."""
    for one in facts:
        for where, why in one.closed:
            message = f"KV events at {where}: {why}"
            port = where.rpartition(":")[2]
            remedy = (
                """start it with --kv-events-config '{"enable_kv_cache_events": true, """
                """"publisher": "zmq", "endpoint": "tcp://*:5557", """
                """"replay_endpoint": "tcp://*:5657"}', where """
                f"one port is {port} (with the *: vLLM connects to any other endpoint and "
                "listens nowhere), or correct events= and replay= of this command"
            )
            yield fault("events.port", one.name, message, remedy)
        if one.silent:
            message = "the replay endpoint is open and does not answer a replay"
            remedy = (
                'set "replay_endpoint" in its --kv-events-config to the port of replay=, another '
                "one than that of events="
            )
            yield fault("events.replay", one.name, message, remedy)
        if one.has_stored and one.scheme is None:
            message = "no known scheme gives the hashes of its blocks"
            remedy = (
                "use --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED on every engine "
                "and give it with --hash-seed"
            )
            yield warning("events.hash-unknown", one.name, message, remedy)
    known = {one.name: one.scheme for one in facts if one.scheme is not None}
    if len({(scheme.algorithm, scheme.seed) for scheme in known.values()}) > 1:
        held = ", ".join(f"{scheme.algorithm} at {name}" for name, scheme in known.items())
        message = f"expected one hash algorithm, got {held}"
        remedy = "set --prefix-caching-hash-algo and PYTHONHASHSEED alike on every engine"
        yield fault("events.hash", "prefix hashes", message, remedy)
