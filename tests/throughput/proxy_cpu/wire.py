"""The little HTTP that both ends of the benchmark need: heads, lengths, and ends of bodies."""

from __future__ import annotations

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"


def take_message(received: bytearray) -> tuple[bytes, bytes] | None:
    """Removes the first message with a length from what was received; None if it is not whole.

    >>> buffer = bytearray(b"POST / HTTP/1.1\\r\\ncontent-length: 2\\r\\n\\r\\nokGET")
    >>> take_message(buffer)[1], bytes(buffer)
    (b'ok', b'GET')
    """
    end = received.find(_HEAD_END)
    if end < 0:
        return None
    head = bytes(received[:end]).lower()
    at = head.find(_LENGTH)
    length = 0 if at < 0 else int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0])
    begins = end + len(_HEAD_END)
    if len(received) < begins + length:
        return None
    body = bytes(received[begins : begins + length])
    del received[: begins + length]
    return head, body


def is_whole(answer: bytes) -> bool:
    """Whether an answer has ended: by its length, or by the last chunk.

    >>> is_whole(b"HTTP/1.1 200 OK\\r\\nContent-Length: 3\\r\\n\\r\\nok")
    False
    """
    end = answer.find(_HEAD_END)
    if end < 0:
        return False
    if b"chunked" in answer[:end].lower():
        return answer.endswith(b"\r\n0\r\n\r\n")
    return take_message(bytearray(answer)) is not None
