"""Tracing with OpenTelemetry: W3C trace context in, OTLP out.

Spans are exported by a thread of OpenTelemetry, in batches; spans that a receiver does not accept
are dropped.  The usual environment variables apply: ``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME``,
``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_BSP_*``, and ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL``, which vLLM
reads too, and whose default here is ``http/protobuf``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from multidict import CIMultiDict
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdconn.router.tracing.spans import Span, Tracing, Value

SERVICE = "pdconn-router"
CLOSE_S = 2.0
"""Seconds to export the last spans when the router ends."""
_GRPC = "grpc"
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_W3C = TraceContextTextMapPropagator()
_HEADERS = ("traceparent", "tracestate")


class OtelSpan(Span):
    """An OpenTelemetry span."""

    __slots__ = ("_context", "_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span)

    def child(self, name: str, **attributes: Value) -> OtelSpan:
        kind = SpanKind.CLIENT if "engine" in attributes else SpanKind.INTERNAL
        span = self._tracer.start_span(name, self._context, kind, _named(attributes))
        return OtelSpan(self._tracer, span)

    def inject(self, headers: CIMultiDict[str]) -> None:
        for name in _HEADERS:
            headers.popall(name, None)
        _W3C.inject(headers, self._context)

    def note(self, **attributes: Value | None) -> None:
        known = {name: value for name, value in attributes.items() if value is not None}
        self._span.set_attributes(_named(known))

    def mark_failed(self, why: str) -> None:
        self._span.set_status(StatusCode.ERROR, why)

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end()


class OtelTracing(Tracing):
    """Exports spans to an OTLP receiver.

    Args:
        endpoint: the receiver's URL with its path: ``http://collector:4318/v1/traces``.
        service: the service name, unless ``OTEL_SERVICE_NAME`` is set.

    Raises:
        ImportError: the exporter for the protocol is not installed.
    """

    def __init__(self, endpoint: str, service: str = SERVICE) -> None:
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
        self._provider = TracerProvider(
            resource=Resource.create(named),
            shutdown_on_exit=False,  # otherwise the process waits a second time
        )
        self._exporter = _exporter(endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("pdconn.router")

    def begin_span(self, name: str, headers: Mapping[str, str], **attributes: Value) -> OtelSpan:
        parent = _W3C.extract(headers)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, _named(attributes))
        return OtelSpan(self._tracer, span)

    def close(self) -> None:
        # The exporter retries an unreachable receiver for more than ten seconds; the last spans are
        # not worth that delay at the end.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # it asks no more, in whatever thread it waits


def _exporter(endpoint: str) -> SpanExporter:
    if os.environ.get(_PROTOCOL) == _GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)


def _named(attributes: dict[str, Value]) -> dict[str, Value]:
    """Attribute names for export: ours with a prefix, HTTP's in the standard form."""
    return {_USUAL.get(name, f"pdconn.{name}"): value for name, value in attributes.items()}


_USUAL = {
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "engine": "server.address",
}
