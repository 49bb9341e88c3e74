"""A completion out of server-sent events.  Pure.

Lines are kept as they come, each with its time, and read when the answer has ended: while
tokens arrive nothing is parsed, which would delay the note of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from pdconn.bench.errors import BenchError
from pdconn.bench.serving.replies import SaidReply, WholeReply

Line = tuple[float, bytes]
"""When it came, and what it was."""


class BrokenAnswer(BenchError):
    """A stream that is no whole answer."""


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw(b"null")


def read_answer(prompt: int, began_s: float, lines: Sequence[Line]) -> WholeReply:
    """The answer that ``lines`` are.

    Raises:
        BrokenAnswer: it is none, reports an error, or ends before its end.
    """
    arrivals: list[float] = []
    texts: list[str] = []
    tokens: list[int] = []
    told, ended = True, False
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
            told = told and choice.token_ids is not None
    if not ended:
        raise BrokenAnswer(f"the answer broke off after {len(arrivals)} pieces")
    if not arrivals:
        raise BrokenAnswer("an answer without a token")
    said = SaidReply("".join(texts), tuple(tokens) if told else None)
    return WholeReply(
        prompt, began_s, tuple(arrivals), len(tokens) if told else len(arrivals), said
    )


def _choices(lines: Sequence[Line]) -> Iterator[tuple[float, _Choice | None]]:
    """What each event adds to the answer; None for the word that it is done."""
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
            raise BrokenAnswer(f"an event that makes no sense: {error}") from error
        if bytes(event.error) != b"null":
            reported = bytes(event.error)[:500].decode(errors="replace")
            raise BrokenAnswer(f"the server reports {reported}")
        if event.choices:
            yield at_s, event.choices[0]
