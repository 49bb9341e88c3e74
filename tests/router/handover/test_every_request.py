"""Every request ends in one way, whatever engines answer and clients do, in any order.

The hand-over is real, and so is what it decides with; engines answer, fail and are gone as drawn,
and time passes when it is drawn (:mod:`tests.router.handover.handing`)::

    engines     prefill is asked once, decode once with a ticket and once without; a request that
                breaks engines breaks two of a role; after its client has left none is asked
    tickets     one engine can have seen each; what no engine has seen is given back
    answers     all are closed, but one, which the client gets
    at the end  no request waits, and no engine is thought to have one
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from pdconn.router.fleet.engine_client import ConnectFailed, ConnectionLost, IdleConnectionLost
from pdconn.router.handover import tries as tries_module
from pdconn.router.handover.abandoned import AbandonedRequests
from pdconn.router.handover.handover import Handover
from pdconn.router.handover.ticket_return import TicketReturner
from pdconn.router.handover.tries import MOST_BROKEN
from pdconn.router.metric_table import TicketEnd
from pdconn.router.router_errors import HandoverRequired, NoEngineLeft, Refusal
from pdconn.router.routing.routed_request import RoutedRequest
from tests.fakes.scripted.client import EngineAsk
from tests.property.scale import LawMachine, holds, notices
from tests.router.handover.handing import PATIENCE_S, Client, Handing

WHICH = st.integers(0, 99)
STATUSES = st.sampled_from([200, 200, 200, 400, 404, 429, 500, 500, 503])
EXAMPLES, STEPS = 300, 30
FIRST_EVENT = b'data: {"error": {"message": "x", "code": 500}}\n\n'
STREAM = {"Content-Type": "text/event-stream"}


class HandoverMachine(LawMachine):
    """Requests come, engines answer and fail, clients leave, and time passes."""

    world: Handing

    @initialize(
        num_prefill=st.integers(1, 3),
        num_decode=st.integers(1, 4),
        require_prefill=st.booleans(),
        has_prefill=st.sampled_from([True, True, False]),
    )
    def start(
        self, num_prefill: int, num_decode: int, require_prefill: bool, has_prefill: bool
    ) -> None:
        self.world = Handing(num_prefill, num_decode, require_prefill=require_prefill)
        self.requires = require_prefill
        if not has_prefill:  # it is known by the first request
            self.world.client.down.update(self.world.prefill)
            self.arrive(is_direct=False, is_lent=False, steps=0)

    # Clients

    @rule(
        is_direct=st.sampled_from([False, False, False, True]),
        is_lent=st.sampled_from([True, True, False]),
        steps=st.integers(0, 2),
    )
    def arrive(self, is_direct: bool, is_lent: bool, steps: int) -> None:
        """A request comes, and prefill answers it at once; or so many engines fail it at once."""
        world = self.world
        world.arrive(is_direct=is_direct)
        name = list(world.clients)[-1]
        for ask in [ask for ask in world.client.open if ask.request_id == name]:
            if is_lent and ask.engine in world.prefill:
                world.respond(ask)
        self.fail_again(name, steps)

    def fail_again(self, name: str, steps: int) -> None:
        for _ in range(steps):
            for ask in [ask for ask in self.world.client.open if ask.request_id == name]:
                self.world.respond(ask, 500)

    @precondition(lambda self: self.waiting())
    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        waiting = self.waiting()
        self.world.leave(waiting[which % len(waiting)])

    # Engines

    @precondition(lambda self: self.world.client.open)
    @rule(which=WHICH, status=STATUSES, lends=st.sampled_from([True, True, False]))
    def respond(self, which: int, status: int, lends: bool) -> None:
        self.world.respond(self.pick(which), status, lends=lends)

    @precondition(lambda self: self.waiting())
    @rule(which=WHICH, steps=st.integers(2, 4))
    def break_again(self, which: int, steps: int) -> None:
        """One engine after the other fails a request, as one that breaks them all."""
        waiting = self.waiting()
        self.fail_again(waiting[which % len(waiting)], steps)

    @precondition(lambda self: self.world.client.open)
    @rule(which=WHICH)
    def fail_in_stream(self, which: int) -> None:
        """As vLLM whose pull fails: 200, then an error for a first event."""
        ask = self.pick(which)
        if ask.engine in self.world.decode and not ask.is_return:
            ask.respond(200, FIRST_EVENT, **STREAM)
            self.world.loop.settle()

    @precondition(lambda self: self.world.client.open)
    @rule(
        which=WHICH,
        error=st.sampled_from([ConnectFailed, ConnectionLost, ConnectionLost, IdleConnectionLost]),
    )
    def break_connection(self, which: int, error: type[Exception]) -> None:
        ask = self.pick(which)
        if not (ask.is_seen and error is ConnectFailed):
            ask.fail(error("it broke"))
            self.world.loop.settle()

    @precondition(lambda self: self.world.client.open)
    @rule(which=WHICH)
    def send(self, which: int) -> None:
        """There is a connection, and the engine may read the request."""
        self.pick(which).send()

    @rule(which=WHICH, comes_back=st.booleans())
    def go_down(self, which: int, comes_back: bool) -> None:
        engines = (*self.world.prefill, *self.world.decode)
        engine = engines[which % len(engines)]
        (self.world.client.down.discard if comes_back else self.world.client.down.add)(engine)

    @rule(seconds=st.sampled_from([0.05, 0.3, PATIENCE_S]))
    def wait(self, seconds: float) -> None:
        self.world.loop.advance(seconds)

    def pick(self, which: int) -> EngineAsk:
        asks = self.world.client.open
        return asks[which % len(asks)]

    def waiting(self) -> list[str]:
        clients = self.world.clients.items()
        return [name for name, client in clients if not client.task.done()]

    # Laws

    @invariant()
    def a_ticket_is_seen_by_one_engine(self) -> None:
        by_lease: dict[str, list[EngineAsk]] = {}
        for ask in self.world.client.asks:
            if ask.lease is not None and not ask.is_return:
                by_lease.setdefault(ask.lease, []).append(ask)
        for lease, asks in by_lease.items():
            for ask in asks[:-1]:
                assert ask.answer.done(), f"{lease} is at two engines"
                assert not ask.is_seen, f"{lease} went on from {ask.engine}, which may have it"

    @invariant()
    def engines_are_asked_as_the_rules_say(self) -> None:
        asks = [ask for ask in self.world.client.asks if not ask.is_return]
        for name, client in self.world.clients.items():
            ours = [ask for ask in asks if ask.request_id == name]
            prefill = Counter(ask.engine for ask in ours if ask.engine in self.world.prefill)
            assert max(prefill.values(), default=0) <= 1, f"{name} asks prefill again: {prefill}"
            decode = [ask for ask in ours if ask.engine in self.world.decode]
            for has_ticket in (True, False):
                of = Counter(ask.engine for ask in decode if (ask.lease is not None) is has_ticket)
                assert max(of.values(), default=0) <= 1, f"{name} asks decode again: {of}"
            for engines in (self.world.prefill, self.world.decode):
                broken = {ask.engine for ask in ours if ask.engine in engines and has_broken(ask)}
                assert len(broken) <= MOST_BROKEN, f"{name} has broken {broken}"
            if self.requires and not client.request.body.direct:
                assert all(ask.lease for ask in decode), f"{name} is computed by decode"

    @invariant()
    def nothing_is_asked_for_a_client_that_has_left(self) -> None:
        for number, ask in enumerate(self.world.client.asks):
            left = self.world.clients[ask.request_id].left_after
            is_late = left is not None and number >= left
            assert ask.is_return or not is_late, f"{ask.engine} is asked, and its client has left"

    @invariant()
    def what_fails_is_one_of_the_errors_that_clients_know(self) -> None:
        for client in self.world.clients.values():
            if client.task.done() and not client.task.cancelled():
                error = client.task.exception()
                assert error is None or isinstance(error, Refusal), repr(error)

    def check_end(self) -> None:
        """Engines are well again and answer: every request ends, and nothing is left."""
        world = self.world
        self.drain()
        for name, client in world.clients.items():
            self.check_client(name, client)
        self.check_tickets()
        unclosed = [one for one in world.client.responses if not one.num_closed]
        assert not unclosed, f"answers that are open: {[one.status for one in unclosed]}"
        assert not world.num_under_way(), "engines are thought to have requests"

    def close(self) -> None:
        self.world.close()

    def drain(self) -> None:
        world = self.world
        world.client.down.clear()
        for _ in range(400):
            for ask in world.client.open:
                world.respond(ask, 404 if ask.is_return else 200)
            world.loop.advance(0.3)
            background = world.handover.abandoned
            left = len(background._running) + len(background._tickets._running)
            if not (self.waiting() or world.client.open or left):
                return
        raise AssertionError(f"{self.waiting()} wait for ever")

    def check_client(self, name: str, client: Client) -> None:
        """It has its answer, an error, or a client that has left."""
        if client.task.cancelled():
            assert client.left_after is not None, f"{name} was cancelled, and its client waits"
            return
        error = client.task.exception()
        if error is not None:
            assert isinstance(error, NoEngineLeft | HandoverRequired), repr(error)
            return
        answer = client.task.result()
        assert any(
            ask.answer.done() and ask.request_id == name and ask.engine == answer.engine
            for ask in self.world.client.asks
        )
        answer.close()

    def check_tickets(self) -> None:
        """A ticket that reached the router was seen by a decode engine, or given back."""
        asks = self.world.client.asks
        seen = {ask.lease for ask in asks if ask.is_seen and not ask.is_return}
        returned = {ask.lease for ask in asks if ask.is_return}
        given = {lease for lease, ask in self.world.given.items() if not ask.answer.cancelled()}
        lost = given - seen - returned
        left = self.world.num_unused(TicketEnd.NO_ENGINE) + self.world.num_unused(
            TicketEnd.TOO_MANY
        )
        assert len(lost) <= left, f"neither seen nor given back: {lost}"


def has_broken(ask: EngineAsk) -> bool:
    """Whether the request may have broken the engine: it answered 500, or the connection broke."""
    if not ask.answer.done() or ask.answer.cancelled():
        return False
    error = ask.answer.exception()
    if error is not None:
        return type(error) is ConnectionLost
    response = ask.answer.result()
    return response.status == 500


@pytest.mark.hypothesis
def test_every_request_ends_once_and_its_ticket_is_seen_or_given_back() -> None:
    holds(HandoverMachine, examples=100, steps=STEPS)


# What those laws notice


def broken_by(patch: pytest.MonkeyPatch, owner: Any, name: str, by: Any) -> None:
    patch.setattr(owner, name, by)
    notices(HandoverMachine, examples=EXAMPLES, steps=STEPS)


def test_they_notice_a_ticket_that_goes_on_to_the_next_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_by(monkeypatch, Handover, "_spend_ticket", lambda self, request: None)


def test_they_notice_tickets_that_are_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Any, request: Any) -> None:
        request.ticket = None

    broken_by(monkeypatch, AbandonedRequests, "return_ticket", forget)


def test_they_notice_engines_that_are_asked_for_clients_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_by(monkeypatch, RoutedRequest, "client_left", property(lambda self: False))


def test_they_notice_a_request_that_breaks_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_by(monkeypatch, tries_module, "MOST_BROKEN", 99)


def test_they_notice_answers_that_are_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Any, answer: Any) -> None:
        self.refusal = answer

    broken_by(monkeypatch, RoutedRequest, "keep_refusal", keep)


def test_they_notice_a_decode_engine_that_computes_where_it_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_by(monkeypatch, Handover, "_check_may_compute", lambda self, request: None)


def test_they_notice_a_request_that_is_cut_off_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ticket is on its way then, and lost."""

    def cut_off(self: AbandonedRequests, request: Any, task: asyncio.Task[Any]) -> None:
        request.ticket = None
        task.cancel()

    broken_by(monkeypatch, AbandonedRequests, "client_left", cut_off)


def test_they_notice_returns_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_for_ever(self: Any, request: Any, body: bytes) -> TicketEnd:
        await asyncio.sleep(1e9)
        return TicketEnd.RETURNED

    broken_by(monkeypatch, TicketReturner, "_try_each", wait_for_ever)
