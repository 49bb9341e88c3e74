"""Every request ends in one way, whatever engines answer and clients do, in any order.

The hand-over is real, and so is what it decides with; engines answer, fail and are gone as drawn,
and time passes when it is drawn (:mod:`tests.router.handover.handing`)::

    engines     prefill is asked once, decode once with each ticket and once without; after the
                first engine of a role as many others as ``--retries`` says; a request that breaks
                engines breaks two of a role; after its client has left none is asked
    tickets     one engine can have seen each; what no engine has seen is given back, and what
                decode has finished with before it came
    streams     a request has one; decode follows it in its turn, and not when prefill has ended
                without lending; prefill does not outlive its request for long
    answers     all are closed, but one, which the client gets
    at the end  no request waits, and no engine is thought to have one
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
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
from pdconn.router.fleet.flights import Flight
from pdconn.router.handover import abandoned, early_leg
from pdconn.router.handover import tries as tries_module
from pdconn.router.handover.abandoned import AbandonedRequests
from pdconn.router.handover.decode import AskedDecode
from pdconn.router.handover.early_leg import EarlyLeg, EarlyLegs
from pdconn.router.handover.ticket_return import TicketReturner
from pdconn.router.handover.tries import MOST_BROKEN, EngineTries
from pdconn.router.metric_table import TicketEnd
from pdconn.router.router_errors import HandoverRequired, NoEngineLeft, Refusal
from pdconn.router.routing.routed_request import RoutedRequest
from tests.fakes.scripted.client import EngineAsk
from tests.property.scale import LawMachine, holds, notices
from tests.router.handover.handing import PATIENCE_S, Client, Handing

WHICH = st.integers(0, 99)
STATUSES = st.sampled_from([200, 200, 200, 400, 404, 429, 500, 500, 503])
EXAMPLES, STEPS = 300, 30
LATE_S = abandoned.LATE_S
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
        streams=st.sampled_from(["on", "on", "off"]),
        chunk=st.sampled_from([0, 8192]),
        most=st.sampled_from([1, 64]),
        retries=st.sampled_from([None, None, 0, 1]),
    )
    def start(
        self,
        *,
        num_prefill: int,
        num_decode: int,
        require_prefill: bool,
        has_prefill: bool,
        streams: str,
        chunk: int,
        most: int,
        retries: int | None,
    ) -> None:
        options = {"streams": streams, "stream_chunk": chunk, "max_streams": most}
        options["retries"] = self.retries = retries
        self.world = Handing(num_prefill, num_decode, require_prefill=require_prefill, **options)
        self.requires, self.chunk, self.most = require_prefill, chunk, most
        self.ended_s: dict[str, float] = {}
        self.world.learn_lenders()
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
        for ask in self.open_of(name):
            if is_lent and ask.engine in world.prefill:
                world.respond(ask)
        self.fail_again(name, steps)

    def fail_again(self, name: str, steps: int) -> None:
        for _ in range(steps):
            for ask in self.open_of(name):
                self.world.respond(ask, 500)

    def open_of(self, name: str | None = None) -> Iterator[EngineAsk]:
        """What waits now for an answer, and still does when it has its turn."""
        for ask in self.world.client.open:
            if name in (None, ask.request_id) and not ask.answer.done():
                yield ask

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

    @rule(num_requests=st.integers(1, 2))
    def arrive_early(self, num_requests: int) -> None:
        """Requests come that decode may follow: it is known where prefill lends."""
        self.world.learn_lenders()
        for _ in range(num_requests):
            self.world.arrive(is_direct=False)

    @rule(which=WHICH)
    def restart(self, which: int) -> None:
        """A prefill engine comes back before a request of this router has failed there."""
        self.world.restart(self.world.prefill[which % len(self.world.prefill)])

    @rule(seconds=st.sampled_from([0.05, 0.3, PATIENCE_S, LATE_S]))
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
        """Also where one engine had it early, and another one when prefill had answered."""
        by_lease: dict[object, list[EngineAsk]] = {}
        for ask in self.world.client.asks:
            named = self.world.named_by(ask)
            assert not (ask.is_return and ask.followed), "an early ticket is returned"
            if named is not None and not ask.is_return:
                by_lease.setdefault(named, []).append(ask)
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
            of = Counter((ask.engine, self.world.named_by(ask)) for ask in decode)
            assert max(of.values(), default=0) <= 1, f"{name} asks decode again: {of}"
            for engines in (self.world.prefill, self.world.decode):
                of_role = {ask.engine for ask in ours if ask.engine in engines}
                if self.retries is not None:
                    said = f"{name} is sent to {of_role} with {self.retries} retries"
                    assert len(of_role) <= 1 + self.retries, said
                broken = {ask.engine for ask in ours if ask.engine in engines and has_broken(ask)}
                assert len(broken) <= MOST_BROKEN, f"{name} has broken {broken}"
            if self.requires and not client.request.body.direct:
                assert all(map(self.world.named_by, decode)), f"{name} is computed by decode"

    @invariant()
    def decode_follows_what_prefill_computes(self) -> None:
        for name, client in self.world.clients.items():
            ours = [ask for ask in self.world.client.asks if ask.request_id == name]
            prefill = [ask for ask in ours if ask.engine in self.world.prefill and ask.stream]
            early = [ask for ask in ours if ask.followed is not None]
            assert len(prefill) <= 1, f"{name} is followed at two prefill engines"
            for ask in early:
                assert ask.stream == prefill[0].stream, f"{name} follows another's stream"
                if ask.answer.done():
                    continue
                if prefill[0].answer.done():
                    lent = ask.followed in self.world.lent_streams
                    assert lent, f"{name} follows what {prefill[0].engine} does not lend"
                else:
                    assert client.left_after is None, f"{name} follows, and its client has left"

    @invariant()
    def decode_follows_in_its_turn(self) -> None:
        """Each prompt here has one token."""
        asks = self.world.client.asks
        waiting: Counter[str] = Counter()
        for ask in asks:
            if ask.followed is None or ask.answer.done():
                continue
            followed = next(one for one in asks if one.stream == ask.stream)
            if followed.answer.done():
                continue
            before = asks[: asks.index(followed)]
            ahead = [one for one in before if one.engine == followed.engine]
            num_ahead = sum(not one.answer.done() for one in ahead)
            assert num_ahead <= self.chunk, f"{ask.request_id} follows, and {num_ahead} are ahead"
            others = [one for one in asks if one.stream == ask.stream]
            waiting[ask.engine] += len(others) == 2  # else another engine was not reached
        assert max(waiting.values(), default=0) <= self.most, f"too many wait: {waiting}"

    @invariant()
    def prefill_does_not_outlive_its_request_for_long(self) -> None:
        now_s = self.world.loop.time()
        for name, client in self.world.clients.items():
            if client.task.done():
                self.ended_s.setdefault(name, now_s)
        for ask in self.world.client.open:
            ended_s = self.ended_s.get(ask.request_id, now_s)
            is_late = ask.engine in self.world.prefill and now_s - ended_s > LATE_S
            assert not is_late, f"{ask.request_id} is still at {ask.engine}"

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
        assert not world.num_waiting, "requests are thought to wait for prefill"

    def close(self) -> None:
        self.world.close()

    def drain(self) -> None:
        world = self.world
        world.client.down.clear()
        for _ in range(400):
            for ask in self.open_of():
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
        """A ticket that reached the router was seen by a decode engine, or given back.

        One that decode had early, and had finished with, was given back.
        """
        world, asks = self.world, self.world.client.asks
        seen = {world.named_by(ask) for ask in asks if ask.is_seen and not ask.is_return}
        returned = {ask.lease for ask in asks if ask.is_return}
        given = {lease for lease, ask in world.given.items() if not ask.answer.cancelled()}
        lost = (given - (seen - world.owed)) - returned
        left = world.num_unused(TicketEnd.NO_ENGINE) + world.num_unused(TicketEnd.TOO_MANY)
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
    broken_by(monkeypatch, AskedDecode, "_spend_ticket", lambda self, request: None)


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
    broken_by(monkeypatch, EngineTries, "check_may_compute", lambda self, request: None)


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


# What those laws notice of streams


def test_they_notice_a_ticket_of_an_early_one_that_was_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another engine would get it, or no one would give it back."""
    broken_by(monkeypatch, EarlyLeg, "_is_spent", property(lambda self: False))


