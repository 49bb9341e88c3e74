"""Spans of pulls, for engines with ``--otlp-traces-endpoint``.

Workers measure when a pull begins and ends, and the scheduler has its request's trace::

    worker                              scheduler
    PullRecord ── TracedPull ──────►    pdconn.claim    request arrived ─► claim granted
    (durations)   (when it ended)       pdconn.read     blocks known ────► received

Both are children of the caller's span, like vLLM's own ``llm_request``; each rank has a pair of
them.  Times are the worker's wall clock, as in all spans.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdconn import __version__
from pdconn.puller.commands import PullRecord
from pdconn.vllm.metadata import PdWorkerReport
from pdconn.vllm.scheduler_part import SchedulerPart

if TYPE_CHECKING:
    from pdconn.vllm.blocks.transferred import TransferBlocks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TracedPull:
    """A pull that ``rank`` has received, reported at ``at_ns`` (``time.time_ns``)."""

    rank: int
    at_ns: int
    record: PullRecord

    @classmethod
    def now(cls, rank: int, record: PullRecord) -> TracedPull:
        """A pull that is reported now."""
        return cls(rank, time.time_ns(), record)


def are_traced(config: Any) -> bool:
    """Whether an engine of vLLM's ``config`` exports spans."""
    observed = getattr(config, "observability_config", None)
    return bool(getattr(observed, "otlp_traces_endpoint", None))


@dataclass
class PullSpans(SchedulerPart):
    """Exports spans of pulls whose requests have trace headers.

    Attributes:
        tracer: OpenTelemetry's, from the provider that vLLM has set.
    """

    tracer: Any
    _headers: dict[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Any) -> PullSpans | None:
        """From vLLM's ``config``; None if nothing is traced."""
        if not are_traced(config):
            return None
        try:
            from opentelemetry import trace
        except ImportError:
            log.warning("pdconn: pulls are not traced: opentelemetry is not installed")
            return None
        return cls(trace.get_tracer("pdconn", __version__))

    def __len__(self) -> int:
        return len(self._headers)

    def on_new_request(self, request: Any) -> None:
        """Store the trace headers of a request that may pull."""
        if not request.trace_headers or not request.kv_transfer_params:
            return
        self._headers[request.request_id] = request.trace_headers

    def update_connector_output(self, connector_output: Any) -> None:
        """Export the pulls that ranks have received."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, PdWorkerReport):
            self.export_pulls(report.pulled)

    def request_finished(self, request: Any, blocks: TransferBlocks, num_computed: int) -> None:
        """Forget a request that leaves the engine."""
        self._headers.pop(request.request_id, None)

    def export_pulls(self, pulls: Iterable[TracedPull]) -> None:
        """Export spans of these pulls."""
        for pull in pulls:
            headers = self._headers.get(pull.record.request)
            if headers is not None:
                self._export(pull, headers)

    def _export(self, pull: TracedPull, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(headers)
        record = pull.record
        read = {
            "pdconn.bytes": record.moved.nbytes,
            "pdconn.descriptors": record.num_descriptors,
            "pdconn.post_seconds": record.post_s,
            "pdconn.transfer_seconds": record.transfer_s,
            "pdconn.visible_seconds": record.visible_s,
            "pdconn.early_bytes": record.early_nbytes,
        }
        for name, ago_s, takes_s, more in (
            ("pdconn.claim", record.age_s, record.claim_s, {}),
            ("pdconn.read", record.total_s, record.total_s, read),
        ):
            began_ns = pull.at_ns - round(1e9 * ago_s)
            span = self.tracer.start_span(
                name,
                context=context,
                kind=SpanKind.CLIENT,
                attributes={"pdconn.rank": pull.rank, **more},
                start_time=began_ns,
            )
            span.end(end_time=began_ns + round(1e9 * max(0.0, takes_s)))
