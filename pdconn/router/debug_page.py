"""What the router shows of itself: its state, and how one request was routed.  JSON.

``/debug/state`` is what the page at ``/`` draws.  ``/debug/route/ID`` tells of one request
what was decided and why, and beside it what would be found now; with ``?snapshot=1`` it is
a snapshot for ``pdconn score``.  Neither holds a word of any prompt, nor the seed of anybody's
hashes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

import msgspec

from pdconn.router.errors import Refusal
from pdconn.router.events.subscriber import Status
from pdconn.router.fleet.loads import Load
from pdconn.router.prefix.hashing import HashScheme
from pdconn.router.prefix.score import Scorer
from pdconn.router.prefix.snapshot import Explained, explained, take_snapshot
from pdconn.router.routing.decide import LOAD_FOR_S, RequestRouter
from pdconn.router.routing.decision_log import RouteRecord
from pdconn.router.routing.policy import Role, ScoredCandidate

SHOWN = 50
"""Recent decisions on the page."""


class NoSuchDecision(Refusal):
    """No request of this id is remembered."""

    status = 404
    kind = "NotFoundError"

    def __init__(self, request_id: str, num_remembered: int) -> None:
        expected = f"the X-Request-Id of one of the last {num_remembered} requests"
        super().__init__(f"request id: expected {expected}, saw {request_id[:200]!r}")
        self.param = "request id"


class NoPrompt(Refusal):
    """The request was routed without its prompt's hashes."""

    status = 409
    kind = "ConflictError"

    def __init__(self, why: str) -> None:
        super().__init__(f"snapshot: expected a prompt that was looked for, saw none: {why}")
        self.param = "snapshot"


@dataclass(slots=True)
class RequestTally:
    """Prompts that were sent to one place, and how much of them it was predicted to hold."""

    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    def add(self, requests: int, tokens: int, hit_tokens: int) -> None:
        """Count more of them."""
        self.requests += requests
        self.tokens += tokens
        self.hit_tokens += hit_tokens

    @property
    def rate(self) -> float | None:
        """Share of the tokens, 0 to 1; None where there are none."""
        return _share(self.hit_tokens, self.tokens)


Tallies = Mapping[tuple[str, Role], RequestTally]
"""By pod, and by what it was asked to do."""


@dataclass(frozen=True, slots=True)
class DebugPage:
    """Shows a router's state."""

    steering: RequestRouter
    statuses: Callable[[], Mapping[str, Status]]

    def state(self) -> bytes:
        """Engines, pods and the last decisions, as JSON."""
        steering = self.steering
        loads = steering.loads.fresh(LOAD_FOR_S)
        tallies, statuses = self._tallies(), self.statuses()
        page = {
            "policy": steering.policy.name,
            "hashes": steering.caches.index.num_hashes,
            "remembered": len(steering.decisions),
            "engines": [
                self._engine(name, loads.get(name), tallies) for name in steering.engines.names
            ],
            "pods": [
                self._pod(name, statuses.get(name), tallies) for name in steering.caches.feeds
            ],
            "decisions": [_brief(one) for one in islice(steering.decisions.newest(), SHOWN)],
        }
        return msgspec.json.encode(page)

    def route(self, request_id: str) -> bytes:
        """One request: what was decided, and what would be found now.

        Raises:
            NoSuchDecision: it is not remembered.
        """
        course = self._course(request_id)
        return msgspec.json.encode(
            {
                **_brief(course),
                "prefill_order": [_weighed(one) for one in course.decision.prefill],
                "decode_order": [_weighed(one) for one in course.decision.decode],
                "then": {} if course.looked is None else dict(course.looked.pods),
                "now": self._now(course),
            }
        )

    def snapshot(self, request_id: str) -> bytes:
        """What pods hold of a request's prompt now, as ``pdconn score`` reads it.

        Where engines hash in several ways, those that do as the first one told.

        Raises:
            NoSuchDecision: it is not remembered.
            NoPrompt: its prompt was not looked for.
        """
        course = self._course(request_id)
        if course.looked is None or not course.looked.prompts:
            raise NoPrompt(course.unknown or "no engine has told how it hashes")
        caches = self.steering.caches
        scheme, prompt = next(iter(course.looked.prompts.items()))
        pods = caches.pods_by(scheme)
        return msgspec.json.encode(take_snapshot(caches.index, prompt, caches.weights, pods))

    def _course(self, request_id: str) -> RouteRecord:
        course = self.steering.decisions.get(request_id)
        if course is None:
            raise NoSuchDecision(request_id, len(self.steering.decisions))
        return course

    def _now(self, course: RouteRecord) -> dict[str, Explained]:
        caches = self.steering.caches
        found: dict[str, Explained] = {}
        for scheme, prompt in {} if course.looked is None else course.looked.prompts.items():
            hits = Scorer(caches.index, caches.weights).score(prompt)
            for name, feed in caches.feeds.items():
                if feed.scheme == scheme and name in hits:
                    found[name] = explained(caches.index, prompt, name, hits[name])
        return found

    def _tallies(self) -> Tallies:
        """What the remembered requests found, by who served them.

        Requests of which nobody knows what an engine held of them are left out, and so are
        those from before it came, or came back.
        """
        tallies: defaultdict[tuple[str, Role], RequestTally] = defaultdict(RequestTally)
        feeds, since = self.steering.caches.feeds, self.steering.since
        pods = {(feed.source.engine, feed.source.rank): name for name, feed in feeds.items()}
        for course in self.steering.decisions.newest():
            served = ((Role.PREFILL, course.prefill), (Role.DECODE, course.decode))
            for role, engine in served:
                if engine is None or course.looked is None or course.at < since.get(engine, 0.0):
                    continue
                best = course.looked.best(engine)
                pod = None if best is None else pods.get((engine, best.rank))
                if best is not None and pod is not None:
                    tallies[pod, role].add(1, course.num_tokens, best.hit.tokens)
        return tallies

    def _engine(self, name: str, load: Load | None, tallies: Tallies) -> dict[str, object]:
        steering = self.steering
        outage = steering.engines.outage(name)
        feeds = steering.caches.feeds
        pods = {pod for pod, feed in feeds.items() if feed.source.engine == name}
        by_role = {role: _sum(tallies, pods, (role,)) for role in steering.engines.roles(name)}
        return {
            "engine": name,
            "roles": [role.value for role in steering.engines.roles(name)],
            "up": outage is None,
            "why": None if outage is None else outage.why,
            "draining": steering.engines.is_draining(name),
            "load": load,
            "ours": steering.flights.num_requests(name),
            "trust": steering.trust.get(name, 1.0),
            "hit_rate": _sum(tallies, pods, Role).rate,
            "hits": {role.value: _tallied(tally) for role, tally in by_role.items()},
            "own_hit_rate": None if load is None else _share(load.prefix_hits, load.prefix_queries),
        }

    def _pod(self, name: str, status: Status | None, tallies: Tallies) -> dict[str, object]:
        feed = self.steering.caches.feeds[name]
        pod = self.steering.caches.index.pods.get(name)
        groups = {} if pod is None else pod.groups
        return {
            "pod": name,
            "engine": feed.source.engine,
            "rank": feed.source.rank,
            "blocks": 0 if pod is None else pod.num_blocks,
            "groups": {str(group): spec for group, spec in sorted(groups.items())},
            "hashing": None if feed.scheme is None else _hashing(feed.scheme),
            "hit_rate": _sum(tallies, {name}, Role).rate,
            "state": None if status is None else status.state.value,
            "status": status,
        }


