"""What is read of an answer that passes, however its bytes are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.router.handover.tries import end_of
from pdconn.router.labels import Fault, RequestEnd
from pdconn.router.openai.bodies import MOST_NBYTES, AnswerReader

SSE = {"Content-Type": "text/event-stream; charset=utf-8"}
JSON = {"Content-Type": "application/json"}


def event(data: Any, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"{f'event: {name}' + chr(10) if name else ''}data: {text}\n\n".encode()


def vllm_error(code: int) -> dict[str, Any]:
    return {"error": {"message": "x", "type": "T", "param": None, "code": code}}


TOKEN = event({"choices": [{"text": "t"}]})
QUOTING = event({"choices": [{"text": 'it says "error": {"code": 500} and data: [DONE]'}]})
NULLS = event({"type": "response.created", "response": {"error": None, "usage": None}})
DONE = event("[DONE]")

#: name: (pieces, error, is_whole, prompt_tokens)
STREAMS: dict[str, tuple[list[bytes], int | None, bool, int | None]] = {
    "tokens": ([TOKEN, TOKEN, DONE], None, True, None),
    "not yet done": ([TOKEN, TOKEN], None, False, None),
    "words of an error in a token": ([QUOTING], None, False, None),
    "an error and nothing else": ([event(vllm_error(500)), DONE], 500, True, None),
    "a client's mistake": ([event(vllm_error(400)), DONE], 400, True, None),
    "an error after tokens": ([TOKEN, event(vllm_error(503)), DONE], 503, True, None),
    "an error without a code": ([event({"error": {"message": "x"}})], 500, False, None),
    "an error in words": ([event({"error": "no"})], 500, False, None),
    "messages: an error": (
        [event({"type": "error", "error": {"type": "internal_error", "message": "x"}}, "error")],
        500,
        False,
        None,
    ),
    "messages: whole": (
        [
            event({"type": "message_start", "message": {"usage": {"input_tokens": 0}}}),
            event({"type": "message_delta", "usage": {"input_tokens": 7,
                   "cache_read_input_tokens": 32, "output_tokens": 2}}),
            event({"type": "message_stop"}, "message_stop"),
        ],
        None,
        True,
        39,
    ),
    "responses: whole": (
        [NULLS, event({"type": "response.completed",
                       "response": {"error": None, "usage": {"input_tokens": 12}}})],
        None,
        True,
        12,
    ),
    "responses: failed": (
        [event({"type": "response.failed", "response": {"error": {"code": "server_error"}}})],
        500,
        True,
        None,
    ),
    "usage": (
        [TOKEN, event({"choices": [], "usage": {"prompt_tokens": 480, "total_tokens": 490}}), DONE],
        None,
        True,
        480,
    ),
    "no JSON": ([event('{"error"')], None, False, None),
    "lines that end in CR LF": ([b'data: {"error": {"code": 404}}\r\n\r\ndata: [DONE]\r\n\r\n'],
                                404, True, None),
}  # fmt: skip


def test_the_last_event_counts_where_the_stream_is_cut_behind_its_name() -> None:
    """What followed was taken for a token, since it begins and ends as one."""
    reader = AnswerReader(200, SSE)
    reader.read_chunk(b"event: message_stop\n")
    reader.read_chunk(b'data: {"type": "message_stop"}\n\n')
    assert reader.is_whole


@given(st.data())
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_says_the_same_however_it_is_cut(name: str, data: st.DataObject) -> None:
    pieces, *expected = STREAMS[name]
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    reader = AnswerReader(200, SSE)
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        reader.read_chunk(whole[start:stop])
    assert [reader.error, reader.is_whole, reader.prompt_tokens] == expected


def test_a_body_is_whole_once_all_of_its_length_has_passed() -> None:
    body = json.dumps({"choices": [], "usage": {"prompt_tokens": 9}}).encode()
    reader = AnswerReader(200, {**JSON, "Content-Length": str(len(body))})
    reader.read_chunk(body[:10])
    assert (reader.is_whole, reader.prompt_tokens) == (False, None)
    reader.read_chunk(body[10:])
    assert (reader.is_whole, reader.prompt_tokens) == (True, 9)


def test_what_is_kept_is_bounded() -> None:
    reader = AnswerReader(200, SSE)
    for _ in range(40):
        reader.read_chunk(b"data: " + b"x" * (MOST_NBYTES // 16))
        assert len(reader._rest or b"") <= MOST_NBYTES
    reader.read_chunk(b"\n\n" + DONE)
    assert reader.is_whole, "what follows a long event is read"
    long = AnswerReader(200, JSON)
    long.read_chunk(b'{"usage": {"prompt_tokens": 9}, "x": "' + b"y" * MOST_NBYTES + b'"}')
    long.read_end()
    assert (long.is_whole, long.prompt_tokens) == (True, None)


@given(st.binary(max_size=300), st.sampled_from([SSE, JSON, {}]))
def test_no_bytes_are_too_odd(chunk: bytes, headers: dict[str, str]) -> None:
    reader = AnswerReader(200, headers)
    reader.read_chunk(chunk)
    reader.read_end()
    assert reader.is_whole


# --- whose failure it is -----------------------------------------------------------------------

NOT_FOUND = b'{"detail": "Not Found"}'


def ended(
    status: int, body: bytes = b"{}", *, generates: bool = True, clients_key: bool = False,
    headers: dict[str, str] = JSON,
) -> RequestEnd:  # fmt: skip
    reader = AnswerReader(status, headers)
    reader.read_chunk(body)
    reader.read_end()
    return end_of(reader, generates=generates, is_clients_key=clients_key)


@pytest.mark.parametrize("status", [400, 404, 405, 408, 409, 413, 415, 422, 501])
def test_a_clients_mistake_is_the_clients(status: int) -> None:
    body = json.dumps(vllm_error(status)).encode()
    assert ended(status, body) is RequestEnd.CLIENT_ERROR
    assert ended(200, event(vllm_error(status)), headers=SSE) is RequestEnd.CLIENT_ERROR
    assert not RequestEnd.CLIENT_ERROR.is_failure


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 599])
def test_an_engines_failure_is_the_engines(status: int) -> None:
    body = json.dumps(vllm_error(status)).encode()
    assert ended(status, body) is RequestEnd.ENGINE_ERROR
    assert ended(200, event(vllm_error(status)), headers=SSE) is RequestEnd.ENGINE_ERROR
    assert RequestEnd.ENGINE_ERROR.fault is Fault.SERVICE


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_is_its_senders_mistake(status: int) -> None:
    assert ended(status, clients_key=True) is RequestEnd.CLIENT_ERROR
    assert ended(status, clients_key=False) is RequestEnd.ENGINE_ERROR


def test_an_engine_without_the_route_is_no_clients_mistake() -> None:
    """As that of a URL with a path behind its port; but an engine serves only its model's kind."""
    assert ended(404, NOT_FOUND) is RequestEnd.ENGINE_ERROR
    assert ended(404, NOT_FOUND, generates=False) is RequestEnd.CLIENT_ERROR


def test_what_is_asked_about_a_response_that_failed_is_no_failure() -> None:
    body = json.dumps({"status": "failed", "error": {"code": "server_error"}}).encode()
    assert ended(200, body, generates=False) is RequestEnd.OK
    assert ended(200, body) is RequestEnd.ENGINE_ERROR
    assert ended(200, b'{"error": null}') is RequestEnd.OK
