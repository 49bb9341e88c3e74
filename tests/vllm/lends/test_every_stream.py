"""Every announced block is written, stays as it is while it is lent, and is freed once.

The laws of :mod:`tests.vllm.lends.test_every_block`, with requests that readers follow while they
are computed in chunks::

    announced   a block is in use, and holds what its tokens are, until its lease ends
    tickets     name what was announced
    streams     end with their request: at the end none is open, and no reader waits
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

pytest.importorskip("vllm")

from pdconn.lender.streams import PARK_S
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Completed,
    Confirm,
    Confirmed,
    Done,
    Follow,
    Granted,
    Grown,
    Hello,
    Opened,
    Reader,
    Refused,
    Renew,
)
from tests.fakes.scripted.lender import InlineLender, Session
from tests.property.scale import holds, notices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.lends import growing as growing_module
    from pdconn.vllm.lends import lending as lending_module
    from pdconn.vllm.lends.growing import GrowingRequests, Growth
    from pdconn.vllm.lends.lending import Lending
    from tests.vllm.lends.prefilling import CLOCK, TIME, Lent, Prefilling
    from tests.vllm.lends.test_every_block import ASKS, FIRSTS, WHICH, PrefillMachine
    from tests.vllm.patches.vllm_scheduler import BLOCK_TOKENS

CHUNK_TOKENS = 20
"""Of a step: a chunk ends inside a block."""
LENGTHS = st.sampled_from([3 * BLOCK_TOKENS + 2, 70, BLOCK_TOKENS + 1])
EARLY = b"e" * 16
EXAMPLES, STEPS = 200, 30


@pytest.fixture(autouse=True)
def _by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lender takes turns, by a clock that stands still between them."""
    monkeypatch.setattr(lending_module, "Lender", partial(InlineLender, clock=CLOCK))
    monkeypatch.setattr(lending_module, "time", TIME)


@dataclass(slots=True)
class Follower:
    """A reader of a stream, and what it was sent.

    Attributes:
        boot: of the lender that it is connected to.
        until: it believes its claim until then.
        ticket: blocks of the complete ticket.
    """

    session: Session
    reader: Reader
    boot: int
    request: str | None = None
    until: float = 0.0
    blocks: list[int] = field(default_factory=list)
    ticket: list[int] | None = None
    is_refused: bool = False
    has_left: bool = False
    seq: itertools.count[int] = field(default_factory=lambda: itertools.count(2))

    def hear(self) -> None:
        replies, self.session.replies = self.session.replies, []
        for reply in replies:
            if isinstance(reply, Opened):
                self.request = reply.request
            elif isinstance(reply, Granted):
                self.until = CLOCK() + reply.ttl_ms / 1000
            elif isinstance(reply, Refused):
                self.is_refused = True
            elif isinstance(reply, Grown):
                for more in reply.blocks:
                    assert more.first == len(self.blocks), "announced twice, or not in order"
                    self.blocks += more.ids
            elif isinstance(reply, Completed):
                [(first, ids)] = reply.blocks
                assert first == 0
                assert list(ids[: len(self.blocks)]) == self.blocks, "not what was announced"
                self.ticket = list(ids)


