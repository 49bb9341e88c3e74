"""What the router shows of itself: its state, and how one request was routed.  JSON.

``/debug/state`` is what the page at ``/`` draws.  ``/debug/route/ID`` tells of one request
what was decided and why, and beside it what would be found now; with ``?snapshot=1`` it is
a snapshot for ``pdconn score``.  Neither holds a word of any prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

import msgspec

from pdconn.router.decisions import Course
from pdconn.router.errors import Refusal
from pdconn.router.feed.subscriber import Status
from pdconn.router.fleet.loads import Load
from pdconn.router.policy import Weighed
from pdconn.router.prefix.score import Scorer
from pdconn.router.prefix.snapshot import Explained, Snapshot, explained, take_snapshot
from pdconn.router.steering import LOAD_FOR_S, Steering

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


@dataclass(frozen=True, slots=True)
class Board:
    """Shows a router's state."""

    steering: Steering
    statuses: Callable[[], Mapping[str, Status]]

    def state(self) -> bytes:
        """Engines, pods and the last decisions, as JSON."""
        steering = self.steering
        loads = steering.loads.fresh(LOAD_FOR_S)
        page = {
            "policy": steering.policy.name,
            "hashes": steering.caches.index.num_hashes,
            "engines": [self._engine(name, loads.get(name)) for name in steering.engines.names],
            "pods": [self._pod(name) for name in steering.caches.feeds],
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

        Raises:
            NoSuchDecision: it is not remembered.
            NoPrompt: its prompt was not looked for.
        """
        course = self._course(request_id)
        if course.looked is None or not course.looked.prompts:
            raise NoPrompt(course.unknown or "no engine has told how it hashes")
        caches = self.steering.caches
        snapshots = [
            take_snapshot(caches.index, prompt, caches.weights)
            for prompt in course.looked.prompts.values()
        ]
        first: Snapshot = snapshots[0]
        return msgspec.json.encode(first)

    def _course(self, request_id: str) -> Course:
        course = self.steering.decisions.get(request_id)
        if course is None:
            raise NoSuchDecision(request_id, len(self.steering.decisions))
        return course

    def _now(self, course: Course) -> dict[str, Explained]:
        caches = self.steering.caches
        found: dict[str, Explained] = {}
        for scheme, prompt in {} if course.looked is None else course.looked.prompts.items():
            hits = Scorer(caches.index, caches.weights).score(prompt)
            for name, feed in caches.feeds.items():
                if feed.scheme == scheme and name in hits:
                    found[name] = explained(caches.index, prompt, name, hits[name])
        return found

    def _engine(self, name: str, load: Load | None) -> dict[str, object]:
        steering = self.steering
        outage = steering.engines.outage(name)
        return {
            "engine": name,
            "roles": [role.value for role in steering.engines.roles(name)],
            "up": outage is None,
            "why": None if outage is None else outage.why,
            "draining": steering.engines.is_draining(name),
            "load": load,
            "ours": steering.flights.num_requests(name),
            "trust": steering.trust.get(name, 1.0),
        }

    def _pod(self, name: str) -> dict[str, object]:
        feed = self.steering.caches.feeds[name]
        pod = self.steering.caches.index.pods.get(name)
        status = self.statuses().get(name)
        groups = {} if pod is None else pod.groups
        return {
            "pod": name,
            "engine": feed.source.engine,
            "rank": feed.source.rank,
            "blocks": 0 if pod is None else pod.num_blocks,
            "groups": {str(group): spec for group, spec in sorted(groups.items())},
            "hashing": feed.scheme,
            "state": None if status is None else status.state.value,
            "status": status,
        }


def _brief(course: Course) -> dict[str, object]:
    return {
        "request_id": course.request_id,
        "at": course.at,
        "policy": course.policy,
        "num_tokens": course.num_tokens,
        "unknown": course.unknown,
        "alone": course.decision.alone,
        "why": course.decision.why,
        "took_ms": round(course.took_s * 1000, 3),
        "prefill": course.prefill,
        "decode": course.decode,
        "prefill_hit_tokens": course.hit_tokens(course.prefill),
        "decode_hit_tokens": course.hit_tokens(course.decode),
        "cached_tokens": course.cached_tokens,
    }


def _weighed(one: Weighed) -> dict[str, object]:
    return {
        "engine": one.candidate.engine,
        "rank": one.candidate.rank,
        "hit_tokens": one.candidate.hit.tokens,
        "cost": one.cost,
        "why": one.why,
    }
