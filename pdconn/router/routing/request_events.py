"""What happens to a routed request: its events, in the order in which they are noted.

An event is immutable and has its time.  ``RoutedRequest`` (``routed_request``) keeps them; which
engines answered, how long they took, steps, spans, metrics, the access log line and the row on the
admin page are derived from them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pdconn.router.fleet.engine_client import Delivery
from pdconn.router.fleet.member import Role
from pdconn.router.labels import RequestEnd
from pdconn.router.metric_table import EarlyStart, PromiseEnd
from pdconn.router.openai.requests import Direct
from pdconn.router.openai.session_orders import KeptReport
from pdconn.router.pulls.pull_outcome import PrefixPull
from pdconn.router.routing.policy import Decision


class StepKind(Enum):
    """The kind of a step, such as waiting for prefill."""

    RECEIVE = "receive"
    ROUTE = "route"
    BORROW = "borrow"
    PREFILL = "prefill"
    FOLLOW = "follow"
    DECODE = "decode"
    STREAM = "stream"


ASKS = (StepKind.PREFILL, StepKind.DECODE)
"""Steps in which an engine has the request."""

Fact = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Event:
    """Something that happened to a request, with its time by ``time.perf_counter``."""

    at_s: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Received(Event):
    """The body was read and checked; the request had arrived at ``arrived_s``."""

    arrived_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Began(Event):
    """A step has begun.

    Attributes:
        engine: the engine that is asked, if any.
        facts: attributes of its span.
        delivery: whether the engine can have seen the request.
    """

    step: StepKind
    engine: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    delivery: Delivery = field(default_factory=Delivery)


@dataclass(frozen=True, slots=True)
class Learned(Event):
    """An attribute for the span of a step, such as the status of an answer."""

    began: Began
    facts: Mapping[str, Fact]


@dataclass(frozen=True, slots=True)
class Over(Event):
    """A step has ended, decode's with its answer; ``error``: the error that interrupted it."""

    began: Began
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Decided(Event):
    """The engines to try; ``is_choice``: False where there was nothing to decide."""

    decision: Decision
    is_choice: bool = True


@dataclass(frozen=True, slots=True)
class WentDirect(Event):
    """The reason why decode gets no ticket; None: it is to get one."""

    reason: Direct | None


@dataclass(frozen=True, slots=True)
class Pulled(Event):
    """The outcome so far of a prefix that prefill was to pull from another engine."""

    pull: PrefixPull


@dataclass(frozen=True, slots=True)
class EngineAnswered(Event):
    """The engine that was asked when ``began`` began has answered."""

    began: Began

    @property
    def engine(self) -> str:
        """The engine."""
        assert self.began.engine is not None
        return self.began.engine

    @property
    def waited_s(self) -> float:
        """Seconds since it was asked."""
        return self.at_s - self.began.at_s


@dataclass(frozen=True, slots=True)
class Prefilled(EngineAnswered):
    """Prefill has computed the prompt.

    Attributes:
        has_ticket: whether the answer has a ticket.
        cached_tokens: prompt tokens that it reports as cached, if it does.
        prompt_tokens: prompt tokens that it reports, if it does.
        has_borrowed: whether it had another engine's ticket for a part of the prompt.
    """

    has_ticket: bool
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    has_borrowed: bool = False

    @property
    def ticket_s(self) -> float | None:
        """Seconds until the ticket arrived; None without one."""
        return self.waited_s if self.has_ticket else None


@dataclass(frozen=True, slots=True)
class TurnKept(Event):
    """An engine has told what it keeps of the request's session; ``is_prefill``: its role."""

    engine: str
    report: KeptReport
    is_prefill: bool = True

    @property
    def ends(self) -> list[PromiseEnd]:
        """What became of the session's promises, beside those that were broken."""
        report = self.report
        told = {
            PromiseEnd.MADE: report.is_kept,
            PromiseEnd.USED: report.used,
            PromiseEnd.REFUSED: not report.is_kept,
        }
        return [end for end, is_so in told.items() if is_so]


@dataclass(frozen=True, slots=True)
class FirstByte(EngineAnswered):
    """The answer of a decode engine has begun; ``is_good``: no other engine is asked instead."""

    is_good: bool


@dataclass(frozen=True, slots=True)
class Streamed(Event):
    """Decode was asked before prefill answered, or why not.

    ``after_s``: seconds from asking prefill until decode was asked.
    """

    start: EarlyStart
    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """An engine has failed the request in a role.

    ``is_broken``: the request may be the cause; ``is_late``: it was only too slow.
    """

    engine: str
    role: Role
    is_broken: bool
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class ClientLeft(Event):
    """The client has closed the connection: no other engine is asked."""


@dataclass(frozen=True, slots=True)
class Passed(Event):
    """An engine's answer with this status goes to the client; ``is_served``: it is decode's."""

    status: int
    is_served: bool = False


@dataclass(frozen=True, slots=True)
class FirstToken(Event):
    """The first bytes of a streamed answer were written to the client."""


@dataclass(frozen=True, slots=True)
class RequestEnded(Event):
    """The client has its answer, or will not get one.

    ``prompt_tokens``: as counted in the answer, if it does.
    """

    end: RequestEnd
    status: int | None
    prompt_tokens: int | None = None
