"""Fields and headers of a client are bounded, and cost a line of log at most."""

from __future__ import annotations

import json
import logging
import re
import tracemalloc

import pytest

from pdconn.router.openai.requests import MAX_FIELDS, Direct, Route, parse_body
from pdconn.router.router_errors import BadBody
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop
from tests.fakes.fake_engine import ANSWER
from tests.router.admission.raw_requests import GOOD, MIB, PATH, answer_to, head

# Fields


def fields(count: int) -> bytes:
    return json.dumps({"prompt": "x"} | {f"k{i}": 1 for i in range(count - 1)}).encode()


def test_an_object_has_so_many_fields_and_no_more() -> None:
    assert len(parse_body(Route.COMPLETIONS, fields(MAX_FIELDS)).fields) == MAX_FIELDS
    with pytest.raises(BadBody, match=f"at most {MAX_FIELDS} fields"):
        parse_body(Route.COMPLETIONS, fields(MAX_FIELDS + 1))


@pytest.mark.parametrize("inside", ["body", "vllm_xargs", "the same name"])
def test_a_body_of_760_000_keys_costs_no_more_memory_than_one_of_256(inside: str) -> None:
    """Else 13 MB of keys become 150 MB of objects, and the event loop waits for them."""
    keys = b",".join(b'"k%d":1' % (0 if inside == "the same name" else i) for i in range(760_000))
    body = b'{"prompt":"x",' + (b'"vllm_xargs":{' + keys + b"}" if "x" in inside else keys) + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(BadBody):
            parse_body(Route.COMPLETIONS, body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MIB


@pytest.mark.parametrize("blank", [b"", b" " * 2_000_000])
def test_many_prompts_are_not_counted_one_by_one(blank: bytes) -> None:
    """A list of 2 million prompts is several as soon as it has two."""
    body = b'{"prompt": [' + blank + b'"a"' + b',"a"' * 2_000_000 + b"]}"
    tracemalloc.start()
    try:
        assert parse_body(Route.COMPLETIONS, body).direct is Direct.SEVERAL_PROMPTS
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MIB


@pytest.mark.parametrize("value", ["full", "incremental"])
@in_loop
async def test_a_client_may_not_choose_what_engines_report(value: str) -> None:
    """``kv_cache_report_mode: full`` makes an engine report blocks twice, and remove them once."""
    async with deployment() as d:
        reply = await d.complete(vllm_xargs={"kv_cache_report_mode": value})
        assert (reply.status, reply.error["param"]) == (400, "vllm_xargs")
        assert "kv_cache_report_mode" in reply.error["message"]
        assert not d.prefill[0].seen
        reply = await d.complete(vllm_xargs={"ngramsize": 3})
        assert "did you mean 'ngram_size'?" in reply.error["message"]
        assert (await d.complete(vllm_xargs={"ngram_size": 3})).status == 200


@in_loop
async def test_an_operator_may_allow_more_names() -> None:
    async with deployment(allow_xargs=("my_processor",)) as d:
        assert (await d.complete(vllm_xargs={"my_processor": 1})).status == 200
        assert d.decode[0].seen[0].body["vllm_xargs"] == {"my_processor": 1}
        assert (await d.complete(vllm_xargs={"mine": 1})).status == 400


# Headers


@in_loop
async def test_a_client_cannot_choose_a_data_parallel_rank() -> None:
    """Else it can load one rank, or name one that an engine does not have."""
    async with deployment() as d:
        headers = {"X-data-parallel-rank": "1", "X-Own": "kept"}
        async with d.client.post(d.url(PATH), data=GOOD, headers=headers) as reply:
            assert reply.status == 200
        for engine in (d.prefill[0], d.decode[0]):
            assert "X-data-parallel-rank" not in engine.seen[0].headers
            assert engine.seen[0].headers["X-Own"] == "kept"


@in_loop
async def test_a_second_connection_header_is_honoured() -> None:
    async with deployment() as d:
        named = ("Connection: close", "Connection: X-Hop", "X-Hop: 1", "X-End: 2")
        assert (await answer_to(d, head(len(GOOD), *named) + GOOD)).startswith(b"HTTP/1.1 200 ")
        seen = d.prefill[0].seen[0].headers
        assert ("X-Hop" in seen, seen["X-End"]) == (False, "2")


OWN = "[0-9a-f]{32}"


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ("chat 7/~!", "chat 7/~!"),
        ("x" * 128, "x" * 128),
        ("x" * 129, OWN),
        ("x" * 600, OWN),
        ("a\u200bb".encode().decode("latin-1"), OWN),
        ("\u00e9", OWN),
        ("a\tb", OWN),
        ("", OWN),
    ],
)
@in_loop
async def test_a_request_id_is_printable_ascii_or_the_routers(sent: str, taken: str) -> None:
    """Prefill would lend what decode then refuses: 500, and blocks pinned for a lease."""
    async with deployment() as d:
        answer = await answer_to(
            d, head(len(GOOD), "Connection: close", f"X-Request-Id: {sent}") + GOOD
        )
        assert answer.startswith(b"HTTP/1.1 200 ")
        ids = {engine.seen[0].headers["X-Request-Id"] for engine in (*d.prefill, *d.decode)}
        [used] = ids
        assert re.fullmatch(OWN, used) if taken == OWN else used == taken
        assert f"X-Request-Id: {used}\r\n".encode() in answer


