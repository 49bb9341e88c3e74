"""What is announced of a request is written, stays as it is, and comes as soon as it may.

vLLM's own scheduler computes, in chunks, synchronously or not, and preempts; what blocks hold is
known by the token (:mod:`tests.vllm.lends.announced.followed`)::

    announced    blocks hold the prompt from the moment on at which a reader hears of them, until
                 its claim ends; a ticket begins with them
    in time      what a request's own steps have written is announced when they are over
    confirmed    all that the ticket names was there to the end
    at the end   every lease is over, no table has an entry, and no block is in use
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

pytest.importorskip("vllm")

from pdconn.lender.sessions import LenderSessions, RevokeAll
from tests.fakes.scripted.lender import InlineLender
from tests.lender.test_every_follower import lends_again
from tests.property.scale import LawMachine, holds, notices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.lends import growing as growing_module
    from pdconn.vllm.lends import lending as lending_module
    from pdconn.vllm.lends.growing import GrowingRequest, GrowingRequests
    from pdconn.vllm.lends.pins import LeasePins
    from pdconn.vllm.patches.request_writes import num_computed
    from tests.vllm.lends.announced.followed import CHUNK, Followed, Follower
    from tests.vllm.lends.prefilling import CLOCK, LEASE_S, TIME
    from tests.vllm.patches.vllm_scheduler import BLOCK_TOKENS, NUM_BLOCKS, our_scheduler

ASKS = {"do_remote_decode": True}
FIRSTS = (1000, 2000)
"""First tokens of prompts: those with the same begin alike."""
LENGTHS = st.sampled_from([1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS + 2, 70, 90])
WHICH = st.integers(0, 99)
EXAMPLES, STEPS = 200, 30


@pytest.fixture(autouse=True)
def _by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lender takes turns, by a clock that stands still between them."""
    monkeypatch.setattr(lending_module, "Lender", partial(InlineLender, clock=CLOCK))
    monkeypatch.setattr(lending_module, "time", TIME)


