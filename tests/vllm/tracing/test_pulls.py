"""Spans of pulls: where they hang, how long they are, and that nothing is kept of a request."""

from __future__ import annotations

import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdconn.planning.plan import Moved
from pdconn.puller.request_pull import Measured
from pdconn.vllm.tracing.pull_spans import PullSpans, TracedPull, are_traced
from tests.fakes.simulated.hooks import finished

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pdconn.vllm.metadata import PdWorkerReport

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
AT_NS = 1_700_000_000_000_000_000


def traced() -> tuple[PullSpans, InMemorySpanExporter]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return PullSpans(provider.get_tracer("test")), exporter


def request(name: str = "r", headers: Any = HEADERS, params: Any = None) -> Any:
    params = {"do_remote_prefill": True} if params is None else params
    return SimpleNamespace(request_id=name, trace_headers=headers, kv_transfer_params=params)


def pull(name: str = "r", rank: int = 0) -> TracedPull:
    """First heard of at 10 s, granted at 10.25, blocks at 11, received at 13."""
    measured = Measured(claimed=10.0, granted=10.25, asked=11.0, moved=Moved(full=300, window=50))
    return TracedPull(rank, AT_NS, measured.record(name, 3, 13.0))


def lasted(span: ReadableSpan) -> tuple[float, float]:
    """Seconds from its beginning and its end to the report."""
    assert span.start_time is not None
    assert span.end_time is not None
    return (AT_NS - span.start_time) / 1e9, (AT_NS - span.end_time) / 1e9


def test_a_claim_and_a_read_are_children_of_who_asked() -> None:
    spans, exporter = traced()
    spans.on_new_request(request())
    spans.export_pulls([pull(rank=3)])
    claim, read = exporter.get_finished_spans()
    for span in (claim, read):
        assert span.parent is not None
        assert f"{span.parent.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        assert span.attributes is not None
        assert span.attributes["pdconn.rank"] == 3
    assert (claim.name, lasted(claim)) == ("pdconn.claim", (3.0, 2.75))
    assert (read.name, lasted(read)) == ("pdconn.read", (2.0, 0.0))
    assert read.attributes is not None
    assert read.attributes["pdconn.bytes"] == 350


def test_every_rank_that_pulled_has_its_own() -> None:
    spans, exporter = traced()
    spans.on_new_request(request())
    report = PdWorkerReport(pulled=[pull(rank=0)]).aggregate(PdWorkerReport(pulled=[pull(rank=1)]))
    report = pickle.loads(pickle.dumps(report))  # vLLM sends it from process to process
    assert not report.is_empty
    spans.export_pulls(report.pulled)
    ranks = [span.attributes["pdconn.rank"] for span in exporter.get_finished_spans()]
    assert sorted(ranks) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "not_traced",
    [request(headers=None), request(headers={}), request(params={}), request("another")],
    ids=["no headers", "empty headers", "no ticket", "another request"],
)
def test_a_request_without_a_trace_has_no_spans(not_traced: Any) -> None:
    spans, exporter = traced()
    spans.on_new_request(not_traced)
    spans.export_pulls([pull()])
    assert exporter.get_finished_spans() == ()


def test_nothing_is_kept_of_a_request_that_has_left() -> None:
    spans, exporter = traced()
    spans.on_new_request(request())
    assert len(spans) == 1
    finished(spans, request())
    finished(spans, request())
    assert len(spans) == 0
    spans.export_pulls([pull()])  # received after it was aborted
    assert exporter.get_finished_spans() == ()


def test_an_engine_without_an_endpoint_has_no_spans() -> None:
    for endpoint, expected in ((None, False), ("http://127.0.0.1:4318/v1/traces", True)):
        config = SimpleNamespace(
            observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint)
        )
        assert are_traced(config) is expected
        assert (PullSpans.from_config(config) is not None) is expected
    assert not are_traced(SimpleNamespace())
