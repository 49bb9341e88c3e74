"""The router's hand-over by itself: engines whose every answer is said, and a clock to be moved."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw
from multidict import CIMultiDict

from pdconn.router.access.api_keys import EngineKey
from pdconn.router.assembly import make_handover, make_router
from pdconn.router.fleet.engine_client import EngineAnswer
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.health import Health
from pdconn.router.fleet.lenders import lender_of
from pdconn.router.fleet.member import Role
from pdconn.router.handover.handover import Handover
from pdconn.router.handover.tries import EngineTries, status_of
from pdconn.router.metric_table import TicketEnd
from pdconn.router.openai.requests import REQUEST_ID_HEADER, Route, parse_body
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.pulls.planner import PullPlanner
from pdconn.router.router_limits import Limits
from pdconn.router.router_metrics import RouterMetrics
from pdconn.router.routing.policy import RoundRobin
from pdconn.router.routing.routed_request import RoutedRequest
from tests.fakes.fake_engine import ANSWER, MODEL, ticket_of
from tests.fakes.scripted.client import EngineAsk, ScriptedClient, ticket_answer
from tests.fakes.scripted.loop import VirtualLoop

PATIENCE_S = 2.0
LEASE_S = 3000.0
"""So long that no ticket's return is given up."""


@dataclass(eq=False)
class Client:
    """A client's request.

    Attributes:
        has_left: and was the last to be asked of an engine then, by the number of asks.
    """

    request: RoutedRequest
    task: asyncio.Task[EngineAnswer]
    left_after: int | None = None
    answers: list[EngineAnswer] = field(default_factory=list)