class StreamMachine(LawMachine):
    """Requests are computed in chunks, preempted and aborted, and readers follow them."""

    engine: Followed

    @initialize(is_async=st.booleans(), caches=st.booleans())
    def start(self, is_async: bool, caches: bool) -> None:
        self.engine = Followed(is_async=is_async, caches=caches)
        self.in_flight = 2 if is_async else 1
        self.number = 0

    # Requests

    @rule(
        first=st.sampled_from(FIRSTS),
        num_tokens=LENGTHS,
        kind=st.sampled_from(["plain", "stream", "stream", "stream", "children", "unnamed"]),
        comes=st.sampled_from(["before", "after", "after", "late"]),
        loads=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def arrive(self, first: int, num_tokens: int, kind: str, comes: str, loads: int) -> None:
        """A request, and its reader: before it, after it, or a step later."""
        stream = f"stream-of-number-{self.number}"
        params: dict[str, Any] | None = None if kind == "plain" else dict(ASKS)
        if params is not None and kind != "unnamed":
            params |= {"pdconn": {"stream": stream}}
        if comes == "before":
            self.engine.follow(stream, first)
        name = f"r{self.number}"
        for each in (f"0_{name}", f"1_{name}") if kind == "children" else (name,):
            if loads * BLOCK_TOKENS < num_tokens:
                self.engine.loads[each] = loads * BLOCK_TOKENS
            self.engine.arrive(each, first, num_tokens, None if params is None else dict(params))
        self.number += 1
        if comes == "after":
            self.engine.follow(stream, first)
        elif comes == "late":
            self.go_on(1)
            self.engine.follow(stream, first)

    @rule(first=st.sampled_from([*FIRSTS, 3000, 4000, 5000]), loads=st.integers(0, 1))
    def arrive_alike(self, first: int, loads: int) -> None:
        """Two requests of one beginning, scheduled at once while a step is in flight."""
        if len(self.engine.memory.passes) < self.in_flight:
            self.engine.schedule()
        self.arrive(first, BLOCK_TOKENS + 1, "plain", "before", 0)
        self.arrive(first, 3 * BLOCK_TOKENS + 2, "stream", "after", loads)
        self.process_one(self.engine.process)
        self.engine.schedule()

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        names = list(self.engine.scheduler.requests)
        self.engine.engine.abort(names[which % len(names)])

    # The engine

    @precondition(lambda self: len(self.engine.memory.passes) < self.in_flight)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.memory.passes)
    @rule()
    def process(self) -> None:
        self.process_one(self.engine.process)

    @precondition(lambda self: self.engine.memory.passes)
    @rule()
    def bring(self) -> None:
        self.process_one(self.engine.bring)

    def bring_one(self) -> None:
        """A step is scheduled, and what was awaited has come when it is over."""
        self.engine.schedule()
        self.bring()

    @precondition(lambda self: len(self.engine.memory.passes) < self.in_flight)
    @rule()
    def preempt(self) -> None:
        """A step is scheduled while there are no free blocks."""
        with self.engine.without_blocks():
            self.engine.schedule()

    @rule(steps=st.integers(1, 4))
    def go_on(self, steps: int) -> None:
        """Steps as an engine takes them."""
        for _ in range(steps):
            while len(self.engine.memory.passes) < self.in_flight:
                self.engine.schedule()
            self.process_one(self.engine.process)

    def process_one(self, process: Callable[[], None]) -> None:
        """The oldest step is over; what readers knew before it is announced."""
        known = [one for one in self.engine.followers if one.believes and one.ticket is not None]
        process()
        for one in known:
            if not self.engine.stands_still:
                self.is_told(one)

    def is_told(self, one: Follower) -> None:
        """Whether a reader knows all that its request's own steps have written."""
        assert one.ticket is not None
        name = one.ticket.request_id
        request = self.engine.scheduler.requests.get(name)
        if request is None or not one.believes or one.is_complete:
            return
        if name not in self.engine.side.growing or request.status.name != "RUNNING":
            return
        written, preemptions = self.engine.written.get(name, (0, 0))
        if request.num_preemptions == preemptions:
            settled = written // BLOCK_TOKENS
            assert len(one.announced) >= settled, f"{one} is not told of {settled} blocks"

    @rule(num_blocks=st.integers(1, NUM_BLOCKS))
    def make_room(self, num_blocks: int) -> None:
        self.engine.side.make_room(num_blocks)

    @rule()
    def turn(self) -> None:
        self.engine.turn()

    @rule(seconds=st.sampled_from([0.01, LEASE_S / 2, LEASE_S]))
    def wait(self, seconds: float) -> None:
        CLOCK.advance(seconds)

    @rule(steps=st.integers(1, 4), resets=st.booleans())
    def stand_still(self, steps: int, resets: bool) -> None:
        """The lender's thread has no core meanwhile."""
        self.engine.turn()
        self.engine.stands_still = True
        if resets:
            self.reset(preempts=True)
        self.go_on(steps)
        self.engine.stands_still = False
        self.engine.turn()

    @rule(preempts=st.booleans())
    def reset(self, preempts: bool) -> None:
        """The cache is cleared; running requests may be computed anew for that."""
        self.engine.turn()
        # vLLM ends its process if others than running requests have blocks then.
        requests = self.engine.scheduler.requests.items()
        others = [n for n, r in requests if self.engine.blocks(n) and r.status.name != "RUNNING"]
        preempts = preempts and not others and not self.engine.memory.passes
        if self.engine.stands_still:
            preempts = preempts and not self.engine.side.pins.num_blocks
        try:
            is_reset = self.engine.scheduler.reset_prefix_cache(preempts)
        except RuntimeError as error:
            raise AssertionError("blocks are in use, of no request") from error
        # A lender whose thread stands still hears of it later; vLLM has given the reset up by then.
        if is_reset or RevokeAll() in self.engine.lender._inbox:
            for one in self.engine.followers:
                one.is_revoked = True

    # Readers

    @precondition(lambda self: self.engine.followers)
    @rule(which=WHICH)
    def follow_again(self, which: int) -> None:
        """Another reader has the same early ticket."""
        known = self.engine.followers[-6:]
        one = known[which % len(known)]
        self.engine.follow(one.stream, one.first)

    @precondition(lambda self: self.engine.followers)
    @rule(which=WHICH, what=st.sampled_from(["confirm", "confirm", "leave", "renew"]))
    def end_read(self, which: int, what: str) -> None:
        followers = [one for one in self.engine.followers if not one.is_over][-6:]
        if not followers:
            return
        one = followers[which % len(followers)]
        if what == "leave":
            self.engine.leave(one)
        elif what == "renew" and one.ticket is not None:
            self.engine.renew(one)
        elif what == "confirm" and one.is_complete:
            self.confirm(one)

    def confirm(self, one: Follower) -> None:
        wrong = self.engine.wrong_blocks(one)
        must = one.believes
        is_confirmed = self.engine.confirm_follower(one)
        assert not (is_confirmed and wrong), f"{one} is confirmed, and {wrong} are not there"
        assert not (is_confirmed and one.is_revoked), f"{one} is confirmed after a reset"
        assert is_confirmed or not must, f"{one} believes its claim, and it is not confirmed"

    # Laws

    @invariant()
    def what_is_announced_is_there(self) -> None:
        for one in self.engine.followers:
            if one.believes:
                wrong = self.engine.wrong_blocks(one)
                assert not wrong, f"{one} was told of {wrong}, which hold something else"

    @invariant()
    def what_is_lent_is_pinned(self) -> None:
        """The end of a lease is not taken for that of another of its name."""
        leases = self.engine.lender.sessions._leases._leases
        unpinned = [name for name in leases if name not in self.engine.side.pins]
        assert not unpinned, f"{unpinned} are lent, and not pinned"

    @invariant()
    def blocks_are_freed_once(self) -> None:
        blocks = self.engine.pool.blocks
        assert min(block.ref_cnt for block in blocks) >= 0, "freed twice"

    def check_end(self) -> None:
        """Requests end, and time passes: every lease ends, and every block is free."""
        engine = self.engine
        for _ in range(60 * (1 + self.number)):
            if not engine.scheduler.requests and not engine.memory.passes:
                break
            if len(engine.memory.passes) < self.in_flight:
                engine.schedule()
            CLOCK.advance(LEASE_S)
            self.process_one(engine.bring)
        left = list(engine.scheduler.requests)
        assert not left, f"{left} wait for ever"
        engine.turn()  # what it grants now holds for a lease's time
        CLOCK.advance(10 * LEASE_S)
        for _ in range(3):
            engine.turn()
            engine.schedule()
            engine.process()
        tables: tuple[Any, ...] = (
            engine.side.pins, engine.side.growing, engine.side._lent._digests,
            engine.side._lent._shared, engine.lender.sessions._leases,
        )  # fmt: skip
        assert [len(table) for table in tables] == [0] * len(tables), "entries of nothing"
        assert not engine.lender.sessions.num_streams, "streams of nothing"
        assert {block.ref_cnt for block in engine.pool.blocks[1:]} == {0}, "blocks are in use"

    def close(self) -> None:
        self.engine.close()


