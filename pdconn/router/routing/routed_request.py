"""One request on its way through the router: the request, its events, and its outcome.

::

    client ──► app ──► decide ──► handover ──► stream ──► client
               RoutedRequest ───────────────────────►
               Received  Began, Decided, Prefilled, Began, FirstByte, Passed ... RequestEnded

    receive ─► route ─► borrow ─► prefill ─► decode ─► stream         the page's waterfall
    its body            a prefix  until the  until its  until its
                                  ticket     first byte last byte

With an early ticket (``handover.early_leg``) decode is asked while prefill is under way.  Until
prefill answers it *follows*, and from then on the hand-over counts as without one::

    receive ─► route ─► prefill ──────────────► decode ─► stream
                              └► follow ──────┘

- A ``RoutedRequest`` is passed along.  Everything that happens to it is appended to its ``events``
  (``request_events``): which engines answered, how long they took, its steps, spans, metrics,
  access log line and row on the admin page are derived from them.
- A ``Decision`` is the list of engines to try, and the reason.
- An ``Outcome`` is the result that its events show.  It is stored when the answer begins, and
  finally when it ends (``decision_log``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from msgspec import Raw
from multidict import CIMultiDict

from pdconn.router.admission.places import HeldBody
from pdconn.router.fleet.engine_client import EngineAnswer
from pdconn.router.fleet.member import Role
from pdconn.router.labels import RequestEnd
from pdconn.router.openai.requests import Direct, ParsedBody
from pdconn.router.openai.session_orders import SessionOrder
from pdconn.router.pulls.pull_outcome import PrefixPull
from pdconn.router.routing.policy import Decision
from pdconn.router.routing.request_events import (
    ASKS,
    Began,
    ClientLeft,
    Decided,
    Event,
    Fact,
    Failed,
    FirstByte,
    Over,
    Passed,
    Prefilled,
    Pulled,
    Received,
    RequestEnded,
    StepKind,
    Streamed,
    WentDirect,
)


class Guess(int):
    """A number that was estimated, not counted.

    >>> str(Guess(97))
    '~97'
    """

    __slots__ = ()

    def __str__(self) -> str:
        return f"~{int(self)}"


E = TypeVar("E", bound=Event)


class EventWatcher(Protocol):
    """An observer of events, called as they happen."""

    kinds: ClassVar[frozenset[type[Event]]]
    """The classes of events that it observes."""

    def saw(self, request: RoutedRequest, event: Event) -> None:
        """An event was appended."""
        ...


class Trace(EventWatcher, Protocol):
    """A watcher that makes spans of events."""

    def inject(self, began: Began, headers: CIMultiDict[str]) -> None:
        """Set the span of a step as the parent of the receiver's spans."""
        ...


class Abandoned(Exception):
    """The client left before another engine was asked."""


def said(error: BaseException) -> str:
    """The text of an error, for the span that it ended."""
    return f"{type(error).__name__}: {error}"


