"""What the other side said wrong.

Every error here carries the field it is about, what was expected and what was
seen, so that a log line or an HTTP body can show all three.
"""

from __future__ import annotations


class ProtocolError(Exception):
    """Base: ``field`` was ``seen`` where ``expected`` was needed."""

    def __init__(self, field: str, expected: object, seen: object) -> None:
        self.field = field
        self.expected = expected
        self.seen = seen
        super().__init__(f"{field}: expected {expected}, got {shown(seen)}")


class FrameError(ProtocolError):
    """Bytes on the side channel that are no frame, or too long a one."""


class MessageError(ProtocolError):
    """A frame that holds no message we know, or one at the wrong time."""


class TicketError(ProtocolError):
    """``kv_transfer_params`` that do not name KV we could pull."""


class PeerMismatch(ProtocolError):
    """A peer that speaks another version, is another engine, or was restarted."""


def shown(value: object, limit: int = 80) -> str:
    """``value`` for an error text: its repr, shortened to ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
