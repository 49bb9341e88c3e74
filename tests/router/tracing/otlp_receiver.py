"""An OTLP receiver: a process of its own that decodes the spans that it is sent.

``POST /v1/traces`` takes an ``ExportTraceServiceRequest`` in protobuf; ``GET /spans`` lists all
spans so far as JSON.  Prints its port when it listens.
"""

from __future__ import annotations

import gzip
import http.server
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it arrived; ids in hexadecimal digits, an empty parent of a root."""

    name: str
    trace: str
    span: str
    parent: str
    kind: str
    failed: bool
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    service: str


class OtlpReceiver:
    """A running receiver."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self.endpoint = f"{self._url}/v1/traces"

    def spans(self) -> list[ReceivedSpan]:
        with urllib.request.urlopen(f"{self._url}/spans", timeout=20) as answer:
            return [ReceivedSpan(**one) for one in json.load(answer)]


@contextmanager
def receiving() -> Iterator[OtlpReceiver]:
    """A receiver, gone at the end."""
    command = [sys.executable, "-m", "tests.router.tracing.otlp_receiver"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield OtlpReceiver(int(process.stdout.readline()))
        finally:
            process.kill()


def serve() -> None:
    """Run until killed."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    received: list[dict[str, Any]] = []

    def decode(raw: bytes) -> Iterator[dict[str, Any]]:
        for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            service = _values(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    yield {
                        "name": span.name,
                        "trace": span.trace_id.hex(),
                        "span": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "kind": Span.SpanKind.Name(span.kind),
                        "failed": span.status.code == Status.STATUS_CODE_ERROR,
                        "began_ns": span.start_time_unix_nano,
                        "ended_ns": span.end_time_unix_nano,
                        "attributes": _values(span.attributes),
                        "service": service,
                    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            if self.headers["Content-Encoding"] == "gzip":
                raw = gzip.decompress(raw)
            received.extend(decode(raw))
            self._answer(ExportTraceServiceResponse().SerializeToString(), "application/x-protobuf")

        def do_GET(self) -> None:
            self._answer(json.dumps(received).encode(), "application/json")

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
            """Log nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


if __name__ == "__main__":
    serve()
