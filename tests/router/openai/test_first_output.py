"""Whether an answer has begun to say something, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.router.openai.bodies import MOST_NBYTES, AnswerReader
from pdconn.router.openai.first_output import FirstOutput, OutputSearch
from pdconn.router.openai.requests import Route
from tests.router.openai.aborted import BODIES, EVENTS, stream_pieces, usage_alone

SSE = {"Content-Type": "text/event-stream; charset=utf-8"}
JSON = {"Content-Type": "application/json"}


def text(value: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": value, "finish_reason": finish_reason}]}


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": finish_reason}]}


BEGINNINGS: dict[Route, list[list[dict[str, Any]]]] = {
    Route.COMPLETIONS: [
        [text("a")],
        [text("", "stop")],  # the end-of-sequence token alone
        [text("")],  # the first bytes of a letter
        [{"error": {"code": 500}}],
    ],
    Route.CHAT: [
        [delta(role="assistant", content="a")],
        [delta(role="assistant", content=""), delta(content="a")],
        [delta(role="assistant", content=""), delta(content="")],
        [delta(role="assistant", content=""), delta("stop", content="")],
        [delta(role="assistant", content=None, reasoning="a")],
        [delta(role="assistant", content=""), delta(tool_calls=[{"index": 0}])],
        [delta(role="assistant", content=""), {"error": {"code": 503}}],
        [delta("stop", role="assistant", content="")],
    ],
    Route.MESSAGES: [
        [EVENTS[Route.MESSAGES][0], {"type": "ping"}, {"type": "content_block_start"}],
        [EVENTS[Route.MESSAGES][0], {"type": "message_delta", "usage": {"output_tokens": 1}}],
        [{"type": "error", "error": {"type": "api_error"}}],
    ],
    Route.RESPONSES: [
        [*EVENTS[Route.RESPONSES][:2], {"type": "response.output_item.added"}],
        [{"type": "response.completed", "response": {"usage": {"output_tokens": 1}}}],
        [{"type": "response.failed", "response": {"usage": {"output_tokens": 0}}}],
    ],
}
"""Events up to the first that a client is to have."""


def first_output(
    headers: dict[str, str], body: bytes, *, is_whole: bool, nbytes: int = MOST_NBYTES
) -> FirstOutput:
    """What is found in a beginning that arrives in pieces of so many bytes."""
    search, found = OutputSearch(headers), FirstOutput.NOT_YET
    starts = range(0, len(body), nbytes) or [0]
    for start in starts:
        is_last = is_whole and start == starts[-1]
        found = search.read(body[start : start + nbytes], is_whole=is_last)
        if found is not FirstOutput.NOT_YET:
            break
    return found


def found_by_length(pieces: list[bytes]) -> list[FirstOutput]:
    """Of each beginning of a stream, by its length; it is the same byte by byte."""
    whole = b"".join(pieces)
    found = []
    for length in range(len(whole) + 1):
        at_once = first_output(SSE, whole[:length], is_whole=False)
        assert first_output(SSE, whole[:length], is_whole=False, nbytes=1) is at_once
        found.append(at_once)
    return found


@pytest.mark.parametrize("counts", [False, True], ids=["", "with usage"])
@pytest.mark.parametrize("route", Route)
def test_a_stream_without_output_is_aborted_wherever_it_is_cut(route: Route, counts: bool) -> None:
    events = EVENTS[route] + (usage_alone(route) if counts else [])
    found = found_by_length(stream_pieces(route, events))
    assert set(found) == {FirstOutput.NOT_YET, FirstOutput.ABORTED}
    assert found == sorted(found, key=list(FirstOutput).index), "what is aborted stays so"


@pytest.mark.parametrize(
    ("route", "events"), [(route, one) for route, found in BEGINNINGS.items() for one in found]
)
def test_a_stream_with_output_is_held_back_until_then_and_no_longer(
    route: Route, events: list[dict[str, Any]]
) -> None:
    pieces = [piece for piece in stream_pieces(route, events) if b"[DONE]" not in piece]
    found = found_by_length(pieces)
    first_line = sum(map(len, pieces)) - 1  # of the last event: the empty line may be missing
    assert found[:first_line] == [FirstOutput.NOT_YET] * first_line
    assert found[first_line:] == [FirstOutput.HERE] * 2


@pytest.mark.parametrize("route", Route)
def test_a_stream_that_ends_without_output_or_an_end_is_aborted(route: Route) -> None:
    first = b"".join(stream_pieces(route, EVENTS[route])[:1])
    first = b"" if b"[DONE]" in first else first
    assert first_output(SSE, first, is_whole=False) is FirstOutput.NOT_YET
    assert first_output(SSE, first, is_whole=True) is FirstOutput.ABORTED


@pytest.mark.parametrize("event", [text("", "abort"), delta("abort"), delta("abort", content="")])
def test_an_abort_that_is_named_is_one(event: dict[str, Any]) -> None:
    piece = stream_pieces(Route.COMPLETIONS, [event])[0]
    assert first_output(SSE, piece, is_whole=False) is FirstOutput.ABORTED


@pytest.mark.parametrize(
    "event", [text("a b c", "abort"), delta("abort", content="a b c"), {"choices": [{}, {}]}]
)
def test_what_was_generated_is_the_clients_also_where_an_abort_ends_it(
    event: dict[str, Any],
) -> None:
    piece = stream_pieces(Route.COMPLETIONS, [event])[0]
    assert first_output(SSE, piece, is_whole=False) is FirstOutput.HERE


WHOLE: dict[Route, list[dict[str, Any]]] = {
    Route.COMPLETIONS: [
        text("a", "length"),
        text("", "stop"),
        {"choices": [{"text": "p", "finish_reason": "length"}], "usage": {"completion_tokens": 0}},
    ],
    Route.CHAT: [{"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}],
    Route.MESSAGES: [
        {"type": "message", "stop_reason": "end_turn", "usage": {"output_tokens": 1}},
        {"type": "error", "error": {"type": "api_error"}},
    ],
    Route.RESPONSES: [
        {"object": "response", "status": "completed", "usage": {"output_tokens": 3}},
        {"object": "response", "status": "queued", "usage": None},  # computed in the background
    ],
}


@pytest.mark.parametrize("route", Route)
def test_a_body_is_judged_when_it_is_whole(route: Route) -> None:
    bodies = [(BODIES[route], FirstOutput.ABORTED)]
    bodies += [(body, FirstOutput.HERE) for body in WHOLE[route]]
    for body, expected in bodies:
        data = json.dumps(body).encode()
        for length in (0, 1, len(data) - 1):
            assert first_output(JSON, data[:length], is_whole=False) is FirstOutput.NOT_YET
        assert first_output(JSON, data, is_whole=True) is expected


def test_the_tokens_of_a_body_are_the_clients_also_where_an_abort_ends_it() -> None:
    """vLLM's ``/pause`` promises them; one prompt of several may have none."""
    one = {"text": "a b c", "finish_reason": "abort"}
    for choices in ([one], [one, {"text": "", "finish_reason": "abort"}]):
        body = {"choices": choices, "usage": {"completion_tokens": 3}}
        assert first_output(JSON, json.dumps(body).encode(), is_whole=True) is FirstOutput.HERE


