"""Ask a running engine's side channel what its KV looks like."""

from __future__ import annotations

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
from pdconn.runtime.peers import MAX_WELCOME


def describe(host: str, port: int, timeout_s: float = 5.0) -> Described:
    """What the engine at ``host:port`` says of itself.

    Raises:
        OSError: it cannot be reached, or does not answer in ``timeout_s`` seconds.
        ChannelLost: it closed the connection before it answered.
        ProtocolError: it answered something else.
    """
    give_up = time.monotonic() + timeout_s
    with socket.create_connection((host, port), timeout_s) as sock:
        channel = Channel(sock, MAX_WELCOME)
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
