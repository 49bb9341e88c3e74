"""Ask a running engine's side channel what its KV looks like."""

from __future__ import annotations

import os
import select
import socket
import time

from pdconn.protocol.errors import MessageError
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Describe,
    Described,
    Rejected,
    decode_from_lender,
    encode,
)
from pdconn.runtime.channel import Channel
from pdconn.runtime.peers import MAX_WELCOME, dial


def describe(host: str, port: int, timeout_s: float = 5.0) -> Described:
    """What the engine at ``host:port`` says of itself.

    Raises:
        OSError: it cannot be reached, or does not answer in ``timeout_s`` seconds.
        ChannelLost: it closed the connection before it answered.
        ProtocolError: it answered something else.
    """
    give_up = time.monotonic() + timeout_s
    with dial(host, port) as sock:
        channel = Channel(sock, MAX_WELCOME)
        if not select.select([], [sock], [], timeout_s)[1]:
            raise TimeoutError(f"{host}:{port}: no connection in {timeout_s:g} s")
        failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
        channel.send(encode([Describe(PROTOCOL_VERSION)]))
        while True:
            for body in channel.receive():
                for message in decode_from_lender(body):
                    if isinstance(message, Described):
                        return message
                    if isinstance(message, Rejected):
                        raise MessageError(message.field, message.expected, message.seen)
                    raise MessageError("answer", "described", type(message).__name__.lower())
            if time.monotonic() > give_up:
                raise TimeoutError(f"{host}:{port}: no answer in {timeout_s:g} s")
            time.sleep(0.005)