def test_they_notice_an_early_ticket_that_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def spend(self: RoutedRequest) -> Any:
        ticket, self.ticket, self.early = self.usable_ticket, None, None
        return ticket

    broken_by(monkeypatch, RoutedRequest, "spend_ticket", spend)


def test_they_notice_a_leg_that_is_left_open_after_prefill_has_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def leave_open(legs: Any, kept: Any) -> None:
        await asyncio.sleep(0)

    broken_by(monkeypatch, early_leg, "_end_legs", leave_open)


def test_they_notice_a_leg_that_is_left_open_when_the_next_engine_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def leave_open(self: EarlyLeg) -> bool:
        return True

    broken_by(monkeypatch, EarlyLeg, "give_up", leave_open)


def test_they_notice_a_prefill_that_no_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request has been answered, or has failed."""

    def forget(self: AbandonedRequests, request: Any, prefill: Any) -> None:
        pass

    broken_by(monkeypatch, AbandonedRequests, "decode_was_first", forget)


def test_they_notice_decode_that_follows_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: Flight, most_tokens: int, act: Any) -> None:
        act()

    broken_by(monkeypatch, Flight, "when_ahead", at_once)


def test_they_notice_more_that_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_by(monkeypatch, EarlyLegs, "has_room", lambda self, engine: True)


def test_they_notice_places_that_are_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_by(monkeypatch, EarlyLegs, "stop_waiting", lambda self, engine: None)


def test_they_notice_an_early_ticket_that_stays_where_its_boot_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_by(monkeypatch, early_leg, "is_one_boot", lambda early, lender: True)


def test_they_notice_decode_that_follows_for_a_client_that_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has its turn, or asks the next engine, and then closes nothing."""
    broken_by(monkeypatch, EarlyLeg, "kinds", frozenset())