def follows_all(engine: Followed, first: int, num_tokens: int, *, steps: int) -> Follower:
    """One request computed alone, and its reader, after so many steps."""
    stream = f"a-stream-of-{first}"
    one = engine.follow(stream, first)
    engine.arrive(f"r{first}", first, num_tokens, ASKS | {"pdconn": {"stream": stream}})
    for _ in range(steps):
        engine.schedule()
        engine.process()
    return one


@pytest.mark.parametrize("caches", [False, True], ids=["plain", "caching"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_each_step_announces_the_blocks_that_it_has_filled(is_async: bool, caches: bool) -> None:
    """What is drawn below is not empty: blocks are announced chunk by chunk."""
    engine = Followed(is_async=is_async, caches=caches)
    num_tokens = 3 * CHUNK
    one = follows_all(engine, 1000, num_tokens, steps=1)
    assert len(one.announced) == CHUNK // BLOCK_TOKENS
    engine.schedule()
    engine.process()
    assert len(one.announced) == 2 * CHUNK // BLOCK_TOKENS
    assert not one.is_complete
    engine.schedule()
    engine.process()
    assert one.is_complete
    assert len(one.announced) == -(-num_tokens // BLOCK_TOKENS)
    assert engine.confirm_follower(one)
    engine.close()


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_what_is_followed_is_the_prompt_however_long_the_answer(max_tokens: int) -> None:
    """A client may ask prefill for more than the one token that a router asks for."""
    engine = Followed(is_async=False, caches=False)
    one = follows_all(engine, 1000, 3 * BLOCK_TOKENS - 1, steps=0)
    engine.scheduler.requests["r1000"].max_tokens = max_tokens
    for _ in range(2 + max_tokens):
        engine.schedule()
        engine.process()
    assert one.is_complete
    assert engine.confirm_follower(one)
    engine.close()


@pytest.mark.parametrize("is_followed", [False, True], ids=["nobody has read it", "followed"])
def test_a_name_is_not_lent_again_before_the_end_of_its_lease_is_known(is_followed: bool) -> None:
    """A client uses the name of a request that it has aborted, and the lender's thread is slow."""
    engine = Followed(is_async=False, caches=False)
    one = follows_all(engine, 1000, 3 * CHUNK, steps=1) if is_followed else None
    if one is None:
        engine.arrive("r1000", 1000, 3 * CHUNK, ASKS | {"pdconn": {"stream": "x" * 16}})
        engine.schedule()
        engine.process()
    assert "r1000" in engine.side.pins
    again = engine.follow("y" * 16, 1000)
    engine.stands_still = True
    engine.engine.abort("r1000")
    engine.arrive("r1000", 1000, CHUNK, ASKS | {"pdconn": {"stream": "y" * 16}})
    for _ in range(2):
        engine.schedule()
        engine.process()
    assert not engine.lent
    assert again.ticket is None
    engine.stands_still = False
    if one is not None:
        engine.leave(one)
    engine.turn()
    engine.schedule()
    engine.process()
    assert len(engine.side.pins) == len(engine.lender.sessions._leases) == 0
    engine.close()


@pytest.mark.hypothesis
def test_what_is_announced_is_written_and_stays_until_its_readers_have_left() -> None:
    holds(StreamMachine, examples=60, steps=STEPS)


# What those laws notice


def uncertain(**with_guards: bool) -> Callable[[GrowingRequest], bool]:
    """``_is_certain`` without the guards that are False."""

    def is_certain(growing: GrowingRequest) -> bool:
        request, held = growing.request, growing.held
        return (
            (held is not None or not with_guards.get("scheduled", True))
            and (
                growing.preemptions == request.num_preemptions or not with_guards.get("again", True)
            )
            and (num_computed(request) > (held or 0) or not with_guards.get("over", True))
        )

    return is_certain


@pytest.mark.parametrize("guard", ["scheduled", "over"])
def test_they_notice_growth_without_a_guard(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for a load, and a hit on what a step in flight writes."""
    monkeypatch.setattr(growing_module, "_is_certain", uncertain(**{guard: False}))
    notices(StreamMachine, examples=EXAMPLES, steps=STEPS, what="was told of|out of order")


def test_they_notice_growth_by_what_a_step_in_flight_will_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growing_module, "num_computed", lambda request: request.num_computed_tokens)
    notices(StreamMachine, examples=EXAMPLES, steps=STEPS, what="was told of")


def test_they_notice_growth_of_a_request_that_loads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loads_again()
    monkeypatch.setattr(growing_module, "_is_certain", uncertain(again=False))
    with pytest.raises(AssertionError, match="was told of"):
        loads_again()


def loads_again() -> None:
    """A preempted request waits for more than it had loaded at first."""
    machine = StreamMachine()
    machine.start(is_async=False, caches=False)
    engine = machine.engine
    machine.arrive(1000, 65, "stream", "after", 1)
    machine.go_on(1)
    machine.bring_one()
    engine.schedule()  # its first chunk
    machine.process()
    machine.preempt()
    machine.process()
    engine.schedule()
    assert engine.loading_now()
    machine.process()
    machine.what_is_announced_is_there()
    machine.check_end()
    engine.close()


class AnnouncesTails(GrowingRequests):
    """Takes a block that was begun for one that is full."""

    def _growth(self, name: str, growing: GrowingRequest, splits: Any) -> Any:
        growing.request.num_computed_tokens += BLOCK_TOKENS - 1
        try:
            return super()._growth(name, growing, splits)
        finally:
            growing.request.num_computed_tokens -= BLOCK_TOKENS - 1


class ForgetsNoRequest(GrowingRequests):
    """Keeps requests that have ended."""

    def remove_request(self, name: str) -> Any:
        return self._requests.get(name)


class AnnouncesNothing(GrowingRequests):
    """Waits for the ticket."""

    def take_growth(self, splits: Any) -> list[Any]:
        return []


class NamesItsBlocks(GrowingRequests):
    """Writes the blocks into the ticket that a request has in the end."""

    def as_announced(self, request_id: str, ids: Any) -> tuple[Any, Any]:
        return ids, ids


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (AnnouncesTails, "was told of"),
        (AnnouncesNothing, "is not told"),
        (NamesItsBlocks, "Completed|was told of"),
        (ForgetsNoRequest, "entries of nothing"),
    ],
)
def test_they_notice_requests_that_grow_otherwise(
    broken: type[GrowingRequests], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(our_scheduler, "GrowingRequests", broken)
    notices(StreamMachine, examples=EXAMPLES, steps=STEPS, what=what)


def test_they_notice_announced_blocks_that_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pin = LeasePins.pin_more
    nothing: Iterable[int] = ()
    monkeypatch.setattr(LeasePins, "pin_more", lambda self, name, ids: pin(self, name, nothing))
    notices(StreamMachine, examples=EXAMPLES, steps=STEPS, what="was told of|is confirmed")


def test_they_notice_a_ticket_that_is_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine hears of the end of the first lease, and unpins what the second one lends."""
    monkeypatch.setattr(LenderSessions, "_apply_stream_command", lends_again)
    notices(StreamMachine, examples=EXAMPLES, steps=STEPS, what="lent, and not pinned")


def test_they_notice_a_lease_that_the_engine_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with that name could be lent before the end of the lease is reported."""
    pin, unpin = LeasePins.pin_more, LeasePins.unpin_lease
    monkeypatch.setattr(
        LeasePins, "pin_more", lambda self, name, ids: pin(self, name, found)
        if (found := list(ids)) else None,
    )  # fmt: skip
    monkeypatch.setattr(
        LeasePins, "unpin_lease", lambda self, name: unpin(self, name) if name in self else None
    )
    notices(StreamMachine, examples=EXAMPLES, steps=STEPS, what="lent, and not pinned")


def test_they_notice_streams_that_do_not_end_with_their_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lending_module.Lending, "_close_stream", lambda self, name: None)
    notices(StreamMachine, examples=EXAMPLES, steps=STEPS, what="of nothing|in use|for ever")


def test_they_notice_pins_that_are_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeasePins, "unpin_lease", lambda self, name: self._blocks.pop(name))
    notices(StreamMachine, examples=EXAMPLES, steps=STEPS, what="in use|for ever")
