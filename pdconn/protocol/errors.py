"""Errors of the other side.

Every error carries the field, the expected and the seen value, so that a log line or an
HTTP body can show all three.
"""

from __future__ import annotations

from transport.errors import FieldError, shown


class ProtocolError(FieldError):
    """Base of the errors that the other side can make."""

    show = shown


class FrameError(ProtocolError):
    """Bytes on the side channel that are not a frame, or a frame that is too long."""


class MessageError(ProtocolError):
    """A frame without a known message, or with one at the wrong time."""


class TicketError(ProtocolError):
    """``kv_transfer_params`` that do not name KV that we can pull."""


class PeerMismatch(ProtocolError):
    """A peer of another protocol version, another engine, or another boot."""
