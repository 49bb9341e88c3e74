"""One trace of a request: exported to a real OTLP receiver, across router, prefill and decode.

Engines are fake; each exports a span of its own below what ``traceparent`` names, as vLLM does.
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from aiohttp import web

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import BadSetting
from pdconn.router.tracing.otel import OtelTracing
from tests.fakes.deployment import Deployment, deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, FakeEngine, Seen, die_in_stream, error, hang, reset
from tests.router.openai.test_passed import answers
from tests.router.pulls.pulling import held_by_decode, pulling
from tests.router.tracing.otlp_receiver import OtlpReceiver, ReceivedSpan, receiving

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0([0-3])")
CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with receiving() as running:
        yield running


@dataclass
class Traces:
    """Every span of a test, once its services have ended."""

    receiver: OtlpReceiver
    before: int
    spans: list[ReceivedSpan] = field(default_factory=list)

    def collect(self) -> None:
        self.spans = self.receiver.spans()[self.before :]

    def all(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReceivedSpan:
        (span,) = self.all(name)
        return span

    def tree(self) -> dict[str, set[str]]:
        """Names of the spans below each; of the roots and what hangs on a client's, below ""."""
        names = {span.span: span.name for span in self.spans}
        found: dict[str, set[str]] = {}
        for span in self.spans:
            found.setdefault(names.get(span.parent, ""), set()).add(span.name)
        return found


@asynccontextmanager
async def traced(receiver: OtlpReceiver, made: Any) -> AsyncIterator[tuple[Deployment, Traces]]:
    """A deployment whose engines export spans too; the traces are there when it has ended."""
    traces = Traces(receiver, len(receiver.spans()))
    services: list[OtelTracing] = []

    def export(engine: FakeEngine, role: str) -> None:
        service = OtelTracing(receiver.endpoint, f"vllm-{role}")
        services.append(service)
        inner = engine.answer

        async def answer(seen, http):
            with service.begin_span(f"llm_request {role}", seen.headers):
                return await inner(seen, http)

        engine.answer = answer

    async with made as d:
        for role in ("prefill", "decode"):
            for engine in getattr(d, role):
                export(engine, role)
        yield d, traces
        await until(lambda: d.metric("inflight_requests") == 0)
    for service in services:
        service.close()
    traces.collect()


def traced_deployment(receiver: OtlpReceiver, **settings: Any) -> Any:
    return traced(receiver, deployment(otlp_traces_endpoint=receiver.endpoint, **settings))


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_one_trace_shows_route_prefill_and_decode_with_the_engines_own_spans(
    receiver: OtlpReceiver, stream: bool
) -> None:
    async with traced_deployment(receiver) as (d, traces):
        reply = await d.complete(stream=stream)
        assert reply.status == 200
        prefill, decode = d.prefill[0].seen[0].headers, d.decode[0].seen[0].headers
    root = traces.one("POST /v1/completions")
    assert traces.tree() == {
        "": {"POST /v1/completions"},
        "POST /v1/completions": {"route", "prefill", "decode"},
        "prefill": {"llm_request prefill"},
        "decode": {"llm_request decode"},
    }
    assert {span.trace for span in traces.spans} == {root.trace}
    for headers, name in ((prefill, "prefill"), (decode, "decode")):
        span = traces.one(name)
        passed_on = TRACEPARENT.fullmatch(headers["traceparent"])
        assert passed_on is not None
        assert passed_on.groups()[:2] == (root.trace, span.span)
        assert int(passed_on[3]) & 1, "sampled"
        assert span.kind == "SPAN_KIND_CLIENT"
        assert span.service == "pdconn-router"
    assert root.kind == "SPAN_KIND_SERVER"
    assert traces.one("llm_request decode").service == "vllm-decode"
    assert root.attributes["pdconn.request_id"] == reply.headers["X-Request-Id"]
    assert root.attributes["pdconn.outcome"] == "ok"
    assert root.attributes["http.response.status_code"] == 200
    assert traces.one("decode").attributes["pdconn.handed_over"] is True
    assert not any(span.failed for span in traces.spans)


@in_loop
async def test_spans_lie_within_their_parents_and_follow_each_other(
    receiver: OtlpReceiver,
) -> None:
    async with traced_deployment(receiver) as (d, traces):
        d.decode[0].num_chunks, d.decode[0].chunk_pause_s = 10, 0.01
        await d.complete(stream=True)
    root, parts = traces.one("POST /v1/completions"), ("route", "prefill", "decode")
    spans = [traces.one(name) for name in parts]
    assert all(root.began_ns <= one.began_ns <= one.ended_ns <= root.ended_ns for one in spans)
    for before, after in pairwise(spans):
        assert before.ended_ns <= after.began_ns
    assert spans[2].ended_ns - spans[2].began_ns >= 10 * 0.01e9, "until the end of the stream"


