"""The ZeroMQ sockets of one connection to an engine's publisher of KV events."""

from __future__ import annotations

import time
from contextlib import suppress

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from pdconn.router.prefix.kv_events import MAX_NBYTES

#: Messages that a socket queues; vLLM's ROUTER drops messages beyond that.
LIVE_HWM, REPLAY_HWM = 10_000, 100_000
#: Messages that are handled before other tasks run.
BURST = 64


class EventSockets:
    """The sockets of one connection to an engine.

    Attributes:
        live: receives published batches.
        replay: receives the replay in progress, if any.

    Args:
        context: of all sockets.
        address: the publisher's, ``tcp://HOST:PORT``.
        topic: prefix of the topics to subscribe to.
        silence_s: time without an answer after which a replay has failed.
    """

    def __init__(
        self, context: zmq.asyncio.Context, address: str, topic: str, silence_s: float
    ) -> None:
        self._context, self._silence_s = context, silence_s
        self._deadline = 0.0
        self._up = False
        self.replay: zmq.asyncio.Socket | None = None
        self.live = _socket(context, zmq.SUB, LIVE_HWM)
        self._monitor = self.live.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        )
        self.live.subscribe(topic)
        self.live.connect(address)

    @property
    def is_up(self) -> bool:
        """Whether the publisher is connected."""
        return self._up

    def close(self) -> None:
        self.close_replay()
        self.live.disable_monitor()
        self._monitor.close(linger=0)
        self.live.close(linger=0)

    async def wait_readable(self, until_s: float) -> None:
        """Wait for a message or the time-out of a replay, at most until ``until_s`` (monotonic)."""
        poller = zmq.asyncio.Poller()
        for socket in (self.live, self._monitor, self.replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        if self.replay is not None:
            until_s = min(until_s, self._deadline)
        await poller.poll(int(max(0.0, until_s - time.monotonic()) * 1e3) + 1)

    async def changes(self) -> tuple[bool, bool]:
        """Whether the connection was lost, and whether it was made, since the last call."""
        made = False
        for frames in await burst(self._monitor):
            if parse_monitor_message(frames)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._up = made = True
            elif self._up:
                return True, made
        return False, made

    # --- replay ---------------------------------------------------------------------------

    async def request_replay(self, address: str, start: int) -> None:
        """Request the batches from ``start`` on; abandons a previous replay."""
        self.close_replay()
        self.replay = _socket(self._context, zmq.DEALER, REPLAY_HWM)
        self.replay.connect(address)
        self.note_replay_answer()
        await self.replay.send_multipart([b"", start.to_bytes(8, "big")])

    def note_replay_answer(self) -> None:
        self._deadline = time.monotonic() + self._silence_s

    @property
    def replay_timed_out(self) -> bool:
        """Whether a replay is in progress and overdue."""
        return self.replay is not None and time.monotonic() >= self._deadline

    def close_replay(self) -> None:
        if self.replay is not None:
            self.replay.close(linger=0)
            self.replay = None


def _socket(context: zmq.asyncio.Context, kind: int, hwm: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.ipv6 = True
    socket.rcvhwm = hwm
    socket.maxmsgsize = MAX_NBYTES
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 30, 10, 3
    return socket


async def burst(socket: zmq.asyncio.Socket) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    with suppress(zmq.Again):
        while len(messages) < BURST:
            messages.append(await socket.recv_multipart(zmq.NOBLOCK))
    return messages
