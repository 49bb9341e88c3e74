"""Server-sent events of engines and OpenAI's API: one line of data per event."""

from __future__ import annotations

_FIELD = b"data:"

DONE = b"[DONE]"
"""The data of the last event."""


def event_data(line: bytes) -> bytes | None:
    """The data of a line; None for another field, a comment, or the empty line after an event.

    >>> event_data(b'data: {"choices": []}\\r'), event_data(b": ping")
    (b'{"choices": []}', None)
    """
    return line[len(_FIELD) :].strip() if line.startswith(_FIELD) else None
