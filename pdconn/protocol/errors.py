"""Errors that the peer makes; each has the field, the expected value and the one that was seen."""

from __future__ import annotations

from transport.errors import FieldError, shown


class ProtocolError(FieldError):
    """Base of the errors that the peer can make."""

    show = shown


class FrameError(ProtocolError):
    """Bytes on the side channel that are not a frame, or a frame that is too long."""


class MessageError(ProtocolError):
    """A frame without a known message, or with one at the wrong time."""


class TicketError(ProtocolError):
    """``kv_transfer_params`` that are no ticket, or a ticket for KV that we cannot pull."""


class PeerMismatch(ProtocolError):
    """A peer of another protocol version, another engine, or another boot."""
