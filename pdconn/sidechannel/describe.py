"""Ask a running engine's side channel for its KV geometry."""

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
from pdconn.sidechannel.connection import MAX_WELCOME, Connection, connecting_to, resolve
from pdconn.sidechannel.security import Security


def describe(
    host: str, port: int, timeout_s: float = 5.0, security: Security | None = None
) -> Described:
    """The KV geometry of the engine at ``host:port``.

    Args:
        security: our credentials, and what the engine must authenticate with; none by default.

    Raises:
        OSError: it cannot be reached, or does not answer within ``timeout_s`` seconds.
        SideChannelLost: it closed the connection before it answered, or did not authenticate.
        ProtocolError: its answer is not a description.
    """
    deadline = time.monotonic() + timeout_s
    policy = security.for_reader(host, f"{host}:{port}") if security is not None else None
    with connecting_to(resolve(host, port)) as sock:
        connection = Connection(sock, MAX_WELCOME, policy=policy)
        if not select.select([], [sock], [], timeout_s)[1]:
            raise TimeoutError(f"{host}:{port}: no connection in {timeout_s:g} s")
        failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
        connection.send_frames([encode([Describe(PROTOCOL_VERSION)])])
        while True:
            for body in connection.receive_frames():
                return _described(body)
            connection.flush_unsent()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{host}:{port}: no answer in {timeout_s:g} s")
            time.sleep(0.005)


def _described(body: bytes) -> Described:
    messages = decode_from_lender(body, to_tool=True)
    if len(messages) != 1:
        raise MessageError("answer", "one message", len(messages))
    message = messages[0]
    if isinstance(message, Described):
        return message
    if isinstance(message, Rejected):
        raise MessageError(message.field, message.expected, message.seen)
    raise MessageError("answer", "described", type(message).__name__.lower())
