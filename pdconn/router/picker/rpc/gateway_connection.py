"""One connection of a gateway: HTTP/2 by h2, on which calls of gRPC run side by side.

grpcio's asyncio server passes each message between two threads, which costs a picker four tenths of
its processor time (docs/benchmarks.md).  Here a message goes from the parser to its call within
one call of the event loop, and what several calls write at once leaves in one system call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast
from urllib.parse import quote

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from pdconn.router.picker.rpc.call import OK, UNIMPLEMENTED, UNKNOWN, Call, CallFailed

log = logging.getLogger(__name__)

Handler = Callable[[Call], Awaitable[None]]

MOST_CALLS = 256
"""Calls of a connection at once; a gateway opens another connection for more.  h2 looks at all of
them when one begins."""
_MOST_AT_FIRST = 4096
"""Calls of a connection whose gateway has not heard of that limit yet."""
_STREAM_NBYTES = 1 << 20
"""Bytes of a call that may be under way."""
_FRAME_NBYTES = 1 << 20
"""Bytes of a frame: a long body costs less in fewer frames, in Envoy as well."""
_CONNECTION_NBYTES = 1 << 30
"""Bytes of all calls that may be under way: each call has a bound of its own."""
_TURN_NBYTES = 256 << 10
"""Bytes that are framed at once: others have the event loop in between."""
_LINGER_S = 2.0
"""Seconds in which a gateway can read the last bytes of a connection that was closed."""
_LAST_STREAM = 2**31 - 1
_SETTINGS = {
    SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_NBYTES,
    SettingCodes.MAX_CONCURRENT_STREAMS: _MOST_AT_FIRST,
    SettingCodes.ENABLE_PUSH: 0,
}
_LATER: dict[SettingCodes | int, int] = {
    SettingCodes.MAX_CONCURRENT_STREAMS: MOST_CALLS,
    SettingCodes.MAX_FRAME_SIZE: _FRAME_NBYTES,
}
_CONFIG = h2.config.H2Configuration(
    client_side=False,
    header_encoding=None,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
    # A head is read for its path and type, and nothing of it is passed on.
    validate_inbound_headers=False,
    normalize_inbound_headers=False,
)
_Fields: TypeAlias = list[tuple[bytes, bytes]]
_HEAD: _Fields = [(b":status", b"200"), (b"content-type", b"application/grpc")]
_NO_GRPC: _Fields = [(b":status", b"415")]
_OK_TRAILERS: _Fields = [(b"grpc-status", b"%d" % OK)]
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


@dataclass(frozen=True, slots=True)
class CallRules:
    """What a server answers, and within which bounds.

    Attributes:
        handlers: by the path of a call.
        most_nbytes: of a message.
        keepalive_s: a connection that is silent for this long is probed, and closed after as long.
    """

    handlers: Mapping[str, Handler]
    most_nbytes: int
    keepalive_s: float


class _NoGrpc(Exception):
    """A request of HTTP that is no call of gRPC."""


class GatewayConnection(asyncio.Protocol):
    """A connection.

    Args:
        rules: of the server.
        closed: is called with the connection at its end.
        call_ended: is called after each call.
    """

    def __init__(
        self,
        rules: CallRules,
        closed: Callable[[GatewayConnection], None],
        call_ended: Callable[[], None],
    ) -> None:
        self._rules = rules
        self._closed = closed
        self._call_ended = call_ended
        self._http = h2.connection.H2Connection(_CONFIG)
        self._calls: dict[int, tuple[Call, asyncio.Task[None]]] = {}
        self._transport: asyncio.Transport | None = None
        self._room: asyncio.Future[None] | None = None
        self._is_paused = False
        self._is_flushing = False
        self._framed_nbytes = 0
        self._is_silent = False
        self._probing: asyncio.TimerHandle | None = None

    @property
    def num_calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def go_away(self) -> None:
        """Tell the gateway to begin its next call elsewhere; calls go on."""
        if self._transport is not None:
            self._flush()
            # h2 sends nothing any more after a GOAWAY of its own.
            self._transport.write(GoAwayFrame(0, last_stream_id=_LAST_STREAM).serialize())

    def close(self) -> None:
        """Close the connection; calls that have not ended are broken off."""
        self._flush()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
            asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)
        self._break_off()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._http.local_settings = h2.settings.Settings(client=False, initial_values=_SETTINGS)
        self._http.initiate_connection()
        # In force once acknowledged: a burst of calls may come before a gateway has read of them.
        self._http.update_settings(_LATER)
        self._http.increment_flow_control_window(_CONNECTION_NBYTES)
        self._flush()
        self._probing = asyncio.get_running_loop().call_later(self._rules.keepalive_s, self._probe)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._probing is not None:
            self._probing.cancel()
        self._break_off()
        self._closed(self)

    def _break_off(self) -> None:
        for call, task in self._calls.values():
            if not call.is_closed:
                call.is_closed = True
                task.cancel()
        self._give_room()

    def data_received(self, data: bytes) -> None:
        self._is_silent = False
        try:
            for event in self._http.receive_data(data):
                take = _EVENTS.get(type(event))
                if take is not None:
                    take(self, event)
        except h2.exceptions.ProtocolError as error:
            log.warning("pdconn: a gateway's connection was closed: %s", error)
            self.close()
            return
        self._flush()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()  # or answers to its pings would fill the memory

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._transport is not None:
            self._transport.resume_reading()
        self._give_room()

    # The calls' side

    async def send(self, call: Call) -> None:
        if not call.has_head and not call.is_closed:
            call.has_head = True
            self._http.send_headers(call.stream, _HEAD)
        while not call.is_closed:
            room = self._frame(call)
            if self._framed_nbytes >= _TURN_NBYTES:
                self._flush()  # which pauses if the client reads too slowly
                await asyncio.sleep(0)
            else:
                self._flush_soon()
            if self._is_paused or (call.unsent and not room):
                await self._wait_for_room()
            elif not call.unsent:
                return
        # The task is being cancelled, which its next wait tells it.
        call.unsent.clear()
        await asyncio.sleep(0)

    def take_more(self, call: Call, nbytes: int) -> None:
        if nbytes and self._transport is not None:
            self._http.acknowledge_received_data(nbytes, call.stream)
            self._flush_soon()

    def _frame(self, call: Call) -> int:
        """Frame what there is room for, up to one turn; returns the room that is left."""
        http, unsent = self._http, call.unsent
        # A gateway that lowers its window may leave less than none.
        room = max(0, http.local_flow_control_window(call.stream))
        while unsent and room and self._framed_nbytes < _TURN_NBYTES:
            nbytes = min(room, len(unsent), http.max_outbound_frame_size)
            http.send_data(call.stream, bytes(memoryview(unsent)[:nbytes]))
            del unsent[:nbytes]
            self._framed_nbytes += nbytes
            room = http.local_flow_control_window(call.stream)
        return room

    async def _wait_for_room(self) -> None:
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._room)

    def _give_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set_result(None)

    async def _run(self, call: Call, handler: Handler) -> None:
        head, trailers = _HEAD, _OK_TRAILERS
        try:
            await handler(call)
        except _NoGrpc:
            head, trailers = _NO_GRPC, []
        except CallFailed as error:
            trailers = _trailers(error.status, str(error))
        except asyncio.CancelledError:
            if call.is_closed:
                return
            raise
        except Exception:
            log.exception("pdconn: a gateway's call failed")
            trailers = _trailers(UNKNOWN, "internal error")
        self._end(call, head, trailers)

    def _forget(self, call: Call, task: asyncio.Task[None]) -> None:
        """A call's task is over; one that was cancelled at once has not even begun."""
        del self._calls[call.stream]
        call.take_rest()
        self._call_ended()

    def _end(self, call: Call, head: _Fields, trailers: _Fields) -> None:
        """End a call with its trailers, and with its head if that was not sent."""
        if call.is_closed:
            return
        call.is_closed = True
        http = self._http
        last = trailers if call.has_head else head + trailers
        http.send_headers(call.stream, last, end_stream=True)
        if not call.has_ended:
            http.reset_stream(call.stream, ErrorCodes.NO_ERROR)
        self._flush_soon()

    # HTTP/2's events

    def _began(self, event: h2.events.RequestReceived) -> None:
        assert event.stream_id is not None
        call = Call(self, event.stream_id, self._rules.most_nbytes)
        handler = self._handler_of(dict(event.headers))
        task = asyncio.get_running_loop().create_task(self._run(call, handler))
        self._calls[event.stream_id] = call, task
        task.add_done_callback(partial(self._forget, call))

    def _handler_of(self, headers: Mapping[bytes, bytes]) -> Handler:
        """What answers a call; refusals too, since the gateway may have ended the call by now."""
        if not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            return _refuse_other_http
        path = headers.get(b":path", b"").decode(errors="replace")
        return self._rules.handlers.get(path) or partial(_refuse_method, path)

    def _received(self, event: h2.events.DataReceived) -> None:
        assert event.stream_id is not None
        nbytes = event.flow_controlled_length or 0
        found = self._calls.get(event.stream_id)
        if found is not None:
            found[0].received(event.data or b"", nbytes)
        elif nbytes:
            self._http.acknowledge_received_data(nbytes, event.stream_id)

    def _stream_ended(self, event: h2.events.StreamEnded) -> None:
        found = self._calls.get(event.stream_id or 0)
        if found is not None:
            found[0].end()

    def _was_reset(self, event: h2.events.StreamReset) -> None:
        found = self._calls.get(event.stream_id or 0)
        if found is not None:
            call, task = found
            call.is_closed = True
            task.cancel()
            self._give_room()

    def _has_room(self, event: object) -> None:
        self._give_room()

    # Writing, and probing

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        self._framed_nbytes = 0
        data = self._http.data_to_send()
        if data and self._transport is not None:
            self._transport.write(data)

    def _probe(self) -> None:
        if self._transport is None:
            return
        if self._is_silent:
            self._transport.abort()
            return
        self._is_silent = True
        try:
            self._http.ping(b"pdconn\0\0")
        except h2.exceptions.ProtocolError:  # it is being closed
            return
        self._flush()
        self._probing = asyncio.get_running_loop().call_later(self._rules.keepalive_s, self._probe)


_EVENTS: Mapping[type[h2.events.Event], Callable[..., None]] = {
    h2.events.RequestReceived: GatewayConnection._began,
    h2.events.DataReceived: GatewayConnection._received,
    h2.events.StreamEnded: GatewayConnection._stream_ended,
    h2.events.StreamReset: GatewayConnection._was_reset,
    h2.events.WindowUpdated: GatewayConnection._has_room,
    h2.events.RemoteSettingsChanged: GatewayConnection._has_room,
}


async def _refuse_other_http(call: Call) -> None:
    raise _NoGrpc


async def _refuse_method(path: str, call: Call) -> None:
    raise CallFailed(UNIMPLEMENTED, f"no such method: {path}")


def _trailers(status: int, message: str) -> _Fields:
    said = quote(message.strip(), safe=_PRINTABLE)  # no field may end with a space
    return [(b"grpc-status", b"%d" % status), (b"grpc-message", said.encode())]
