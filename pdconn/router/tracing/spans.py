"""Spans of a request's trace, and what stands for them where nothing is traced.

::

    POST /v1/completions            from its arrival to the end of its answer
    ├── route                       tokens, hits, decision
    ├── prefill                     until its ticket; one per engine that is tried
    │   └── prefix                  until the holder's ticket, where prefill pulls (--pull-above)
    └── decode                      until the end of the answer; one per engine that is tried

``inject`` puts a span into a request's headers, so that the engine's own spans are its children.
Tracing is off unless ``--otlp-traces-endpoint`` is given: then ``tracing.otel`` makes the spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from multidict import CIMultiDict

Value = str | int | float | bool


class Span:
    """A span that is not recorded.  As a context manager it ends, and notes an error."""

    __slots__ = ()

    def child(self, name: str, **attributes: Value) -> Span:
        """A span within this one, which has begun."""
        del name, attributes
        return self

    def inject(self, headers: CIMultiDict[str]) -> None:
        """Name this span as the parent of what these headers' receiver does."""

    def note(self, **attributes: Value | None) -> None:
        """Add what is known by now; None is left out."""

    def fail(self, why: str) -> None:
        """Mark it as failed."""

    def end(self) -> None:
        """It is over; a second call has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")
        self.end()


NOT_TRACED = Span()


class Tracing:
    """Where the traces of requests begin; this one records nothing."""

    def begin(self, name: str, headers: Mapping[str, str], **attributes: Value) -> Span:
        """A request's span: below the one that a client's ``traceparent`` names, if it has one."""
        del name, headers, attributes
        return NOT_TRACED

    def close(self) -> None:
        """Export what was not exported yet; may take seconds, and runs on a thread."""
