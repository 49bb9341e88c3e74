"""Spans of a request's trace, and a no-op span for disabled tracing.

::

    POST /v1/completions            from its arrival to the end of its answer
    ├── route                       tokens, hits, decision
    ├── prefill                     until its ticket; one per engine that is tried
    │   └── prefix                  until the holder's ticket, where prefill pulls (--pull-above)
    └── decode                      until the end of the answer; one per engine that is tried; it
                                    begins before prefill ends where decode has an early ticket

``inject`` puts a span into a request's headers, so that the engine's own spans become its children.
Tracing is off unless ``--otlp-traces-endpoint`` is given: then ``tracing.otel`` makes the spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol, Self

from multidict import CIMultiDict

from pdconn.router.routing.request_events import (
    Began,
    Decided,
    Event,
    FirstByte,
    Learned,
    Over,
    StepKind,
)
from pdconn.router.routing.routed_request import RoutedRequest, first_byte_s, said

Value = str | int | float | bool


class Span:
    """A span that is not recorded.  A context manager ends it, and notes an error."""

    __slots__ = ()

    def child(self, name: str, **attributes: Value) -> Span:
        """Begin a child span."""
        del name, attributes
        return self

    def inject(self, headers: CIMultiDict[str]) -> None:
        """Set this span as the parent of the receiver's spans."""

    def note(self, **attributes: Value | None) -> None:
        """Add attributes; None is left out."""

    def mark_failed(self, why: str) -> None:
        """Mark the span as failed."""

    def end(self) -> None:
        """Close the span.  Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.mark_failed(said(error))
        self.end()


NOT_TRACED = Span()


class RequestSpans:
    """Makes the spans of a routed request from its events."""

    kinds: ClassVar[frozenset[type[Event]]] = frozenset((Began, Learned, Over, Decided, FirstByte))

    def __init__(self, root: Span) -> None:
        self._root = root
        # By the event that began them; the innermost is the last.
        self._open: dict[Began, Span] = {}

    @property
    def _innermost(self) -> Span:
        return next(reversed(self._open.values()), self._root)

    def inject(self, began: Began, headers: CIMultiDict[str]) -> None:
        """Set the span of a step as the parent of the receiver's spans."""
        self._open[began].inject(headers)

    def saw(self, request: RoutedRequest, event: Event) -> None:
        """Begin, annotate or end a span."""
        match event:
            case Began(step=step, engine=engine, facts=facts):
                # A borrowed prefix is a part of prefill; a refused answer is still open.
                above = self._innermost if step is StepKind.BORROW else self._root
                asks = {} if engine is None else {"engine": engine}
                name = "prefix" if step is StepKind.BORROW else step.value
                self._open[event] = above.child(name, **asks, **facts)
            case Learned(began=began, facts=facts):
                self._open[began].note(**facts)
            case Decided(decision=decision, is_choice=True):
                self._innermost.note(
                    policy=decision.policy,
                    prompt_tokens=decision.num_tokens,
                    alone=decision.ranking.alone,
                    without_lookup=decision.unknown,
                )
            case FirstByte(began=began):
                self._open[began].note(first_byte_seconds=first_byte_s(request.events, event))
            case Over(began=began, error=error):
                span = self._open.pop(began)
                if error is not None:
                    span.mark_failed(error)
                span.end()


class Tracing(Protocol):
    """The start of request traces."""

    def begin_span(self, name: str, headers: Mapping[str, str], **attributes: Value) -> Span:
        """Begin a request's span: below the client's ``traceparent``, if it has one."""
        ...

    def close(self) -> None:
        """Export the remaining spans; may take seconds, and runs on a thread."""
        ...
