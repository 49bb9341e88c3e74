"""Server-sent events, as engines and OpenAI's API send them: one line of data for each event."""

from __future__ import annotations

_FIELD = b"data:"

DONE = b"[DONE]"
"""The data of the last event."""


def event_data(line: bytes) -> bytes | None:
    """The data of a line; None where the line is another field, a comment, or ends an event.

    >>> event_data(b'data: {"choices": []}\\r'), event_data(b": ping")
    (b'{"choices": []}', None)
    """
    return line[len(_FIELD) :].strip() if line.startswith(_FIELD) else None