def test_what_is_compressed_is_not_read() -> None:
    for headers in (SSE, JSON):
        coded = {**headers, "Content-Encoding": "gzip"}
        assert first_output(coded, b"\x1f\x8b", is_whole=False) is FirstOutput.HERE
        plain = {**headers, "Content-Encoding": "identity"}
        assert first_output(plain, b"\x1f\x8b", is_whole=False) is FirstOutput.NOT_YET


@pytest.mark.parametrize(
    "last", ['data: {"error": {"code": 500}}', 'data: {"choices": [{"text": "a"}]}']
)
def test_a_last_line_without_an_end_is_read(last: str) -> None:
    assert first_output(SSE, last.encode(), is_whole=False) is FirstOutput.NOT_YET
    assert first_output(SSE, last.encode(), is_whole=True) is FirstOutput.HERE


def test_no_more_than_the_limit_is_held_back() -> None:
    for headers, byte in ((SSE, b"\n"), (JSON, b" ")):
        assert first_output(headers, byte * MOST_NBYTES, is_whole=False) is FirstOutput.NOT_YET
        assert first_output(headers, byte * (MOST_NBYTES + 1), is_whole=False) is FirstOutput.HERE
    long = {**JSON, "Content-Length": str(MOST_NBYTES + 1)}
    assert first_output(long, b"", is_whole=False) is FirstOutput.HERE
    assert first_output({"Content-Type": "audio/wav"}, b"", is_whole=False) is FirstOutput.HERE


@given(st.binary(max_size=300), st.sampled_from([SSE, JSON, {}]), st.booleans())
def test_no_bytes_are_too_odd(data: bytes, headers: dict[str, str], is_whole: bool) -> None:
    for beginning in (data, b"data: " + data + b"\n\n"):
        assert first_output(headers, beginning, is_whole=is_whole) in FirstOutput


@pytest.mark.parametrize("form", ["stream", "body"])
def test_one_that_is_aborted_after_its_first_tokens_has_failed(form: str) -> None:
    """Its client has tokens and the reason, and is not told another story by the counters."""
    last = text("", "abort")
    if form == "stream":
        reader = AnswerReader(200, SSE)
        for piece in stream_pieces(Route.COMPLETIONS, [text("a"), last]):
            reader.read_chunk(piece)
    else:
        reader = AnswerReader(200, JSON)
        reader.read_chunk(json.dumps(last).encode())
    reader.read_end()
    assert (reader.is_whole, reader.error) == (True, 503)


def test_a_word_of_an_answer_is_no_abort() -> None:
    """The control."""
    reader = AnswerReader(200, SSE)
    for event in (text('"abort"'), text("abort"), {"choices": [{"text": "a", "abort": "abort"}]}):
        for piece in stream_pieces(Route.COMPLETIONS, [event]):
            reader.read_chunk(piece)
    assert (reader.is_whole, reader.error) == (True, None)
