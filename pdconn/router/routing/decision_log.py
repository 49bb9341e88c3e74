"""The last decisions, so that one can be asked about afterwards.  Pure.

Bounded by number and by the hashes they keep: the oldest go first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdconn.router.events.caches import PrefixLookup
from pdconn.router.routing.policy import Decision

MOST = 512
MOST_HASHES = 1_000_000


@dataclass(slots=True)
class RouteRecord:
    """What was decided for a request, and what came of it.

    Attributes:
        at: seconds since the epoch.
        policy: the name of who decided.
        num_tokens: of the prompt; an estimate where ``unknown`` says why it is not known.
        looked: where its prefix was; None where that was not asked or not known.
        took_s: that deciding took, tokenizing included.
        prefill, decode: the engines that answered, as far as it came.
        cached_tokens: what prefill reported of its prefix cache, if it does.
        ticket_s: from asking prefill until its ticket was here; None where decode had none.
        first_byte_s: from asking decode until the first byte of its answer.
    """

    request_id: str
    at: float
    policy: str
    num_tokens: int
    decision: Decision
    looked: PrefixLookup | None = None
    unknown: str | None = None
    took_s: float = 0.0
    prefill: str | None = None
    decode: str | None = None
    cached_tokens: int | None = None
    ticket_s: float | None = None
    first_byte_s: float | None = None

    @property
    def num_hashes(self) -> int:
        """Block hashes that it keeps."""
        prompts = () if self.looked is None else self.looked.prompts.values()
        return sum(len(prompt.hashes) for prompt in prompts)

    def promised_tokens(self) -> int:
        """What prefill should have found cached; 0 where it chose among ranks that differ."""
        ranks = () if self.looked is None else self.looked.ranks.get(self.prefill or "", ())
        named = [
            one.candidate.rank
            for one in self.decision.prefill
            if one.candidate.engine == self.prefill
        ]
        asked = [rank for rank in ranks if len(ranks) == 1 or rank.rank in named]
        return asked[0].hit.tokens if asked else 0

    def hit_tokens(self, engine: str | None) -> int:
        """What was predicted of an engine's prefix cache."""
        best = None if self.looked is None else self.looked.best(engine)
        return 0 if best is None else best.hit.tokens


@dataclass(slots=True)
class DecisionLog:
    """The last courses by request id."""

    _courses: dict[str, RouteRecord] = field(default_factory=dict)
    _num_hashes: int = 0

    def add(self, course: RouteRecord) -> None:
        """Remember a course, and forget the oldest where there are too many."""
        self._forget(course.request_id)
        self._courses[course.request_id] = course
        self._num_hashes += course.num_hashes
        while len(self._courses) > MOST or self._num_hashes > MOST_HASHES:
            self._forget(next(iter(self._courses)))

    def get(self, request_id: str) -> RouteRecord | None:
        """The course of a request, if it is remembered."""
        return self._courses.get(request_id)

    def newest(self) -> Iterator[RouteRecord]:
        """The courses, newest first."""
        return reversed(self._courses.values())

    def __len__(self) -> int:
        return len(self._courses)

    def _forget(self, request_id: str) -> None:
        course = self._courses.pop(request_id, None)
        if course is not None:
            self._num_hashes -= course.num_hashes
