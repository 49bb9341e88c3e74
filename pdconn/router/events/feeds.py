"""Subscribers to the fleet's KV events: one per data-parallel rank.

A change of the fleet starts and stops subscribers.  A draining engine keeps its subscribers: it
gets no new requests, but may be resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

import zmq.asyncio

from pdconn.router.background import Background
from pdconn.router.events.caches import PrefixCaches, pod_name
from pdconn.router.events.subscriber import EventSource, Status, Subscriber
from pdconn.router.fleet.member import Member

log = logging.getLogger(__name__)

_CLOSING = 1 << 20
"""No effective limit: each task closes one subscriber."""


Computed = Callable[[str], int | None]
"""Prompt tokens that an engine did not find in its cache; None while it reports none."""


def _unknown(engine: str) -> int | None:
    del engine
    return None


class EventFeeds:
    """Subscribers that follow the fleet."""

    def __init__(
        self,
        caches: PrefixCaches,
        subscriber: Callable[..., Subscriber] = Subscriber,
        computed: Computed = _unknown,
    ) -> None:
        self._caches = caches
        self._subscriber = subscriber
        self._computed = computed
        self._context = zmq.asyncio.Context()
        self._context.max_sockets = self._context.get(
            zmq.SOCKET_LIMIT
        )  # the default, 1023, suffices for 250 ranks
        self._subscribers: dict[EventSource, Subscriber] = {}
        self._ending: list[EventSource] = []
        self._closing = Background(limit=_CLOSING)

    def fleet_changed(self, members: Iterable[Member]) -> None:
        """Subscribe to exactly these engines."""
        fleet = list(members)
        wanted = [source for member in fleet for source in _sources(member)]
        several = {member.url for member in fleet if member.ranks > 1}
        for source in [known for known in self._subscribers if known not in wanted]:
            subscriber = self._subscribers.pop(source)
            self._ending.append(source)
            self._closing.spawn(self._end(source, subscriber), f"unsubscribe from {source.engine}")
        for source in wanted:
            if source not in self._subscribers:
                computed = self._answers if source.engine in several else self._computed
                self._subscribers[source] = self._subscriber(
                    source,
                    self._caches,
                    context=self._context,
                    computed=partial(computed, source.engine),
                )
                self._start(source)

    def _answers(self, engine: str) -> int | None:
        """0 for one of several ranks, since their page does not separate ranks; None if unknown."""
        return None if self._computed(engine) is None else 0

    async def _end(self, source: EventSource, subscriber: Subscriber) -> None:
        await subscriber.close()
        self._ending.remove(source)
        self._caches.forget_source(source)
        for known in self._subscribers:
            if _same_pod(source, known):
                self._start(known)

    def _start(self, source: EventSource) -> None:
        """Subscribe, unless the index still holds blocks of this pod from another address."""
        if not any(_same_pod(source, other) for other in self._ending):
            self._subscribers[source].start_receiving()

    def statuses(self) -> dict[str, Status]:
        """The status of each pod's subscriber."""
        return {pod_name(source): one.status for source, one in self._subscribers.items()}

    async def close(self) -> None:
        """Stop all subscribers."""
        self.fleet_changed(())
        await self._closing.close(grace_s=2.0)
        self._context.destroy(linger=0)


def _sources(member: Member) -> list[EventSource]:
    return [
        EventSource(member.url, endpoints.rank, endpoints.events, endpoints.replay)
        for endpoints in member.event_endpoints()
    ]


def _same_pod(one: EventSource, other: EventSource) -> bool:
    return (one.engine, one.rank) == (other.engine, other.rank)
