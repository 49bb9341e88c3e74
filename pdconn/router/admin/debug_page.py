"""The router's debug pages, as JSON: its state, and how one request was routed.

The page at ``/`` draws ``/debug/state``.  ``/debug/route/ID`` shows the decision for one
request, its reasons, and the hits that a lookup would find now; with ``?snapshot=1`` the answer is
a snapshot for ``pdconn score``.  No page contains prompt text, block hashes, or their seed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

import msgspec

from pdconn.router.admin.disguise import Disguise
from pdconn.router.events.subscriber import Status
from pdconn.router.fleet.engine_page import Load
from pdconn.router.fleet.member import Role
from pdconn.router.openai.session_orders import SessionName
from pdconn.router.prefix.compiled import extension
from pdconn.router.prefix.hashing import HashScheme
from pdconn.router.prefix.score import Scorer
from pdconn.router.prefix.snapshot import Explained, explained, take_snapshot
from pdconn.router.router_errors import NoPrompt, NotFound
from pdconn.router.routing.decide import LOAD_FOR_S, RequestRouter
from pdconn.router.routing.decision_log import Logged
from pdconn.router.routing.policy import Decision, ScoredCandidate
from pdconn.router.routing.routed_request import Step
from pdconn.router.routing.session_table import KnownSession

SHOWN = 50
"""Number of decisions on the page."""


@dataclass(slots=True)
class RequestTally:
    """Prompts that one pod served, and their predicted hit tokens."""

    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    def add_requests(self, requests: int, tokens: int, hit_tokens: int) -> None:
        """Add requests to the tally."""
        self.requests += requests
        self.tokens += tokens
        self.hit_tokens += hit_tokens

    @property
    def rate(self) -> float | None:
        """Hit tokens as a share of all tokens, 0 to 1; None without tokens."""
        return _share(self.hit_tokens, self.tokens)


Tallies = Mapping[tuple[str, Role], RequestTally]
"""Tallies by pod and role."""


@dataclass(frozen=True, slots=True)
class DebugPage:
    """Renders the state of a router."""

    router: RequestRouter
    statuses: Callable[[], Mapping[str, Status]]
    roles: Callable[[], Mapping[str, object] | None] = lambda: None
    disguise: Disguise = field(default_factory=Disguise)

    def state(self) -> bytes:
        """Engines, pods and the last decisions, as JSON."""
        router = self.router
        loads = router.loads.fresh(LOAD_FOR_S)
        tallies, statuses = self._tallies(), self.statuses()
        # Pods without events are listed too.
        pods = dict.fromkeys((*router.caches.feeds, *statuses))
        page = {
            "policy": router.policy.name,
            "hashes": router.caches.index.num_hashes,
            "index": extension.index_kind().value,
            "remembered": len(router.decisions),
            "engines": [
                self._engine(name, loads.get(name), tallies) for name in router.engines.names
            ],
            "pods": [self._pod(name, statuses.get(name), tallies) for name in pods],
            "decisions": [_brief(one) for one in islice(router.decisions.newest(), SHOWN)],
            "roles": self.roles(),
            "num_sessions": len(router.sessions),
            "sessions": [_session(*one) for one in router.sessions.newest(SHOWN)],
        }
        return msgspec.json.encode(page)

    def route(self, request_id: str) -> bytes:
        """One request's decision, and the hits that a lookup would find now.

        Raises:
            NotFound: the request is not in the decision log.
        """
        logged = self._logged(request_id)
        decision, _ = logged
        return msgspec.json.encode(
            {
                **_brief(logged),
                "prefill_order": [_scored(one) for one in decision.ranking.prefill],
                "decode_order": [_scored(one) for one in decision.ranking.decode],
                "then": {} if decision.lookup is None else dict(decision.lookup.pods),
                "now": self._now(decision),
            }
        )

    def snapshot(self, request_id: str) -> bytes:
        """What the pods hold of a request's prompt now, in the format of ``pdconn score``.

        Where engines use several hash schemes, only pods of the first known scheme are included.
        The hashes are disguised: they are comparable with other snapshots of this boot only.

        Raises:
            NotFound: the request is not in the decision log.
            NoPrompt: its prompt was not looked up.
        """
        decision, _ = self._logged(request_id)
        lookup = decision.lookup
        if lookup is None or not lookup.prompts:
            why = decision.unknown or "how the engines hash is not known yet"
            raise NoPrompt("snapshot", "a request whose prefix was looked up", why)
        caches = self.router.caches
        scheme, prompt = next(iter(lookup.prompts.items()))
        pods = caches.pods_by(scheme)
        taken = take_snapshot(caches.index, prompt, caches.weights, pods)
        return msgspec.json.encode(self.disguise.disguise_snapshot(taken))

    def _logged(self, request_id: str) -> Logged:
        logged = self.router.decisions.find_decision(request_id)
        if logged is None:
            expected = f"the X-Request-Id of one of the last {len(self.router.decisions)} requests"
            raise NotFound("request id", expected, repr(request_id[:200]))
        return logged

    def _now(self, decision: Decision) -> dict[str, Explained]:
        caches = self.router.caches
        found: dict[str, Explained] = {}
        for scheme, prompt in {} if decision.lookup is None else decision.lookup.prompts.items():
            hits = Scorer(caches.index, caches.weights).score(prompt)
            for name, feed in caches.feeds.items():
                if feed.scheme == scheme and name in hits:
                    found[name] = explained(caches.index, prompt, name, hits[name])
        return found

    def _tallies(self) -> Tallies:
        """Predicted hits of the kept requests, by the pod that served them.

        Requests without a lookup of the engine are left out, and so are requests from before the
        engine (re)joined the fleet.
        """
        tallies: defaultdict[tuple[str, Role], RequestTally] = defaultdict(RequestTally)
        feeds, since = self.router.caches.feeds, self.router.since
        pods = {(feed.source.engine, feed.source.rank): name for name, feed in feeds.items()}
        for decision, outcome in self.router.decisions.newest():
            served = ((Role.PREFILL, outcome.prefill), (Role.DECODE, outcome.decode))
            for role, engine in served:
                if engine is None or decision.at < since.get(engine, 0.0):
                    continue
                best = None if decision.lookup is None else decision.lookup.best(engine)
                pod = None if best is None else pods.get((engine, best.rank))
                if best is not None and pod is not None:
                    tallies[pod, role].add_requests(1, decision.num_tokens, best.hit.tokens)
        return tallies

    def _engine(self, name: str, load: Load | None, tallies: Tallies) -> dict[str, object]:
        router = self.router
        outage = router.engines.outage(name)
        feeds = router.caches.feeds
        pods = {pod for pod, feed in feeds.items() if feed.source.engine == name}
        pulls = router.loads.pulls.lately(name)
        by_role = {role: _sum(tallies, pods, (role,)) for role in router.engines.roles(name)}
        return {
            "engine": name,
            "roles": [role.value for role in router.engines.roles(name)],
            "up": outage is None,
            "why": None if outage is None else outage.why,
            "draining": router.engines.is_draining(name),
            "load": load,
            "pulls": {"failed": pulls.failed, "tried": pulls.tried, "why": pulls.why},
            "inflight": router.loads.inflight.requests_at(name)[0],
            "trust": router.trust.get(name, 1.0),
            "hit_rate": _sum(tallies, pods, Role).rate,
            "hits": {role.value: _as_json(tally) for role, tally in by_role.items()},
            "own_hit_rate": None if load is None else _share(load.prefix_hits, load.prefix_queries),
        }

    def _pod(self, name: str, status: Status | None, tallies: Tallies) -> dict[str, object]:
        feed = self.router.caches.feeds.get(name)
        engine, _, rank = name.partition("#")
        pod = self.router.caches.index.pods.get(name)
        groups = {} if pod is None else pod.groups
        return {
            "pod": name,
            "engine": engine,
            "rank": int(rank or 0),
            "blocks": 0 if pod is None else pod.num_blocks,
            "stored_blocks": 0 if pod is None else pod.num_stored,
            "row_tokens": None if pod is None else pod.row_tokens,
            "groups": {str(group): spec for group, spec in sorted(groups.items())},
            "hashing": None if feed is None or feed.scheme is None else _hashing(feed.scheme),
            "hit_rate": _sum(tallies, {name}, Role).rate,
            "state": None if status is None else status.state.value,
            "status": status,
        }


def _session(session: SessionName, known: KnownSession) -> dict[str, object]:
    """A session: the engines that keep it, for how long, and what became of its promises."""
    now = time.monotonic()
    kept = {
        engine: keeper.blocks_left_s(now)
        for engine, keeper in known.keepers.items()
        if keeper.keeps_blocks(now)
    }
    return {
        "session": session.name,
        "tenant": session.tenant,
        "turns": known.turns,
        "idle_s": round(now - known.seen_s, 3),
        "kept_tokens": known.tokens if kept else 0,
        "kept_at": {engine: round(left_s, 3) for engine, left_s in kept.items()},
        "promises": {end.value: count for end, count in known.ends.items()},
        "broken": ", ".join(known.untold or known.broken) or None,
    }


def _brief(logged: Logged) -> dict[str, object]:
    decision, outcome = logged
    counted = outcome.prompt_tokens
    return {
        "request_id": _printable(decision.request_id),
        "at": decision.at,
        "policy": decision.policy,
        "num_tokens": decision.num_tokens if counted is None else counted,
        "is_guess": counted is None and decision.is_guess,
        "unknown": decision.unknown,
        "alone": decision.ranking.alone,
        "why": decision.ranking.why,
        "decision_ms": round(decision.took_s * 1000, 3),
        "outcome": None if outcome.end is None else outcome.end.value,
        "fault": None if outcome.end is None else outcome.end.fault.value,
        "status": outcome.status,
        "total_ms": _in_ms(outcome.total_s),
        "prefill": outcome.prefill,
        "decode": outcome.decode,
        "prefill_hit_tokens": _hit_tokens(decision, outcome.prefill),
        "decode_hit_tokens": _hit_tokens(decision, outcome.decode),
        "prefill_why": _why(decision.ranking.prefill, outcome.prefill),
        "decode_why": _why(decision.ranking.decode, outcome.decode),
        "cached_tokens": outcome.cached_tokens,
        "pull": _pull(logged),
        "ticket_ms": _in_ms(outcome.ticket_s),
        "early_ms": _in_ms(outcome.early_s),
        "first_byte_ms": _in_ms(outcome.first_byte_s),
        "steps": [_step(one) for one in outcome.steps],
    }


def _step(step: Step) -> dict[str, object]:
    """One bar of the waterfall; no ``end_ms`` while the step is running."""
    return {
        "step": step.kind.value,
        "start_ms": _in_ms(step.start_s),
        "end_ms": _in_ms(step.end_s),
        "failed": step.failed,
    }


def _pull(logged: Logged) -> dict[str, object] | None:
    """The planned pull of a prefix, or why there is none; None if pulls are switched off."""
    decision, outcome = logged
    first = decision.ranking.prefill[0].candidate.pull if decision.ranking.prefill else None
    pull = outcome.pull
    if first is None and pull is None:
        return None
    return {
        "why": None if first is None else first.why,
        "holder": None if pull is None else pull.holder,
        "tokens": 0 if pull is None else pull.saved,
        "outcome": None if pull is None or pull.end is None else pull.end.value,
        "ms": None if pull is None else _in_ms(pull.took_s),
    }


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _hit_tokens(decision: Decision, engine: str | None) -> int | None:
    """The predicted hit at an engine; None where its cache is unknown."""
    known = decision.lookup is not None and engine in decision.lookup.ranks
    return decision.hit_tokens(engine) if known else None


def _why(ordered: Sequence[ScoredCandidate], engine: str | None) -> str | None:
    """The cost terms of an engine; None for an engine that was not a candidate."""
    return next((one.why for one in ordered if one.candidate.engine == engine), None)


def _hashing(scheme: HashScheme) -> dict[str, object]:
    """A hash scheme without its seed: knowing the seed allows building colliding prompts."""
    return {
        "algorithm": scheme.algorithm,
        "block_tokens": scheme.block_tokens,
        "seeded": scheme.seed is not None,
    }


def _as_json(tally: RequestTally) -> dict[str, object]:
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
            total.add_requests(tally.requests, tally.tokens, tally.hit_tokens)
    return total


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _printable(text: str) -> str:
    """Text without surrogates: a header may contain bytes that are not UTF-8, JSON may not."""
    return text.encode(errors="backslashreplace").decode()


def _scored(one: ScoredCandidate) -> dict[str, object]:
    return {
        "engine": one.candidate.engine,
        "rank": one.candidate.rank,
        "hit_tokens": one.candidate.hit.tokens,
        "cost": one.cost,
        "why": one.why,
    }
