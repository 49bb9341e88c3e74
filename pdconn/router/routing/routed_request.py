"""One request on its way through the router: what travels, what was decided, how it ended.

::

    client ──► app ──► decide ──► handover ──► stream ──► client
               RoutedRequest ───────────────────────►
                       Decision ────►      Outcome

- A ``RoutedRequest`` travels.  It is the only one of the three that changes, and the hand-over
  changes it.
- A ``Decision`` says which engines to try, and why.
- An ``Outcome`` says which engines served the request, how long they took and how it ended.
  It is written when the answer begins, and finally when it ends.

``DecisionLog`` keeps the last decisions with their outcomes, and no request: those hold bodies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from msgspec import Raw
from multidict import CIMultiDict

from pdconn.router.admission.budget import HeldBody
from pdconn.router.events.caches import PrefixLookup
from pdconn.router.fleet.client import Delivery, EngineAnswer
from pdconn.router.labels import LabelValue
from pdconn.router.openai.requests import Direct, ParsedBody
from pdconn.router.pulls.pull import PrefixPull
from pdconn.router.routing.policy import Ranking, Role
from pdconn.router.routing.timeline import Answered, Step, StepKind, Timeline
from pdconn.router.tracing.spans import NOT_TRACED, Span

MOST_DECISIONS = 512
MOST_HASHES = 1_000_000


class Fault(Enum):
    """The side that a request's end is a failure of."""

    NONE = "none"
    CLIENT = "client"
    SERVICE = "service"
    #: A bound or a stop that the operator has set.
    LIMIT = "limit"


class RequestEnd(LabelValue):
    """How a client's request ended: the label ``outcome`` of ``requests_total``.

    ``fault`` decides the colour on the admin page, spans that failed, and what alerts count.
    """

    OK = ("ok", Fault.NONE, "The client has the whole answer.")
    REFUSED = (
        "refused",
        Fault.CLIENT,
        "The router refused it for a mistake of the client: JSON, fields, size, an unknown model.",
    )
    CLIENT_ERROR = (
        "client_error",
        Fault.CLIENT,
        "An engine refused it for a mistake of the client (4xx, 501), such as a prompt that is too "
        "long or a temperature below 0; in a stream too.",
    )
    CLIENT_LEFT = (
        "client_left",
        Fault.CLIENT,
        "The client closed its connection before it had the whole answer.",
    )
    ENGINE_ERROR = (
        "engine_error",
        Fault.SERVICE,
        "An engine answered 5xx or 429, or with an error in a stream.",
    )
    BROKEN_STREAM = (
        "broken_stream",
        Fault.SERVICE,
        "An engine's connection broke in the middle of an answer.",
    )
    NO_ENGINE = ("no_engine", Fault.SERVICE, "No engine of some role answered: 503.")
    NO_HANDOVER = (
        "no_handover",
        Fault.SERVICE,
        "It got no ticket, and `--require-prefill` forbids decode to compute it: 503.",
    )
    TIMED_OUT = ("timed_out", Fault.SERVICE, "`--request-timeout` ended before the answer did.")
    BUSY = (
        "busy",
        Fault.LIMIT,
        "The router holds as much as it may, for all clients together: 503.",
    )
    CUT_OFF = ("cut_off", Fault.LIMIT, "The router stopped before the answer was whole.")

    fault: Fault

    def __new__(cls, value: str, fault: Fault, meaning: str) -> Self:
        """Only ``value`` is the member's value."""
        made = object.__new__(cls)
        made._value_, made.fault, made.meaning = value, fault, meaning
        return made

    @property
    def is_failure(self) -> bool:
        """Whether it failed, and not by its client."""
        return self.fault not in (Fault.NONE, Fault.CLIENT)


class Guess(int):
    """A number that was estimated, not counted.

    >>> str(Guess(97))
    '~97'
    """

    __slots__ = ()

    def __str__(self) -> str:
        return f"~{int(self)}"


