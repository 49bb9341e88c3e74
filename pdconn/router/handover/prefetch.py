"""Prefetches: brings a prompt to the engine that will be asked for it, and releases sessions.

::

    client ──► POST /v1/kv/prefetch ──► decide ──► 202, and what will be done
                                           │
                          engine busy? wait for its turn ──► borrow a prefix ──► one token
                                                             (a holder's)        at prefill

The request to come is decided as it will be.  The engine chosen for it gets an ordinary request of
one token with the least priority: it loads from its store what that has, pulls what a holder lends,
and computes the rest.  Nothing is lent.  A prefetch yields to requests that are there: it waits
until those before it are computed, and engines that schedule by priority compute it last.

Best effort, and bounded: by number, by number of one client, and in time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from msgspec import Raw
from multidict import CIMultiDict

from pdconn.router.background import Background
from pdconn.router.fleet.engine_client import ConnectFailed, ConnectionLost, EngineClient
from pdconn.router.fleet.member import Role
from pdconn.router.handover.prefix_pull import Borrowed, PrefillLeg, PrefixPulls
from pdconn.router.metric_table import PrefetchEnd
from pdconn.router.openai.bodies import find_ticket, find_usage, prefetch_body, release_body
from pdconn.router.openai.requests import Route, to_rank
from pdconn.router.openai.session_orders import SessionName, SessionOrder, split_reports
from pdconn.router.router_errors import EngineFailure, NoEngineLeft, TooManyPrefetches
from pdconn.router.router_metrics import RouterMetrics
from pdconn.router.router_options import CheckedSettings, number, option, seconds
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import TIE_TOKENS, Candidate, Decision
from pdconn.router.routing.request_events import Decided, Prefilled, StepKind, TurnKept
from pdconn.router.routing.routed_request import RoutedRequest
from pdconn.router.routing.session_table import MOST_SESSIONS

MOST_PREFETCHES = 64
"""Prefetches under way; each holds its request's body."""
MOST_OF_CLIENT = 4
GIVE_UP_S = 30.0
"""For the engine's turn, and for the prefetch itself."""
MOST_RELEASES = 64
RELEASE_S = 10.0


@dataclass(frozen=True, slots=True)
class SessionSettings(CheckedSettings):
    """Bounds of sessions and prefetches.

    ``prefetch_timeout_s`` counts for the engine's turn, and again for the prefetch itself.
    """

    max_sessions: int = option(
        MOST_SESSIONS,
        "N",
        number(1),
        "remember this many names of sessions; older ones are forgotten, and lose only a hint",
        parse=int,
    )
    max_prefetches: int = option(
        MOST_PREFETCHES,
        "N",
        number(),
        "let this many prefetches be under way, and answer 429 to others",
        parse=int,
    )
    max_client_prefetches: int = option(
        MOST_OF_CLIENT,
        "N",
        number(),
        "of these, this many of one client: of an API key, or of an address",
        parse=int,
    )
    prefetch_timeout_s: float = option(
        GIVE_UP_S,
        "SECONDS",
        seconds(),
        "give a prefetch up if its engine is busy for this long, or takes this long",
        parse=float,
    )


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """What will be done for a prefetch.

    Attributes:
        action: ``prefill``, ``pull`` or ``nothing``.
        engine: the engine that will be asked.
        prompt_tokens: of the prompt, as counted or estimated.
        held_tokens: that the engine holds already.
        pulled_tokens: that another engine lends it.
    """

    action: str
    engine: str
    prompt_tokens: int
    held_tokens: int = 0
    pulled_tokens: int = 0


