"""vLLM's publisher of KV events, as far as the wire goes, and two ports for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pdconn.tools.lab.ports import free_ports

encode = msgspec.msgpack.encode
END = (-1).to_bytes(8, "big", signed=True)


def two_ports() -> tuple[int, int]:
    """For events and their replay; vLLM's publisher listens on every address."""
    events, replay = free_ports(2, "0.0.0.0")
    return events, replay


class Publisher:
    """vLLM's publisher as far as the wire goes, and what goes wrong with it.

    An XPUB in place of the PUB, as it reports new subscribers.
    """

    def __init__(self, ports: tuple[int, int], memory: int = 100) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.XPUB)
        self.router = self.context.socket(zmq.ROUTER)
        for sock, port in zip((self.pub, self.router), ports, strict=True):
            sock.linger = 0
            sock.bind(f"tcp://127.0.0.1:{port}")
        self.memory: deque[tuple[int, bytes]] = deque(maxlen=memory)
        self.seq = 0
        self.clock: Callable[[], float] = lambda: float(self.seq)
        self.answers = True
        self.asked: list[int] = []
        self.subscribed = asyncio.Event()
        self._tasks = [asyncio.create_task(work()) for work in (self._greet, self._replay)]

    async def _greet(self) -> None:
        while True:
            if (await self.pub.recv())[:1] == b"\1":
                self.subscribed.set()

    async def _replay(self) -> None:
        while True:
            peer, empty, start = await self.router.recv_multipart()
            assert empty == b""
            self.asked.append(int.from_bytes(start, "big"))
            if not self.answers:
                continue
            for seq, payload in self.memory:
                if seq >= self.asked[-1]:
                    await self.send_answer(peer, b"", b"", seq.to_bytes(8, "big"), payload)
            await self.send_answer(peer, b"", b"", END, b"")

    async def send_answer(self, *frames: bytes) -> None:
        await self.router.send_multipart(frames)

    async def store(self, *blocks: int, **how: Any) -> None:
        await self.publish({"type": "BlockStored", "block_hashes": blocks, "token_ids": [],
                            "parent_block_hash": None, "block_size": 16}, **how)  # fmt: skip

    async def remove(self, *blocks: int, **how: Any) -> None:
        await self.publish({"type": "BlockRemoved", "block_hashes": blocks}, **how)

    async def publish(self, event: Any, *, lost: bool = False, payload: bytes = b"") -> None:
        payload = payload or encode([self.clock(), [event], 0])
        self.memory.append((self.seq, payload))
        if not lost:
            await self.wire(b"", self.seq.to_bytes(8, "big"), payload)
        self.seq += 1

    async def wire(self, *frames: bytes) -> None:
        await self.pub.send_multipart(frames)

    async def die(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.pub.close(linger=0)
        self.router.close(linger=0)
        self.context.term()