@dataclass(slots=True)
class RoutedRequest:
    """A client's request, from its body to the end of its answer.

    Attributes:
        request_id, headers: as sent to engines.
        body: the client's body.
        held: its bytes in the budget.
        trace: makes its spans; None without tracing.
        serving: the engines that serve its model; None for all.
        allowed: the engines that may decode it, whatever they serve; None for all.
        tokens: of its prompt, while prefill may pull some of them from another engine.
        session: what it asks for its session.
        ticket: from prefill, while it may still be used.
        early: in place of the ticket until that is there, while it may still be used.
        refusal: the last answer of an engine that refused it, kept until a better one.
        events: what has happened, in order.  Append with ``note`` only.
        watchers: are called with each event.
        known: cached results, with the number of events that they were derived from.
    """

    request_id: str
    headers: CIMultiDict[str]
    body: ParsedBody
    held: HeldBody = field(default_factory=HeldBody)
    trace: Trace | None = None
    serving: frozenset[str] | None = None
    tokens: Sequence[int] | None = None
    session: SessionOrder | None = None
    ticket: Raw | None = None
    early: Raw | None = None
    refusal: EngineAnswer | None = None
    events: list[Event] = field(default_factory=lambda: [Received(time.perf_counter())])
    watchers: tuple[EventWatcher, ...] = ()
    known: tuple[int, Outcome] = field(default_factory=lambda: (0, PENDING))
    allowed: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.trace is not None:
            self.watchers = (self.trace, *self.watchers)

    def may_serve(self, role: Role) -> frozenset[str] | None:
        """The engines that may serve it in a role; None for all."""
        return common(self.serving, self.allowed) if role is Role.DECODE else self.serving

    def drop_body(self) -> None:
        """Release the body when the answer begins or fails; an answer may take minutes."""
        self.body = self.body.emptied()
        self.tokens = None

    def keep_refusal(self, answer: EngineAnswer | None) -> None:
        """Keep an answer in place of the previous one."""
        if self.refusal is not None:
            self.refusal.close()
        self.refusal = answer

    def take_refusal(self) -> EngineAnswer | None:
        """The kept answer; the caller closes it."""
        answer, self.refusal = self.refusal, None
        return answer

    @property
    def usable_ticket(self) -> Raw | None:
        """What decode may be sent now: the ticket, or an early one."""
        return self.early if self.ticket is None else self.ticket

    def spend_ticket(self) -> Raw | None:
        """Drop the ticket, also an early one; returns prefill's."""
        ticket, self.ticket, self.early = self.ticket, None, None
        return ticket

    # Events

    def note(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)
        kind = type(event)
        for watcher in self.watchers:
            if kind in watcher.kinds:
                watcher.saw(self, event)

    def begin_step(self, step: StepKind, engine: str | None = None, **facts: Fact) -> Began:
        """A step begins.

        Raises:
            Abandoned: another engine would be asked, and the client has left.
        """
        if step in ASKS and self.client_left:
            raise Abandoned
        began = Began(step, engine, facts)
        self.note(began)
        return began

    @contextmanager
    def within(self, step: StepKind, engine: str | None = None, **facts: Fact) -> Iterator[Began]:
        """A context for a step, which ends with the block."""
        began = self.begin_step(step, engine, **facts)
        try:
            yield began
        except BaseException as error:
            self.note(Over(began, said(error)))
            raise
        self.note(Over(began))

    # Derived from the events

    def last(self, kind: type[E]) -> E | None:
        """The last event of a kind."""
        for event in reversed(self.events):
            if type(event) is kind:
                return event
        return None

    @property
    def arrived_s(self) -> float:
        """The arrival time, by ``time.perf_counter``."""
        return _arrived_s(self.events)

    def asked(self, step: StepKind) -> Began | None:
        """The engine of one role that was asked last; ``step``: prefill or decode."""
        for event in reversed(self.events):
            if type(event) is Began and event.step is step:
                return event
        return None

    def engines_asked(self, step: StepKind) -> set[str]:
        """The engines of one role that have been asked; ``step``: prefill or decode."""
        began = (event for event in self.events if type(event) is Began and event.step is step)
        return {one.engine for one in began if one.engine is not None}

    def is_over(self, began: Began) -> bool:
        """Whether a step has ended."""
        return any(type(event) is Over and event.began is began for event in self.events)

    @property
    def client_left(self) -> bool:
        """Whether no other engine is asked, since the answer has no reader."""
        return self.last(ClientLeft) is not None

    @property
    def decision(self) -> Decision | None:
        """The last decision."""
        decided = self.last(Decided)
        return None if decided is None else decided.decision

    @property
    def direct(self) -> Direct | None:
        """The reason why decode gets no ticket; None while it is to get one."""
        direct = self.last(WentDirect)
        return None if direct is None else direct.reason

    @property
    def pull(self) -> PrefixPull | None:
        """The pull of a prefix by prefill, successful or not."""
        pulled = self.last(Pulled)
        return None if pulled is None else pulled.pull

    def has_failed_at(self, engine: str, role: Role) -> bool:
        """Whether an engine has failed it in this role, so that another one is asked."""
        return any(one.engine == engine and one.role is role for one in self._failures())

    def has_broken(self, engine: str, role: Role) -> bool:
        """Whether the request may have broken an engine in this role."""
        return engine in self._broken(role)

    def num_broken(self, role: Role) -> int:
        """Number of engines of a role that the request may have broken."""
        return len(self._broken(role))

    def _broken(self, role: Role) -> set[str]:
        return {one.engine for one in self._failures() if one.role is role and one.is_broken}

    def was_late(self, role: Role) -> bool:
        """Whether an engine was too slow for the request in a role, and was left."""
        return any(one.role is role and one.is_late for one in self._failures())

    def _failures(self) -> Iterator[Failed]:
        return (event for event in self.events if type(event) is Failed)

    def outcome(self) -> Outcome:
        """The outcome of the request so far."""
        known, outcome = self.known
        if known < len(self.events):  # otherwise nothing has happened since
            outcome = outcome_of(self.events)
            self.known = len(self.events), outcome
        return outcome

    @property
    def counted_tokens(self) -> int | Guess | None:
        """Prompt tokens as counted by an engine, else as counted or estimated by the router."""
        counted, decision = self.outcome().prompt_tokens, self.decision
        if counted is not None or decision is None:
            return counted
        return Guess(decision.num_tokens) if decision.is_guess else decision.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One step, in seconds from the request's arrival.

    Attributes:
        end_s: None while it is running.
        failed: the engine that was asked has not answered.
    """

    kind: StepKind
    start_s: float
    end_s: float | None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a routed request.

    Attributes:
        status: HTTP status of the answer, the router's own included; None without an answer.
        prefill, decode: the engines that answered.
        cached_tokens: prompt tokens that prefill reported as cached.
        ticket_s: from asking prefill until its ticket arrived; None if decode had none.
        early_s: from asking prefill until decode was asked with an early ticket; None if it was
            not, or if that was of no use.
        first_byte_s: from asking decode until the first byte of its answer; with an early ticket
            from prefill's answer, and 0 if decode was first.
        end: how it ended; None while it is running.
        total_s: from the request's arrival until its end.
        pull: the pull of a prefix by prefill, successful or not.
        prompt_tokens: as counted by an engine.
        events: the events from which this is derived.
    """

    status: int | None = None
    prefill: str | None = None
    decode: str | None = None
    cached_tokens: int | None = None
    ticket_s: float | None = None
    early_s: float | None = None
    first_byte_s: float | None = None
    end: RequestEnd | None = None
    total_s: float | None = None
    pull: PrefixPull | None = None
    prompt_tokens: int | None = None
    events: tuple[Event, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, in order."""
        return steps_of(self.events) if self.events else ()

    @property
    def had_ticket(self) -> bool:
        """Whether decode had a ticket, or an early one."""
        return self.ticket_s is not None or self.early_s is not None


def outcome_of(events: Sequence[Event]) -> Outcome:
    """The outcome so far: the last event of each kind counts."""
    last: dict[type[Event], Any] = {type(event): event for event in events}
    prefilled: Prefilled | None = last.get(Prefilled)
    direct: WentDirect | None = last.get(WentDirect)
    first_byte: FirstByte | None = last.get(FirstByte)
    passed: Passed | None = last.get(Passed)
    pulled: Pulled | None = last.get(Pulled)
    streamed: Streamed | None = last.get(Streamed)
    ended: RequestEnded | None = last.get(RequestEnded)
    reason = None if direct is None else direct.reason
    is_spent = reason is Direct.TICKET_SPENT
    counted = None if ended is None else ended.prompt_tokens
    if prefilled is not None and counted is None:
        counted = prefilled.prompt_tokens
    return Outcome(
        # An answer after the end reached no client.
        status=ended.status if ended is not None else None if passed is None else passed.status,
        prefill=None if prefilled is None else prefilled.engine,
        decode=None if first_byte is None else first_byte.engine,
        cached_tokens=None if prefilled is None else prefilled.cached_tokens,
        ticket_s=None if prefilled is None or is_spent else prefilled.ticket_s,
        early_s=None if streamed is None or reason is not None else streamed.after_s,
        first_byte_s=None if first_byte is None else first_byte_s(events, first_byte),
        end=None if ended is None else ended.end,
        total_s=None if ended is None else ended.at_s - _arrived_s(events),
        pull=None if pulled is None else pulled.pull,
        prompt_tokens=counted,
        events=tuple(events),
    )


def first_byte_s(events: Sequence[Event], first_byte: FirstByte) -> float:
    """Seconds until decode's first byte, as in an :class:`Outcome`."""
    # What decode waits for prefill is no part of the hand-over.
    since_s = _followed(events).get(first_byte.began, first_byte.began.at_s)
    return 0.0 if since_s is None else max(0.0, first_byte.at_s - since_s)


def steps_of(events: Sequence[Event]) -> tuple[Step, ...]:
    """The steps so far, in the order in which they began; one that is running has no end.

    Each engine that was asked has its own step, until it answered or failed.
    """
    asked: list[Began] = []
    until_s: dict[Began, float] = {}
    answered: set[Began] = set()
    # The first part of a step, where it has two; its end is None while that is not known.
    first: dict[Began, tuple[StepKind, float | None]] = {
        began: (StepKind.FOLLOW, prefilled_s) for began, prefilled_s in _followed(events).items()
    }
    has_borrowed = False
    ended_s: float | None = None
    for event in events:
        match event:
            case Began() if event.step in ASKS:
                asked.append(event)
            case Prefilled() | FirstByte():
                until_s[event.began] = event.at_s
                answered.add(event.began)
            case Over():
                until_s.setdefault(event.began, event.at_s)
            # A prefix, by the prefill that waited for it.
            case Pulled() if not has_borrowed and asked:
                has_borrowed = True
                first.setdefault(asked[-1], (StepKind.BORROW, event.at_s))
            case RequestEnded():
                ended_s = event.at_s
    arrived_s = _arrived_s(events)

    def step(kind: StepKind, start_s: float, end_s: float | None, failed: bool = False) -> Step:
        return Step(kind, start_s - arrived_s, None if end_s is None else end_s - arrived_s, failed)

    received_s = events[0].at_s
    made = [
        step(StepKind.RECEIVE, arrived_s, received_s),
        step(StepKind.ROUTE, received_s, asked[0].at_s if asked else ended_s),
    ]
    last = {one.step: one for one in asked}
    for one in asked:
        is_good = one is last[one.step] and one in answered
        kind, start_s, end_s = one.step, one.at_s, until_s.get(one, ended_s)
        if one in first:
            part, part_s = first[one]
            if part_s is None or (end_s is not None and end_s < part_s):
                kind = part
            else:
                made.append(step(part, start_s, part_s))
                start_s = part_s
        made.append(step(kind, start_s, end_s, end_s is not None and not is_good))
    served = last.get(StepKind.DECODE)
    if served is not None and served in answered:
        made.append(step(StepKind.STREAM, until_s[served], ended_s))
    return tuple(made)


def _followed(events: Sequence[Event]) -> dict[Began, float | None]:
    """Decode's steps that began with an early ticket, with the time of prefill's answer."""
    if Streamed not in map(type, events):  # as without --streams
        return {}
    found: dict[Began, float | None] = {}
    is_early = False
    for event in events:
        match event:
            case Streamed():
                is_early = event.after_s is not None
            case WentDirect():
                is_early = is_early and event.reason is None
            case Began(step=StepKind.DECODE) if is_early:
                found[event] = None
            case Prefilled():
                is_early = False
                found = {
                    began: event.at_s if at_s is None else at_s for began, at_s in found.items()
                }
    return found


def _arrived_s(events: Sequence[Event]) -> float:
    (first, *_) = events
    return first.arrived_s if isinstance(first, Received) else first.at_s


def common(ours: frozenset[str] | None, theirs: frozenset[str] | None) -> frozenset[str] | None:
    """What two sets have in common; None is the set of all.

    >>> common(None, frozenset("ab")) == frozenset("ab"), common(None, None)
    (True, None)
    >>> common(frozenset("a"), frozenset("b"))
    frozenset()
    """
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return ours & theirs


PENDING: Outcome = Outcome()
"""The outcome of a request that has not ended."""