@in_loop
async def test_a_clients_trace_goes_on_and_its_state_too(receiver: OtlpReceiver) -> None:
    async with traced_deployment(receiver) as (d, traces):
        headers = {"traceparent": CLIENTS, "tracestate": "vendor=1"}
        body = {"model": "m", "prompt": "hi"}
        async with d.client.post(d.url("/v1/completions"), json=body, headers=headers) as reply:
            assert reply.status == 200
        for engine in (d.prefill[0], d.decode[0]):
            assert engine.seen[0].headers.getall("tracestate") == ["vendor=1"]
            assert len(engine.seen[0].headers.getall("traceparent")) == 1
    root = traces.one("POST /v1/completions")
    assert f"00-{root.trace}-{root.parent}-01" == CLIENTS
    assert {span.trace for span in traces.spans} == {root.trace}


@in_loop
async def test_what_a_client_does_not_sample_is_not_exported(receiver: OtlpReceiver) -> None:
    async with traced_deployment(receiver) as (d, traces):
        headers = {"traceparent": CLIENTS[:-1] + "0"}
        body = {"model": "m", "prompt": "hi"}
        async with d.client.post(d.url("/v1/completions"), json=body, headers=headers) as reply:
            assert await reply.read() == ANSWER
        passed_on = TRACEPARENT.fullmatch(d.decode[0].seen[0].headers["traceparent"])
        assert passed_on is not None
        assert not int(passed_on[3]) & 1
    assert traces.spans == []


@pytest.mark.parametrize("odd", ["", "x", "00-0-0-01", "ff-" + CLIENTS[3:], CLIENTS * 2])
@in_loop
async def test_an_odd_traceparent_begins_a_trace_of_its_own(
    receiver: OtlpReceiver, odd: str
) -> None:
    async with traced_deployment(receiver) as (d, traces):
        body = {"model": "m", "prompt": "hi"}
        sent = {"traceparent": odd}
        async with d.client.post(d.url("/v1/completions"), json=body, headers=sent) as reply:
            assert reply.status == 200
    root = traces.one("POST /v1/completions")
    assert root.parent == ""
    assert traces.one("llm_request decode").trace == root.trace


@in_loop
async def test_every_engine_that_is_tried_has_a_span_and_those_that_fail_say_so(
    receiver: OtlpReceiver,
) -> None:
    async with traced_deployment(receiver, num_prefill=2, num_decode=2) as (d, traces):
        d.prefill[0].script = d.decode[0].script = reset
        assert (await d.complete()).body == ANSWER
        used = [one.url for one in (*d.prefill, *d.decode)]
    for name, engines in (("prefill", used[:2]), ("decode", used[2:])):
        spans = sorted(traces.all(name), key=lambda span: span.began_ns)
        assert [span.failed for span in spans] == [True, False]
        assert [span.attributes["server.address"] for span in spans] == engines
    assert not traces.one("POST /v1/completions").failed