class Handing:
    """A router's hand-over, and its fleet.

    Attributes:
        given: of each lease, the request whose answer had its ticket.
        owed: leases that decode has finished with before their tickets came: they are to be
            returned.
        lent_streams: the lease that a stream became, by its boot and its name.
        boots: what the tickets of each prefill engine name.
    """

    def __init__(
        self, num_prefill: int, num_decode: int, *, require_prefill: bool, **streams: Any
    ) -> None:
        self.loop = VirtualLoop()
        self.client = ScriptedClient()
        self.prefill = tuple(f"http://p{number}:1" for number in range(num_prefill))
        self.decode = tuple(f"http://d{number}:1" for number in range(num_decode))
        self.clients: dict[str, Client] = {}
        self.leases: Iterator[int] = itertools.count(1)
        self.given: dict[str, EngineAsk] = {}
        self.owed: set[str] = set()
        self.lent_streams: dict[tuple[str, str], str] = {}
        self.boots = {engine: f"{engine} 0" for engine in self.prefill}
        config = ProxyConfig.from_options(
            self.prefill,
            self.decode,
            port=0,
            require_prefill=require_prefill,
            lease_s=LEASE_S,
            **streams,
        )
        self.engines = EngineRegistry(self.prefill, self.decode, first_backoff_s=0.1)
        self.metrics = RouterMetrics(self.engines)
        client: Any = self.client
        alone = config.engines.decodes_alone
        self.health = Health(self.engines, client, self.metrics.engine_up, decodes_alone=alone)
        planner, limits = PullPlanner.from_floor(1), Limits(patience_s=PATIENCE_S)
        self.router = make_router(
            config,
            RoundRobin(),
            engines=self.engines,
            client=client,
            planner=planner,
            limits=limits,
            engine_key=EngineKey(None),
        )
        tries = EngineTries(self.engines, self.health, self.metrics, config.times.most_tries, alone)
        self.handover: Handover = make_handover(
            config, client, self.router, tries, planner, limits=limits
        )

    # Clients

    def arrive(self, *, is_direct: bool) -> None:
        """A request comes; one that is direct can have no ticket."""
        name = f"r{len(self.clients)}"
        body = {"model": MODEL, "prompt": "hi", **({"n": 2} if is_direct else {})}
        request = RoutedRequest(
            name,
            CIMultiDict({REQUEST_ID_HEADER: name}),
            parse_body(Route.COMPLETIONS, json.dumps(body).encode()),
        )
        task = self.loop.create_task(self._ask(request))
        self.clients[name] = Client(request, task)
        self.loop.settle()

    async def _ask(self, request: RoutedRequest) -> EngineAnswer:
        with request.held:
            return await self.handover.answer_request(request)

    def leave(self, name: str) -> None:
        """A client closes its connection."""
        client = self.clients[name]
        client.left_after = len(self.client.asks)
        client.task.cancel()
        self.loop.settle()

    # Engines

    def respond(self, ask: EngineAsk, status: int = 200, *, lends: bool = True) -> None:
        """An engine answers as engines of its role do."""
        body = ANSWER
        if status == 200 and ask.engine in self.prefill and not ask.is_return:
            body = self._lend(ask) if lends else ticket_answer(None, "")
        ask.respond(status, body)
        self.loop.settle()

    def _lend(self, ask: EngineAsk) -> bytes:
        lease, boot = f"lease-{next(self.leases)}", self.boots[ask.engine]
        self.given[lease] = ask
        if ask.stream is not None:
            self.lent_streams[boot, ask.stream] = lease
            early = [one for one in self.client.asks if one.followed == (boot, ask.stream)]
            if any(has_failed(one) for one in early if one.is_seen):
                self.owed.add(lease)
        return ticket_answer(lease, boot)

    def named_by(self, ask: EngineAsk) -> str | tuple[str, str] | None:
        """What the ticket of a request names: a lease, or a stream that is none yet."""
        if ask.followed is None:
            return ask.lease
        return self.lent_streams.get(ask.followed, ask.followed)

    def learn_lenders(self) -> None:
        """Tickets of other requests have shown where each engine lends that is up."""
        for engine in self.live(Role.PREFILL):
            lender = lender_of(Raw(ticket_of(self.boots[engine], "others").encode()))
            assert lender is not None
            self.engines.lenders.learn_lender(engine, None, lender)

    def restart(self, engine: str) -> None:
        """A prefill engine is another boot from now on, and nothing has failed."""
        name, number = self.boots[engine].split(" ")
        self.boots[engine] = f"{name} {int(number) + 1}"

    def num_unused(self, end: TicketEnd) -> float:
        """Tickets that no request used, and that ended so."""
        name, labels = "pdconn_router_unused_tickets_total", {"outcome": end.value}
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def num_under_way(self) -> int:
        """Requests that engines are thought to have."""
        inflight = self.router.loads.inflight
        names = self.engines.names
        return sum(inflight.requests_at(engine)[0] for engine in names) + len(inflight)

    def live(self, role: Role) -> tuple[str, ...]:
        """Engines of a role that are not known to be down."""
        return self.engines.live(role)

    @property
    def num_waiting(self) -> int:
        """Requests that are thought to wait at decode engines with early tickets."""
        return 0 if self.handover.early is None else self.handover.early.waiting.total()

    def close(self) -> None:
        """Leave no task behind."""
        for name, client in self.clients.items():
            if not client.task.done():
                self.leave(name)

        async def end() -> None:
            await self.handover.prefill.pulls.close(0.0)
            await self.handover.abandoned.close(0.0)
            await self.router.tokeniser.models.close()
            await self.health.close()

        try:
            ending = self.loop.create_task(end())
            self.loop.settle()
            assert ending.done()
            left = asyncio.all_tasks(self.loop)
        finally:
            self.loop.close()
        assert not left, f"tasks left behind: {left}"


def has_failed(ask: EngineAsk) -> bool:
    """Whether an engine was asked, and its answer is not one that a client gets as a success."""
    if not ask.answer.done():
        return False
    if ask.answer.cancelled() or ask.answer.exception() is not None:
        return True
    response = ask.answer.result()
    return status_of(response.status, response.headers, response.body) != 200
