"""A publisher, a subscriber that follows it, and a sink that records its reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from pdconn.router.events.subscriber import EventSource, Status, Subscriber
from pdconn.router.events.tracker import State
from pdconn.router.prefix.kv_events import Batch, Cleared, Removed, Stored
from tests.router.events.publisher import Publisher, two_ports

PATIENCE_S = 20.0


def source(ports: tuple[int, int]) -> EventSource:
    return EventSource("a", 0, *(f"tcp://127.0.0.1:{port}" for port in ports))


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test

    asyncio.run(bounded())


class Recorder:
    """What an index would do: the blocks that are known, and every status that was reported."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.resets: list[str] = []
        self.statuses: list[Status] = []
        self._changed = asyncio.Event()

    def apply_batch(self, source: EventSource, batch: Batch) -> None:
        for event in batch.events:
            match event:
                case Stored(hashes=hashes):
                    self.blocks.update(hashes)
                case Removed(hashes=hashes):
                    self.blocks.difference_update(hashes)
                case Cleared():
                    self.blocks.clear()
        self._changed.set()

    def drop_pod(self, source: EventSource, why: str) -> None:
        self.blocks.clear()
        self.resets.append(why)
        self._changed.set()

    def status_changed(self, source: EventSource, status: Status) -> None:
        self.statuses.append(status)
        self._changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._changed.clear()
            await self._changed.wait()

    async def state_is(self, state: State) -> Status:
        await self.until(lambda: bool(self.statuses) and self.statuses[-1].state is state)
        return self.statuses[-1]

    async def blocks_are(self, *blocks: int) -> None:
        await self.until(lambda: self.blocks == set(blocks))


class Rig:
    """A publisher and a subscriber that is up to date with it."""

    def __init__(self, replay_silence_s: float) -> None:
        self.ports = two_ports()
        self.publisher = Publisher(self.ports)
        self.sink = Recorder()
        self.subscriber = Subscriber(
            source(self.ports), self.sink, now=lambda: 100.0, replay_silence_s=replay_silence_s
        )


@asynccontextmanager
async def rig(replay_silence_s: float = PATIENCE_S) -> Any:
    made = Rig(replay_silence_s)
    try:
        await made.publisher.store(1, 2)  # before anybody listens
        made.subscriber.start_receiving()
        await made.publisher.subscribed.wait()
        await made.sink.state_is(State.LIVE)
        yield made
    finally:
        await made.subscriber.close()
        await made.publisher.die()