class Prefetches:
    """Prefetches and releases under way.

    Args:
        client: for engines.
        router: decides as for the request to come.
        pulls: borrows prefixes.
        metrics: counts how prefetches end.
        settings: bounds.
    """

    def __init__(
        self,
        client: EngineClient,
        router: RequestRouter,
        pulls: PrefixPulls,
        metrics: RouterMetrics,
        settings: SessionSettings,
    ) -> None:
        self._client, self._router, self._pulls = client, router, pulls
        self._metrics, self._settings = metrics, settings
        self._running = Background(limit=settings.max_prefetches)
        self._releasing = Background(limit=MOST_RELEASES)
        self._of_client: Counter[str] = Counter()
        router.sessions.when_told = metrics.promise_ended
        metrics.show("prefetches_running", lambda: len(self))
        metrics.show("sessions", lambda: len(router.sessions))

    def __len__(self) -> int:
        """Prefetches under way."""
        return self._of_client.total()

    async def close(self) -> None:
        """Cancel what is under way."""
        await self._running.close(0)
        await self._releasing.close(0)

    # Prefetches

    async def prefetch(self, request: RoutedRequest, client: str) -> PrefetchPlan:
        """Decide for the request to come, and begin what brings its prompt to its engine.

        Args:
            request: the request to come; it is not answered.
            client: who asks, for the bound of one client.

        Raises:
            TooManyPrefetches: too many are under way.
            NoEngineLeft: no engine is up.
            UnknownModel, BadBody: as for the request itself.
        """
        most, most_of_client = self._settings.max_prefetches, self._settings.max_client_prefetches
        if len(self) >= most or self._of_client[client] >= most_of_client:
            self._ended(PrefetchEnd.TOO_MANY)
            raise TooManyPrefetches(most_of_client, most)
        self._of_client[client] += 1
        try:
            decision = await self._decide(request)
            plan, candidate = self._plan(request, decision)
        except BaseException:
            self._give_back(client)
            raise
        if plan.action == "nothing":
            self._give_back(client)
            alone = decision.ranking.alone
            self._ended(PrefetchEnd.ALONE if alone else PrefetchEnd.HELD)
            return plan
        request.held.add_user()
        work = self._run(request, decision, candidate, client)
        if not self._running.spawn(work, "prefetch"):  # the router is about to stop
            request.held.drop_user()
            self._give_back(client)
        return plan

    async def _decide(self, request: RoutedRequest) -> Decision:
        router = self._router
        request.serving = await router.tokeniser.models.engines_for_request(request)
        decision = await router.decide(request)
        request.note(Decided(decision, is_choice=False))
        router.decisions.end_decision(decision, request.outcome())
        return decision

    def _plan(self, request: RoutedRequest, decision: Decision) -> tuple[PrefetchPlan, Candidate]:
        """What will be done, and where: at prefill, or at decode if that computes the prompt."""
        ranking = decision.ranking
        goes_to_decode = ranking.alone or request.body.direct is not None or not ranking.prefill
        ordered = ranking.decode if goes_to_decode else ranking.prefill
        if not ordered:
            role = Role.DECODE if goes_to_decode else Role.PREFILL
            failure = EngineFailure(role.value, "is not up")
            raise NoEngineLeft(role.value, (failure,))
        candidate = ordered[0].candidate
        held, pull = candidate.hit.own_tokens, candidate.pull
        pulled = 0 if pull is None or pull.holder is None else pull.saved
        order = request.session
        is_kept = order is not None and bool(order.keep_s)
        lacks_little = decision.lookup is not None and held + TIE_TOKENS > decision.num_tokens
        is_held = ranking.alone or lacks_little
        action = "nothing" if is_held and not is_kept else "pull" if pulled else "prefill"
        plan = PrefetchPlan(action, candidate.engine, decision.num_tokens, held, pulled)
        return plan, candidate

    async def _run(
        self, request: RoutedRequest, decision: Decision, candidate: Candidate, client: str
    ) -> None:
        end = PrefetchEnd.FAILED
        try:
            if not await self._await_turn(candidate):
                end = PrefetchEnd.LATE
            else:
                async with asyncio.timeout(self._settings.prefetch_timeout_s):
                    end = await self._fetch(request, decision, candidate)
        except (ConnectFailed, ConnectionLost):
            pass  # /health and the next request show the engine's state
        except TimeoutError:
            end = PrefetchEnd.LATE
        finally:
            request.held.drop_user()
            self._give_back(client)
            self._ended(end)

    async def _await_turn(self, candidate: Candidate) -> bool:
        """Wait until the engine has computed the requests before; False if that takes too long."""
        turn = asyncio.Event()
        inflight = self._router.loads.inflight
        # It counts as no tokens while it waits, so other requests are not sent elsewhere for it.
        flight = inflight.start_request(candidate.engine, 0, candidate.rank)
        try:
            flight.when_ahead(0, turn.set)
            async with asyncio.timeout(self._settings.prefetch_timeout_s):
                await turn.wait()
        except TimeoutError:
            return False
        finally:
            flight.finish()
        return True

    async def _fetch(
        self, request: RoutedRequest, decision: Decision, candidate: Candidate
    ) -> PrefetchEnd:
        uncached = max(0, decision.num_tokens - candidate.held_or_pulled)
        inflight = self._router.loads.inflight
        flight = inflight.start_request(candidate.engine, uncached, candidate.rank)
        try:
            borrowed = None
            if request.tokens is not None:
                borrowed = await self._pulls.borrow(request, candidate)
            return await self._post(request, decision, candidate, borrowed)
        finally:
            flight.finish()

    async def _post(
        self,
        request: RoutedRequest,
        decision: Decision,
        candidate: Candidate,
        borrowed: Borrowed | None,
    ) -> PrefetchEnd:
        engine, began_s = candidate.engine, time.perf_counter()
        keep = self._router.sessions.ask_to_keep(request.session, engine)
        body = prefetch_body(request.body, None if borrowed is None else borrowed.ticket, keep)
        headers = to_rank(request.headers, candidate.rank)
        headers["Accept-Encoding"] = "identity"  # the router parses this answer
        began = request.begin_step(StepKind.PREFILL, engine)
        whole = b""
        try:
            answer = await self._client.post_body(engine, request.body.route.path, body, headers)
            async with answer:
                whole = await answer.read_rest()
        except BaseException:
            if borrowed is not None:
                self._pulls.pull_failed(request, borrowed)
            raise
        if answer.status != 200:
            if borrowed is not None:
                self._pulls.pull_failed(request, borrowed)
            return PrefetchEnd.FAILED
        usage = find_usage(whole)
        request.note(Prefilled(began, has_ticket=False, cached_tokens=usage.cached))
        if borrowed is not None:
            took_s = time.perf_counter() - began_s
            leg = PrefillLeg(candidate, decision.num_tokens, took_s, learns=False)
            self._pulls.prefilled(request, borrowed, leg)
        self._note_kept(request, engine, whole)
        return PrefetchEnd.DONE

    def _note_kept(self, request: RoutedRequest, engine: str, whole: bytes) -> None:
        _, reports = split_reports(find_ticket(whole))
        if reports.kept is not None:
            event = TurnKept(engine, reports.kept)
            request.note(event)
            self._router.sessions.saw(request, event)
        self._router.sessions.note_broken(engine, reports.broken)

    def _give_back(self, client: str) -> None:
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]

    def _ended(self, end: PrefetchEnd) -> None:
        self._metrics.prefetch_ended(end)

    # Releases

    def release(self, session: SessionName, model: Raw | None, headers: CIMultiDict[str]) -> int:
        """Release a session at the engines that keep it; returns how many are asked.

        An engine that is not asked, or fails, keeps the session until its time is up.

        Args:
            session: the client's.
            model: the name that engines check; None for their only one.
            headers: for engines.
        """
        asked, params = 0, SessionOrder(session, 0.0).to_params()
        assert params is not None
        for engine in self._router.sessions.release(session):
            if engine not in self._router.engines:
                continue
            # Each rank keeps for itself, and a turn need not have named one.
            body, ranks = release_body(model, params), self._router.caches.ranks_of(engine)
            works = [self._release(engine, body, to_rank(headers, rank)) for rank in ranks]
            began = [self._releasing.spawn(work, "release a session") for work in works]
            asked += any(began)
        return asked

    async def _release(self, engine: str, body: bytes, headers: CIMultiDict[str]) -> None:
        headers["Accept-Encoding"] = "identity"
        try:
            async with asyncio.timeout(RELEASE_S):
                path = Route.COMPLETIONS.path
                async with await self._client.post_body(engine, path, body, headers) as answer:
                    await answer.read_rest()
        except (ConnectFailed, ConnectionLost, TimeoutError):
            pass  # its time will be up
