"""Parses a completion from server-sent events.  Pure.

Lines are stored as they arrive, each with its time, and parsed after the end of the answer: parsing
in between would delay the next timestamp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdconn.router.openai.event_stream import DONE, event_data
from pdconn.tools.bench.serving.replies import AnswerContent, CompleteReply
from pdconn.tools.openai.completions import BrokenAnswer, CompletionChoice, read_completion

TimedLine = tuple[float, bytes]
"""The arrival time of a line, and its bytes."""


def read_answer(prompt: int, began_s: float, lines: Sequence[TimedLine]) -> CompleteReply:
    """Parse an answer.

    Raises:
        BrokenAnswer: the answer is incomplete or malformed, or reports an error.
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


def _choices(lines: Sequence[TimedLine]) -> Iterator[tuple[float, CompletionChoice | None]]:
    """The choice in each event; None for the final event."""
    for at_s, line in lines:
        data = event_data(line)
        if data is None:
            continue
        if data == DONE:
            yield at_s, None
            continue
        try:
            event = read_completion(data)
        except BrokenAnswer as error:
            raise BrokenAnswer(f"malformed event: {error}") from error
        if event.reported_error is not None:
            raise BrokenAnswer(f"the server reports {event.reported_error}")
        if event.choices:
            yield at_s, event.choices[0]