class Stage(Enum):
    """The kind of engine that has the request."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class RoutedRequest:
    """A client's request, from its body to the end of its answer.

    Attributes:
        request_id, headers: as engines get them.
        body: what the client sent.
        held: its bytes, as they are counted.
        span: of the whole request.
        stage: the kind of engine that is being asked.
        asked_at_s: when the engine was asked, by ``time.perf_counter``.
        delivery: whether that engine can have seen the request.
        client_left: no other engine is asked.
        serving: the engines that serve its model; None: all do.
        tokens: of its prompt, while prefill may pull some of them from another engine.
        pull: what prefill pulled from another engine, or tried to.
        ticket: from prefill, while it may still be used.
        direct: why decode gets no ticket; None while it is to get one.
        failures: engines that failed it, and whether it may have broken them.
        refusal: the last answer of an engine that refused it, for want of a better one.
        prefill, decode: the engines that answered, so far.
        cached_tokens: prompt tokens that prefill reported as cached, if it does.
        prompt_tokens: as an engine counted them; None before, and where it does not say.
        ticket_s, first_byte_s, status, end, total_s: see ``Outcome``.
        decision: the last one, for the log of decisions.
        timeline: when it went from one step to the next.
    """

    request_id: str
    headers: CIMultiDict[str]
    body: ParsedBody
    held: HeldBody = field(default_factory=HeldBody)
    span: Span = NOT_TRACED
    stage: Stage = Stage.PREFILL
    asked_at_s: float = field(default_factory=time.perf_counter)
    delivery: Delivery = field(default_factory=Delivery)
    client_left: bool = False
    serving: frozenset[str] | None = None
    tokens: Sequence[int] | None = None
    pull: PrefixPull | None = None
    ticket: Raw | None = None
    direct: Direct | None = None
    failures: dict[tuple[str, Role], bool] = field(default_factory=dict)
    refusal: EngineAnswer | None = None
    prefill: str | None = None
    decode: str | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    ticket_s: float | None = None
    first_byte_s: float | None = None
    status: int | None = None
    end: RequestEnd | None = None
    total_s: float | None = None
    decision: Decision | None = None
    timeline: Timeline = field(default_factory=Timeline)

    def drop_body(self) -> None:
        """Its answer has begun, or it failed: an answer may take minutes, and needs no body."""
        self.body = self.body.emptied()
        self.tokens = None

    def enter(self, stage: Stage) -> None:
        """The next engine is about to be asked."""
        self.stage = stage
        self.delivery = Delivery()
        self.asked_at_s = time.perf_counter()
        self.timeline.asked.append((StepKind(stage.value), self.asked_at_s))

    def has_failed_at(self, engine: str, role: Role) -> bool:
        """Whether an engine has failed it in this role: another one is asked."""
        return (engine, role) in self.failures

    def num_broken(self, role: Role) -> int:
        """Engines of a role that it may have broken."""
        return sum(broken for (_, of), broken in self.failures.items() if of is role)

    def keep_refusal(self, answer: EngineAnswer | None) -> None:
        """Keep an answer in place of the one that was kept before."""
        if self.refusal is not None:
            self.refusal.close()
        self.refusal = answer

    def take_refusal(self) -> EngineAnswer | None:
        """The answer that was kept; its caller closes it."""
        answer, self.refusal = self.refusal, None
        return answer

    def waited_s(self) -> float:
        """Seconds since the engine was asked."""
        return time.perf_counter() - self.asked_at_s

    def finish(self, end: RequestEnd, status: int | None, total_s: float) -> None:
        """The client has its answer, or will not get one."""
        self.end, self.status, self.total_s = end, status, total_s
        self.timeline.ended_s = self.timeline.began_s + total_s

    def outcome(self) -> Outcome:
        """How the request ended, as far as it has."""
        borrowed_s = None if self.pull is None else self.pull.took_s
        answered = Answered(self.prefill is not None, borrowed_s, self.first_byte_s)
        return Outcome(
            self.status,
            self.prefill,
            self.decode,
            self.cached_tokens,
            self.ticket_s,
            self.first_byte_s,
            self.end,
            self.total_s,
            self.pull,
            self.timeline.steps(answered),
            self.prompt_tokens,
        )

    @property
    def counted_tokens(self) -> int | Guess | None:
        """Tokens of its prompt as an engine counted them, else as the router did."""
        if self.prompt_tokens is not None or self.decision is None:
            return self.prompt_tokens
        decision = self.decision
        return Guess(decision.num_tokens) if decision.is_guess else decision.num_tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy decided for a request, and what it knew.

    Attributes:
        at: seconds since the epoch.
        policy: its name.
        num_tokens: of the prompt.
        is_guess: that is an estimate, as the prompt was not tokenized.
        ranking: the engines to try.
        lookup: the hits of its prefix; None without a lookup.
        unknown: why there was no lookup.
        took_s: time that the decision took, tokenizing included.
    """

    request_id: str
    at: float
    policy: str
    num_tokens: int
    ranking: Ranking
    lookup: PrefixLookup | None = None
    unknown: str | None = None
    took_s: float = 0.0
    is_guess: bool = False

    @property
    def num_hashes(self) -> int:
        """Block hashes that the lookup keeps."""
        prompts = () if self.lookup is None else self.lookup.prompts.values()
        return sum(len(prompt.hashes) for prompt in prompts)

    def hit_tokens(self, engine: str | None) -> int:
        """Predicted hit in an engine's prefix cache."""
        best = None if self.lookup is None else self.lookup.best(engine)
        return 0 if best is None else best.hit.tokens

    def promised_tokens(self, prefill: str) -> int:
        """What ``prefill`` should report as cached; 0 where it chose among unequal ranks."""
        ranks = () if self.lookup is None else self.lookup.ranks.get(prefill, ())
        named = [
            one.candidate.rank for one in self.ranking.prefill if one.candidate.engine == prefill
        ]
        asked = [rank for rank in ranks if len(ranks) == 1 or rank.rank in named]
        return asked[0].hit.tokens if asked else 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a routed request ended.

    Attributes:
        status: HTTP status of the answer, the router's own too; None where there is none.
        prefill, decode: the engines that answered.
        cached_tokens: prompt tokens that prefill reported as cached.
        ticket_s: from asking prefill until its ticket arrived; None where decode had none.
        first_byte_s: from asking decode until the first byte of its answer.
        end: how it ended; None while it is under way.
        total_s: from the request's arrival until its end.
        pull: what prefill pulled from another engine, or tried to.
        steps: what it waited for, one after another.
        prompt_tokens: as an engine counted them.
    """

    status: int | None = None
    prefill: str | None = None
    decode: str | None = None
    cached_tokens: int | None = None
    ticket_s: float | None = None
    first_byte_s: float | None = None
    end: RequestEnd | None = None
    total_s: float | None = None
    pull: PrefixPull | None = None
    steps: tuple[Step, ...] = ()
    prompt_tokens: int | None = None


PENDING = Outcome()
"""Of a request that has not ended."""

Logged = tuple[Decision, Outcome]


class DecisionLog:
    """The last decisions by request id, bounded by number and by the hashes that they keep."""

    def __init__(self, most: int = MOST_DECISIONS, most_hashes: int = MOST_HASHES) -> None:
        self._most = most
        self._most_hashes = most_hashes
        self._entries: dict[str, Logged] = {}
        self._num_hashes = 0

    def add(self, decision: Decision) -> None:
        """Keep a decision; the oldest go where there are too many."""
        self._drop(decision.request_id)
        self._entries[decision.request_id] = decision, PENDING
        self._num_hashes += decision.num_hashes
        while len(self._entries) > self._most or self._num_hashes > self._most_hashes:
            self._drop(next(iter(self._entries)))

    def end(self, decision: Decision, outcome: Outcome) -> None:
        """Keep the outcome beside its decision, if that is still kept; replaces an earlier one."""
        entry = self._entries.get(decision.request_id)
        if entry is not None and entry[0] is decision:
            self._entries[decision.request_id] = decision, outcome

    def get(self, request_id: str) -> Logged | None:
        """The decision for a request, if it is kept."""
        return self._entries.get(request_id)

    def newest(self) -> Iterator[Logged]:
        """Newest first."""
        return reversed(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._num_hashes -= entry[0].num_hashes