class StreamMachine(PrefillMachine):
    """Requests with streams are computed in chunks, and readers follow them."""

    @initialize()
    def start(self) -> None:
        self.engine = Prefilling()
        self.engine.scheduler.max_num_scheduled_tokens = CHUNK_TOKENS
        self.number = self.followed = 0
        self.firsts: dict[str, tuple[int, int]] = {}
        self.followers: list[Follower] = []

    @rule(
        first=st.sampled_from(FIRSTS),
        num_tokens=LENGTHS,
        early=st.integers(0, 1),
        steps=st.integers(0, 3),
        late=st.integers(0, 1),
    )
    def arrive_followed(
        self, first: int, num_tokens: int, early: int, steps: int, late: int
    ) -> None:
        """A request with a stream; readers come before it, and after some steps."""
        name, stream = f"r{self.number}", f"{self.number:016}"
        self.number += 1
        self.firsts[name] = first, num_tokens
        for _ in range(early):
            self.follow(stream)
        self.engine.arrive(name, first, num_tokens, {**ASKS, "pdconn": {"stream": stream}})
        self.go_on(steps)
        for _ in range(late):
            self.follow(stream)
        self.engine.lender.turn()

    @precondition(lambda self: not self.engine.memory.passes)
    @rule(first=st.sampled_from(FIRSTS))
    def arrive_behind_another(self, first: int) -> None:
        """Two requests begin alike in one step; one before it is in flight, and ends then."""
        self.arrive(3000, 1, "plain", children=1, steps=0)
        self.engine.schedule()
        self.arrive(first, BLOCK_TOKENS + 1, "plain", children=1, steps=0)
        self.arrive_followed(first, 3 * BLOCK_TOKENS + 2, early=1, steps=0, late=0)
        self.engine.schedule()
        self.process()

    def follow(self, stream: str) -> None:
        boot = self.engine.boot
        one = Follower(Session("reader"), Reader(f"f/{self.followed}", 0, 1), boot)
        self.followed += 1
        self.followers.append(one)
        self.say(one, Hello(PROTOCOL_VERSION, "d", f"boot-{boot}"), Follow(1, stream, one.reader))

    @precondition(lambda self: self.followers)
    @rule(which=WHICH, what=st.sampled_from(["renew", "confirm", "confirm", "leave"]))
    def end_following(self, which: int, what: str) -> None:
        one = self.followers[which % len(self.followers)]
        if not self.is_live(one) or one.request is None:
            return
        if what == "renew":
            self.say(one, Renew(next(one.seq), one.request, one.reader))
        elif what == "leave":
            one.has_left = True
            self.say(one, Done(one.request, one.reader, self.digest(one)))
        elif one.ticket is not None:
            self.confirm(one, one.request)

    def confirm(self, one: Follower, request: str) -> None:
        found = [lent for lent in self.engine.lent if lent.ticket.request_id == request]
        if not found:  # the client has not been answered yet
            return
        assert list(found[-1].ticket.blocks[0].ids) == one.ticket, "another ticket than was sent"
        message = Confirm(next(one.seq), request, one.reader, found[-1].ticket.digest())
        one.has_left = True
        if any(
            isinstance(each, Confirmed) for each in self.engine.lender.say(one.session, message)
        ):
            assert self.engine.is_intact(found[-1]), f"{one} is confirmed, and is not there"
            assert not found[-1].is_revoked, f"{one} is confirmed after a reset"

    def say(self, one: Follower, *messages: Any) -> None:
        one.session.replies = self.engine.lender.say(one.session, *messages)
        one.hear()

    # Laws

    @invariant()
    def what_is_announced_is_written_and_stays(self) -> None:
        engine = self.engine
        for one in self.followers:
            if not self.is_live(one):
                continue
            one.hear()
            if one.request is None or not engine.lender.sessions._leases.is_lent(one.request):
                continue
            first, num_tokens = self.firsts[one.request]
            for position, block in enumerate(one.blocks):
                assert engine.pool.blocks[block].ref_cnt > 0, f"{block} is announced and free"
                for slot in range(BLOCK_TOKENS):
                    at = position * BLOCK_TOKENS + slot
                    seen = engine.memory.read((block, slot))
                    assert at >= num_tokens or seen == (first, at), f"{at} of {one} is {seen}"

    def check_end(self) -> None:
        for one in self.followers:
            if self.is_live(one) and one.request is not None:
                one.has_left = True
                self.say(one, Done(one.request, one.reader, self.digest(one)))
        CLOCK.advance(PARK_S)
        super().check_end()
        self.engine.lender.turn()
        growing = self.engine.side.growing
        assert growing is not None
        assert (len(growing), self.engine.lender.sessions.num_streams) == (0, 0), "streams are open"

    def is_claimed(self, lent: Lent) -> bool:
        follow = [one.request for one in self.followers if one.until > CLOCK()]
        return super().is_claimed(lent) or lent.ticket.request_id in follow

    def is_live(self, one: Follower) -> bool:
        return one.boot == self.engine.boot and not one.has_left

    def digest(self, one: Follower) -> bytes:
        found = [lent for lent in self.engine.lent if lent.ticket.request_id == one.request]
        return found[-1].ticket.digest() if found and one.ticket is not None else EARLY


@pytest.mark.hypothesis
def test_every_announced_block_is_written_stays_and_is_freed_once() -> None:
    holds(StreamMachine, examples=60, steps=STEPS)


# What those laws notice


def _unpinned(growing: GrowingRequests, *args: Any) -> Growth | None:
    found = GROWTH(growing, *args)
    return None if found is None else replace(found, pins=[])


GROWTH = GrowingRequests._growth

BROKEN: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "does not pin what it announces": (GrowingRequests, "_growth", _unpinned),
    "leaves streams of aborted requests open": (Lending, "_close_stream", lambda *_: None),
    "announces what a step in flight will write": (
        growing_module,
        "num_computed",
        lambda request: request.num_computed_tokens,
    ),
    "announces hits of a step in flight": (
        growing_module,
        "_is_certain",
        lambda growing: growing.held is not None,
    ),
    "forgets no stream": (
        GrowingRequests,
        "remove_request",
        lambda of, name: of._requests.get(name),
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_laws_notice_a_side_that(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[broken])
    notices(StreamMachine, examples=EXAMPLES, steps=STEPS)
