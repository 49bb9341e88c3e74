"""One gRPC call: messages both ways, framed as in HTTP/2's DATA.

::

    GatewayConnection ──received──► parts of a message ──► messages ──► read
                      ◄──── send ─────────────────────────────────── write

Source of the framing: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

MOST_QUEUED_NBYTES = 256 << 10
"""Bytes of messages that wait for their reader, above which their sender is given no more room."""
_PREFIX_NBYTES = 5
"""Whether a message is compressed, and its length."""

# https://grpc.github.io/grpc/core/md_doc_statuscodes.html
OK, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED = 0, 2, 3, 4
NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 5, 8, 12


class CallFailed(Exception):
    """Ends a call with a status.

    Attributes:
        status: of gRPC.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class MessageTooLong(CallFailed):
    """A message is longer than the server takes; what follows it is not read.

    Attributes:
        nbytes: of the message.
    """

    def __init__(self, nbytes: int, most_nbytes: int) -> None:
        super().__init__(
            RESOURCE_EXHAUSTED, f"a message of at most {most_nbytes} bytes expected, got {nbytes}"
        )
        self.nbytes = nbytes


class Carrier(Protocol):
    """The connection of a call."""

    async def send(self, call: Call) -> None:
        """Send the call's ``unsent`` bytes."""

    def take_more(self, call: Call, nbytes: int) -> None:
        """Let the gateway send ``nbytes`` bytes in place of those that were taken."""


class Call:
    """A call, whose task the connection cancels when the gateway breaks it off.

    Args:
        carrier: the connection.
        stream: the number of the call's stream.
        most_nbytes: of a message.

    Attributes:
        unsent: framed messages that were written and are not sent.
        is_closed: whether nothing can be sent any more.
        has_ended: whether the gateway sends nothing more.
        has_head: whether the head of the answer was sent.
    """

    __slots__ = (
        "_carrier", "_ended", "_most_nbytes", "_partial", "_queue", "_queued_nbytes", "_refused",
        "_unread_nbytes", "_waiter", "has_ended", "has_head", "is_closed", "stream", "unsent",
    )  # fmt: skip

    def __init__(self, carrier: Carrier, stream: int, most_nbytes: int) -> None:
        self.stream = stream
        self.unsent = bytearray()
        self.is_closed = False
        self.has_ended = False
        self.has_head = False
        self._carrier = carrier
        self._most_nbytes = most_nbytes
        self._partial = bytearray()
        self._queue: deque[bytes] = deque()
        self._queued_nbytes = 0
        self._unread_nbytes = 0
        self._refused: CallFailed | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ended: Callable[[], None] | None = None

    # The handler's side

    async def read(self) -> bytes | None:
        """The next message; None if the gateway has ended its side.

        Raises:
            CallFailed: the gateway has sent what is no message.
        """
        self._ended = None
        while not self._queue:
            if self._refused is not None:
                raise self._refused
            if self.has_ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._queue.popleft()
        self._queued_nbytes -= len(message)
        if self._queued_nbytes <= MOST_QUEUED_NBYTES:
            self.take_rest()
        return message

    def when_ended(self, act: Callable[[], None]) -> None:
        """Call ``act`` if the gateway ends its side before the next message is read."""
        if self.has_ended and not self._queue:
            asyncio.get_running_loop().call_soon(act)
        else:
            self._ended = act

    async def write(self, *messages: bytes) -> None:
        """Send messages; returns when the gateway has given room for them."""
        for message in messages:
            self.unsent += b"\0" + len(message).to_bytes(4, "big")
            self.unsent += message
        await self._carrier.send(self)

    # The connection's side

    def received(self, data: bytes, nbytes: int) -> None:
        """Bytes have come; ``nbytes``: of the room that they took."""
        if self._refused is None:
            self._partial += data
            self._take_messages()
        if self._queued_nbytes <= MOST_QUEUED_NBYTES:
            self._carrier.take_more(self, nbytes)
        else:
            self._unread_nbytes += nbytes

    def end(self) -> None:
        """The gateway sends nothing more."""
        if self._partial and self._refused is None:
            self._refuse(CallFailed(INVALID_ARGUMENT, "the call ended within a message"))
        self.has_ended = True
        self._wake()
        ended, self._ended = self._ended, None
        if ended is not None and not self._queue:
            ended()

    def take_rest(self) -> None:
        """Give room in place of all that has come, read or not."""
        nbytes, self._unread_nbytes = self._unread_nbytes, 0
        self._carrier.take_more(self, nbytes)

    def _take_messages(self) -> None:
        partial = self._partial
        while len(partial) >= _PREFIX_NBYTES:
            nbytes = int.from_bytes(partial[1:_PREFIX_NBYTES], "big")
            if partial[0] != 0:
                self._refuse(CallFailed(UNIMPLEMENTED, "messages must not be compressed"))
                return
            if nbytes > self._most_nbytes:
                self._refuse(MessageTooLong(nbytes, self._most_nbytes))
                return
            whole = _PREFIX_NBYTES + nbytes
            if len(partial) < whole:
                return
            self._queue.append(bytes(memoryview(partial)[_PREFIX_NBYTES:whole]))
            self._queued_nbytes += nbytes
            del partial[:whole]
            self._wake()

    def _refuse(self, failure: CallFailed) -> None:
        self._refused = failure
        self._partial.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