def _brief(course: RouteRecord) -> dict[str, object]:
    return {
        "request_id": _printable(course.request_id),
        "at": course.at,
        "policy": course.policy,
        "num_tokens": course.num_tokens,
        "unknown": course.unknown,
        "alone": course.decision.alone,
        "why": course.decision.why,
        "took_ms": round(course.took_s * 1000, 3),
        "prefill": course.prefill,
        "decode": course.decode,
        "prefill_hit_tokens": _hit_tokens(course, course.prefill),
        "decode_hit_tokens": _hit_tokens(course, course.decode),
        "prefill_why": _why(course.decision.prefill, course.prefill),
        "decode_why": _why(course.decision.decode, course.decode),
        "cached_tokens": course.cached_tokens,
        "ticket_ms": _in_ms(course.ticket_s),
        "first_byte_ms": _in_ms(course.first_byte_s),
    }


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _hit_tokens(course: RouteRecord, engine: str | None) -> int | None:
    """What was predicted of an engine; None where nobody knew what it holds."""
    known = course.looked is not None and engine in course.looked.ranks
    return course.hit_tokens(engine) if known else None


def _why(ordered: Sequence[ScoredCandidate], engine: str | None) -> str | None:
    """What choosing an engine was said to cost; None of one that came up later."""
    return next((one.why for one in ordered if one.candidate.engine == engine), None)


def _hashing(scheme: HashScheme) -> dict[str, object]:
    """All but the seed: who knows that can make prompts whose hashes collide."""
    return {
        "algorithm": scheme.algorithm,
        "block_tokens": scheme.block_tokens,
        "seeded": scheme.seed is not None,
    }


def _tallied(tally: RequestTally) -> dict[str, object]:
    return {
        "requests": tally.requests,
        "tokens": tally.tokens,
        "hit_tokens": tally.hit_tokens,
        "hit_rate": tally.rate,
    }


def _sum(tallies: Tallies, pods: Iterable[str], roles: Iterable[Role]) -> RequestTally:
    total = RequestTally()
    for key in product(pods, roles):
        if key in tallies:
            tally = tallies[key]
            total.add(tally.requests, tally.tokens, tally.hit_tokens)
    return total


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _printable(text: str) -> str:
    """A header may hold bytes that are not UTF-8, which JSON cannot."""
    return text.encode(errors="backslashreplace").decode()


def _weighed(one: ScoredCandidate) -> dict[str, object]:
    return {
        "engine": one.candidate.engine,
        "rank": one.candidate.rank,
        "hit_tokens": one.candidate.hit.tokens,
        "cost": one.cost,
        "why": one.why,
    }
