"""Parses a completion from server-sent events.  Pure.

Lines are stored as they arrive, each with its time, and parsed when the answer has ended:
parsing meanwhile would delay the timestamp of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from pdconn.tools.bench.errors import BenchError
from pdconn.tools.bench.serving.replies import AnswerContent, CompleteReply

TimedLine = tuple[float, bytes]
"""When a line arrived, and its bytes."""


class BrokenAnswer(BenchError):
    """A stream that is not a complete answer."""


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw(b"null")


def read_answer(prompt: int, began_s: float, lines: Sequence[TimedLine]) -> CompleteReply:
    """Parse an answer.

    Raises:
        BrokenAnswer: it is incomplete or malformed, or reports an error.
    """
    arrivals: list[float] = []
    texts: list[str] = []
    tokens: list[int] = []
    has_ids, ended = True, False
    for at_s, choice in _choices(lines):
        if choice is None:
            ended = True
            continue
        if choice.finish_reason not in (None, "stop", "length"):
            raise BrokenAnswer(f"the answer ended by {choice.finish_reason!r}")
        ended = ended or choice.finish_reason is not None
        texts.append(choice.text)
        tokens += choice.token_ids or ()
        if choice.token_ids or (choice.token_ids is None and choice.text):
            arrivals.append(at_s)
            has_ids = has_ids and choice.token_ids is not None
    if not ended:
        raise BrokenAnswer(f"the answer broke off after {len(arrivals)} chunks")
    if not arrivals:
        raise BrokenAnswer("the answer has no token")
    content = AnswerContent("".join(texts), tuple(tokens) if has_ids else None)
    return CompleteReply(
        prompt, began_s, tuple(arrivals), len(tokens) if has_ids else len(arrivals), content
    )


def _choices(lines: Sequence[TimedLine]) -> Iterator[tuple[float, _Choice | None]]:
    """What each event adds to the answer; None for the event that ends it."""
    for at_s, line in lines:
        field, _, value = line.partition(b":")
        if field != b"data":
            continue
        if value.strip() == b"[DONE]":
            yield at_s, None
            continue
        try:
            event = msgspec.json.decode(value, type=_Event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BrokenAnswer(f"malformed event: {error}") from error
        if bytes(event.error) != b"null":
            reported = bytes(event.error)[:500].decode(errors="replace")
            raise BrokenAnswer(f"the server reports {reported}")
        if event.choices:
            yield at_s, event.choices[0]