async def only_a_head(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    """A script: the engine dies after the head of its answer."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    await asyncio.sleep(0.02)
    return await reset(engine, seen, http)


@in_loop
async def test_a_span_whose_answer_has_a_head_and_no_body_has_failed(
    receiver: OtlpReceiver,
) -> None:
    """Its connection was closed by the read that failed, and so its span ended as a good one."""
    async with traced_deployment(receiver, num_decode=2) as (d, traces):
        d.decode[0].script = only_a_head
        assert (await d.complete()).body == ANSWER
    spans = sorted(traces.all("decode"), key=lambda span: span.began_ns)
    assert [span.failed for span in spans] == [True, False]
    assert [span.attributes["http.response.status_code"] for span in spans] == [200, 200]


class _Half(web.StreamResponse):
    """An answer whose engine dies in the middle of it."""

    async def write_eof(self, data: bytes = b"") -> None:
        await self.write(b"half")
        await asyncio.sleep(0.02)
        self._req.transport.abort()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@in_loop
async def test_a_span_whose_answer_breaks_off_has_failed(receiver: OtlpReceiver, path: str) -> None:
    async with traced_deployment(receiver) as (d, traces):
        for engine in (*d.prefill, *d.decode):
            engine.other = lambda seen: _Half()
        d.decode[0].script = die_in_stream
        with pytest.raises(aiohttp.ClientPayloadError):
            await d.complete(path)
    assert traces.one("decode" if path == "/v1/completions" else "pass").failed


@in_loop
async def test_a_request_that_fails_is_marked(receiver: OtlpReceiver) -> None:
    async with traced_deployment(receiver, request_timeout_s=1.0) as (d, traces):
        d.decode[0].script = hang
        assert (await d.complete()).status == 504
        await until(lambda: not d.leases.held)
    root = traces.one("POST /v1/completions")
    assert root.failed
    assert root.attributes["pdconn.outcome"] == "timed_out"
    assert traces.one("decode").failed


@in_loop
async def test_what_prefill_pulls_hangs_below_prefill(receiver: OtlpReceiver) -> None:
    made = pulling(otlp_traces_endpoint=receiver.endpoint)
    async with traced(receiver, made) as (f, traces):
        holder = await held_by_decode(f)
        await f.ask()
    prefix = traces.one("prefix")
    assert prefix.parent == traces.one("prefill").span
    assert prefix.attributes["server.address"] == holder.url
    assert prefix.attributes["pdconn.lent"] is True
    lends = [s for s in traces.all("llm_request decode") if s.parent == prefix.span]
    assert len(lends) == 1, "the holder's own span"
    assert len({span.trace for span in traces.spans}) == 1


@in_loop
async def test_passed_requests_are_traced_too(receiver: OtlpReceiver) -> None:
    async with traced_deployment(receiver) as (d, traces):
        answers(d)
        assert (await d.send("/v1/embeddings", b"{}")).status == 200
        (seen,) = (*d.prefill[0].others, *d.decode[0].others)
    span = traces.one("pass")
    assert span.parent == traces.one("POST /v1/embeddings").span
    assert seen.headers["traceparent"].split("-")[2] == span.span


# Off, and what keeps it from going on


@in_loop
async def test_without_the_option_a_clients_header_passes_as_it_is() -> None:
    async with deployment() as d:
        body, headers = {"model": "m", "prompt": "hi"}, {"traceparent": CLIENTS}
        async with d.client.post(d.url("/v1/completions"), json=body, headers=headers) as reply:
            assert reply.status == 200
        for engine in (d.prefill[0], d.decode[0]):
            assert engine.seen[0].headers["traceparent"] == CLIENTS
        await d.complete()
        assert "traceparent" not in d.decode[0].seen[1].headers


@in_loop
async def test_a_receiver_that_is_down_costs_requests_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.2")
    async with deployment(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as d:
        for _ in range(3):
            assert (await d.complete()).body == ANSWER


def test_a_receiver_that_never_answers_does_not_keep_a_router_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "60")
    monkeypatch.setattr("pdconn.router.tracing.otel.CLOSE_S", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        tracing = OtelTracing(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        with tracing.begin_span("a span", {}):
            pass
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < 30, "half of what the exporter would wait"
    # Its thread ends with what it waits for.  One that tried again would draw a random time to
    # wait, and Hypothesis takes that for a strategy's in whatever test runs by then.
    for thread in threading.enumerate():
        if thread.name.startswith("OtelBatch"):
            thread.join(15)
            assert not thread.is_alive(), "half of what it goes on for where nobody stops it"


def test_without_opentelemetry_the_option_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pdconn.router.tracing.otel", None)
    config = ProxyConfig.from_options(
        ["http://p:1"], ["http://d:1"], otlp_traces_endpoint="http://c:1/v1"
    )
    with pytest.raises(BadSetting, match=r"pip install 'pdconn\[otel\]'"):
        config.traces.make_tracing()


def test_an_endpoint_that_is_no_url_is_named() -> None:
    with pytest.raises(BadSetting, match=r"^--otlp-traces-endpoint: expected a URL"):
        ProxyConfig.from_options(
            ["http://p:1"], ["http://d:1"], otlp_traces_endpoint="collector:4317"
        )


@in_loop
async def test_an_engines_refusal_is_the_spans_status(receiver: OtlpReceiver) -> None:
    async def refuse(engine, seen, http):
        return error(400, "too long")

    async with traced_deployment(receiver) as (d, traces):
        d.prefill[0].script = refuse
        assert (await d.complete()).status == 400
    assert traces.one("prefill").attributes["http.response.status_code"] == 400
    assert traces.one("POST /v1/completions").attributes["pdconn.outcome"] == "client_error"
