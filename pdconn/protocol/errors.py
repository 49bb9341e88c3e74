"""What the other side said wrong.

Every error here carries the field it is about, what was expected and what was
seen, so that a log line or an HTTP body can show all three.
"""

from __future__ import annotations

from transport.errors import FieldError, shown


class ProtocolError(FieldError):
    """Base of what the other side can get wrong."""

    show = shown


class FrameError(ProtocolError):
    """Bytes on the side channel that are no frame, or too long a one."""


class MessageError(ProtocolError):
    """A frame that holds no message we know, or one at the wrong time."""


class TicketError(ProtocolError):
    """``kv_transfer_params`` that do not name KV we could pull."""


class PeerMismatch(ProtocolError):
    """A peer that speaks another version, is another engine, or was restarted."""