@in_loop
async def test_of_two_request_ids_neither_is_taken() -> None:
    async with deployment() as d:
        await answer_to(
            d, head(len(GOOD), "Connection: close", "X-Request-Id: a", "X-Request-Id: b") + GOOD
        )
        assert re.fullmatch(OWN, d.prefill[0].seen[0].headers["X-Request-Id"])


CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)


def with_codings(*codings: str, version: str = "1.1") -> bytes:
    lines = (f"POST {PATH} HTTP/{version}", "Host: x", "Connection: close")
    named = (f"Transfer-Encoding: {coding}" for coding in codings)
    return "\r\n".join((*lines, *named, "", "")).encode() + CHUNKED


def with_headers(*headers: str) -> bytes:
    return head(len(GOOD), "Connection: close", *headers) + GOOD


ODD = {
    "gzip, chunked": (with_codings("gzip, chunked"), b"415"),
    "gzip and chunked": (with_codings("gzip", "chunked"), b"400"),
    "chunked twice": (with_codings("chunked, chunked"), b"4"),
    "HTTP/1.0 chunked": (with_codings("chunked", version="1.0"), b"400"),
    "HTTP/0.9": (head(len(GOOD)).replace(b"HTTP/1.1", b"HTTP/0.9") + GOOD, b"400"),
    "HTTP/2.0": (head(len(GOOD)).replace(b"HTTP/1.1", b"HTTP/2.0") + GOOD, b"400"),
    "no version": (f"GET {PATH}\r\n\r\n".encode(), b"400"),
    "two keys": (with_headers("Authorization: Bearer a", "authorization: Bearer b"), b"400"),
    "two X-Api-Key": (with_headers("X-Api-Key: a", "X-Api-Key: b"), b"400"),
    "two hosts": (with_headers("Host: y"), b"400"),
    "two types": (with_headers("Content-Type: a/b", "Content-Type: c/d"), b"400"),
}


@pytest.mark.parametrize("odd", ODD)
@in_loop
async def test_a_head_that_two_servers_could_read_in_two_ways_is_refused(odd: str) -> None:
    """``gzip, chunked`` was read as chunks, HTTP/0.9 answered, of two keys the last passed on."""
    sent, status = ODD[odd]
    async with deployment() as d:
        answer = await answer_to(d, sent)
        assert answer.partition(b" ")[2].startswith(status), answer[:200]
        assert b"Bearer" not in answer
        assert not d.prefill[0].seen
        admin = await answer_to(d, sent.replace(PATH.encode(), b"/metrics"), d.proxy.admin_url)
        assert admin.partition(b" ")[2].startswith(status), admin[:200]


@pytest.mark.parametrize("sent", [with_codings("chunked"), with_codings("Chunked")])
@in_loop
async def test_a_body_in_chunks_is_read(sent: bytes) -> None:
    """The control."""
    async with deployment() as d:
        assert (await answer_to(d, sent)).startswith(b"HTTP/1.1 200 ")
        old = head(len(GOOD), "Connection: close").replace(b"HTTP/1.1", b"HTTP/1.0") + GOOD
        assert (await answer_to(d, old)).startswith(b"HTTP/1.0 200 ")


@pytest.mark.parametrize(
    "sent",
    [
        head(len(GOOD), "Connection: close", "Content-Encoding: gzip") + GOOD,
        b"POST /v1/completions HTTP/1.1\r\nHo st: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
    ids=["gzip", "header", "length", "tls", "long"],
)
@in_loop
async def test_malformed_requests_cost_a_line_of_log_at_most(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Else each costs a traceback of 30 lines, and a client fills the disk."""
    caplog.set_level(logging.WARNING)
    async with deployment() as d:
        for _ in range(5):
            answer = await answer_to(d, sent)
            assert re.match(rb"HTTP/1\.[01] 4\d\d ", answer)
        assert (await d.complete()).body == ANSWER
    assert not [record for record in caplog.records if record.exc_info]
    lines = [line for record in caplog.records for line in record.getMessage().splitlines()]
    assert len(lines) <= 2, lines
    assert all(len(line) < 500 and line.startswith("pdconn: ") for line in lines)


@in_loop
async def test_a_bug_still_costs_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    async with deployment() as d:
        monkeypatch.setattr("pdconn.router.front.client_api.parse_body", None)
        assert (await d.send(PATH, GOOD)).status == 500
    assert [record for record in caplog.records if record.exc_info]
