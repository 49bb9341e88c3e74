"""One request at a gateway: the messages about it, from its head to its end.

::

    head ──► body ──► (answering) ──► pick ──► head of the answer ──► end
                          │
                          └──► refusal: the picker's own answer

The gateway ends its call when the request has ended, or its client has left; while the request is
being answered that cancels the task which answers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import DecodeError
from multidict import CIMultiDict, CIMultiDictProxy

from pdconn.router.admission.connections import PROGRESS_NBYTES
from pdconn.router.admission.places import HeldBody, check_body_head, count_piece, too_large
from pdconn.router.picker.ext_proc import ProcessingRequest
from pdconn.router.picker.messages import (
    BadMessage,
    Head,
    answer_message,
    echoes_answers,
    go_on,
    head_of,
    pick_messages,
    refusal_message,
    subset_of,
    takes_pieces,
)
from pdconn.router.picker.rpc.call import Call, CallFailed, MessageTooLong
from pdconn.router.router_errors import BodyTooSlow, UnfitGateway


class GatewayLeft(Exception):
    """The gateway has ended its call: the client has left."""


class Exchange:
    """The messages about one request.

    Args:
        call: whose handler runs in the current task.
        max_nbytes: of a body.
        stall_s: time for each ``PROGRESS_NBYTES`` of a body.

    Attributes:
        head: of the request, once it has been read.
        raw: its body, once it has been read.
        subset: the endpoints of which one may be picked; None for all.
        has_left: whether the gateway has ended its call while the request was being answered.
        was_sent_on: whether the gateway was told where to send the request.
    """

    def __init__(self, call: Call, max_nbytes: int, stall_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.head = Head({}, CIMultiDict(), False)
        self.raw: bytes | None = None
        self.subset: frozenset[str] | None = None
        self.has_left = False
        self.was_sent_on = False
        self._call = call
        self._max_nbytes = max_nbytes
        self._stall_s = stall_s
        self._in_pieces: bool | None = None
        self._echoes = False
        self._had_trailers = False

    async def read_head(self) -> None:
        """Read the head, which a gateway sends at once.

        Raises:
            GatewayLeft: there is none.
            BadMessage: the gateway has sent something else.
            TimeoutError: it has sent nothing.
        """
        async with asyncio.timeout(self._stall_s):
            message = await self._read()
        if message.WhichOneof("request") != "request_headers":
            raise BadMessage("a call: expected it to begin with the head of a request")
        self.head = head_of(message.request_headers)
        self.subset = subset_of(message)
        self._in_pieces = takes_pieces(message)
        self._echoes = echoes_answers(message)

    def check_modes(self) -> None:
        """Check how the gateway sends requests.

        Raises:
            UnfitGateway: in a way that cannot be served.
        """
        if self._in_pieces is None:
            raise UnfitGateway

    async def read_body(self, held: HeldBody) -> bytes:
        """Read the whole body, counting it in ``held``.

        Raises:
            UnsupportedEncoding, BodyTooLarge, BodyTooSlow, Busy: as ``BodyReader.read_body``.
            GatewayLeft: the client has left before its end.
        """
        check_body_head(CIMultiDictProxy(self.head.headers), self._max_nbytes)
        try:
            async with asyncio.timeout(self._time_for_body()) as timer:
                return await self._read_body(held, timer)
        except TimeoutError as error:
            pace = f"the rest, or {PROGRESS_NBYTES} bytes every {self._stall_s:g} s"
            raise BodyTooSlow("body", pace, "less") from error

    def _time_for_body(self) -> float:
        """Seconds for the next piece of progress, or for a whole body that comes in one piece."""
        if self._in_pieces:
            return self._stall_s
        # The gateway collects it, and its progress is not seen: as long as the slowest may take.
        length = self.head.headers.get("Content-Length", "")
        announced = int(length) if length.isascii() and length.isdigit() else self._max_nbytes
        return self._stall_s * (1 + announced // PROGRESS_NBYTES)

    async def _read_body(self, held: HeldBody, timer: asyncio.Timeout) -> bytes:
        """Read the whole body; progress sets the ``timer`` anew."""
        pieces: list[bytes] = []
        if self.head.has_body:
            if not self._in_pieces:
                await self._write(go_on())
            nbytes = unproven = 0
            has_more: bool | None = True
            while has_more:
                try:
                    message = await self._read()
                except MessageTooLong as error:
                    raise too_large(self._max_nbytes) from error
                kind = message.WhichOneof("request")
                if kind == "request_trailers":
                    self._had_trailers = True
                    break
                if kind != "request_body":
                    # Envoy has answered by itself, as to a body that is longer than its buffer.
                    raise GatewayLeft
                piece = message.request_body.body
                count_piece(piece, nbytes, held, self._max_nbytes)
                nbytes += len(piece)
                unproven += len(piece)
                if unproven >= PROGRESS_NBYTES:
                    unproven = 0
                    timer.reschedule(asyncio.get_running_loop().time() + self._stall_s)
                pieces.append(piece)
                has_more = self._in_pieces and not message.request_body.end_of_stream
        self.raw = b"".join(pieces)
        return self.raw

    async def skip_body(self) -> None:
        """Take a body off the call that no engine gets, and send an empty one in its place.

        Raises:
            BodyTooLarge: it exceeds ``max_nbytes``.
            GatewayLeft: the client has left before its end.
        """
        await self.read_body(HeldBody())
        self.raw = b""

    def watch(self) -> None:
        """Cancel the task if the gateway ends its call before the next message is read."""
        self._call.when_ended(self._left)

    def _left(self) -> None:
        self.has_left = True
        self._task.cancel()

    async def send_pick(
        self, headers: CIMultiDict[str], body: bytes | None, endpoints: Iterable[str]
    ) -> None:
        """Send the request on to endpoints; ``body``: None for the client's."""
        raw, self.raw = self.raw or b"", None
        messages = pick_messages(
            self.head,
            headers,
            raw if body is None else body,
            ",".join(endpoints),
            in_pieces=self._in_pieces is True,
            has_trailers=self._had_trailers,
        )
        self.was_sent_on = True
        await self._write(*messages)

    async def refuse(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer the client in the gateway's place, which ends the call."""
        try:
            await self._write(refusal_message(status, headers, body))
        except asyncio.CancelledError:
            _is_over(self._task)

    async def next_message(self, *, has_answer: bool) -> Any:
        """The next message about the answer; None at the end.

        ``has_answer``: whether the answer has begun.  Then the call may be cancelled at any time,
        by the gateway once the answer has ended, or by ``release``.
        """
        try:
            return await self._read()
        except GatewayLeft:
            return None
        except asyncio.CancelledError:
            if not has_answer:
                raise
            _is_over(self._task)
            return None

    def release(self) -> None:
        """Let an answer that has begun go on without this process.

        The call then ends in order.  One that is broken off ends its answer, too, at a gateway that
        does not go on without a picker.
        """
        self._task.cancel()

    async def go_on(self, message: Any, headers: Mapping[str, str]) -> bool:
        """Let an answer go on, with ``headers`` set in its head; False if the call is over."""
        try:
            await self._write(answer_message(message, headers, echoes=self._echoes))
        except asyncio.CancelledError:
            _is_over(self._task)
            return False
        return True

    async def _read(self) -> Any:
        try:
            raw = await self._call.read()
        except MessageTooLong:
            raise
        except CallFailed as error:  # compressed, or cut off
            raise BadMessage(f"a message of a gateway: {error}") from error
        if raw is None:
            raise GatewayLeft
        try:
            return ProcessingRequest.FromString(raw)
        except DecodeError as error:
            raise BadMessage(f"a message of a gateway: {error}") from error

    async def _write(self, *messages: Any) -> None:
        await self._call.write(*(message.SerializeToString() for message in messages))


def _is_over(task: asyncio.Task[Any]) -> None:
    """The task was cancelled because all is done."""
    task.uncancel()
