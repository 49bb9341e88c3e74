"""Every block that is lent is freed, once, and not while a reader may read it.

vLLM's own scheduler computes, its pool counts references, the leases are real, and what blocks hold
is known by the token (:mod:`tests.vllm.lends.prefilling`)::

    blocks      of a lease that has not ended are in use; what was confirmed was there to the end
    tickets     children of a request share one that is not about to end; a changed one does nothing
    a reset     takes everything back, if nothing but leases holds blocks, and confirms none of it
    at the end  every lease is over, no table has an entry, and no block is in use
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

pytest.importorskip("vllm")

from pdconn.lifecycle.lease import FreedLease
from pdconn.vllm.prompt import parent_of
from tests.fakes.scripted.lender import InlineLender
from tests.property.scale import LawMachine, holds, notices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.lends import lending as lending_module
    from pdconn.vllm.lends import pins as pins_module
    from pdconn.vllm.lends.lending import Lending
    from pdconn.vllm.lends.pins import LeasePins
    from pdconn.vllm.lends.tickets import LentTickets
    from tests.vllm.lends.prefilling import CLOCK, LEASE_S, TIME, Claimed, Lent, Prefilling
    from tests.vllm.patches.vllm_scheduler import BLOCK_TOKENS, NUM_BLOCKS, our_scheduler

FIRSTS = (1000, 2000)
LENGTHS = st.sampled_from([1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS + 2, 70])
WHICH = st.integers(0, 99)
EXAMPLES, STEPS = 200, 30
ASKS = {"do_remote_decode": True}


@pytest.fixture(autouse=True)
def _by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lender takes turns, by a clock that stands still between them."""
    monkeypatch.setattr(lending_module, "Lender", partial(InlineLender, clock=CLOCK))
    monkeypatch.setattr(lending_module, "time", TIME)


class PrefillMachine(LawMachine):
    """Requests are computed and lent, readers come and go, time passes, and caches are reset."""

    engine: Prefilling

    @initialize()
    def start(self) -> None:
        self.engine = Prefilling()
        self.number = 0

    # Requests

    @rule(
        first=st.sampled_from(FIRSTS),
        num_tokens=LENGTHS,
        kind=st.sampled_from(["plain", "lent", "lent", "lent", "prefix"]),
        children=st.sampled_from([1, 1, 2]),
        steps=st.integers(0, 3),
    )
    def arrive(self, first: int, num_tokens: int, kind: str, children: int, steps: int) -> None:
        params: dict[str, Any] | None = None if kind == "plain" else dict(ASKS)
        if kind == "prefix" and num_tokens > 1:
            params = {**ASKS, "pdconn": {"lend": num_tokens - 1}}
        for child in range(children):
            name = f"{child}_r{self.number}" if children > 1 else f"r{self.number}"
            self.engine.arrive(name, first, num_tokens, None if params is None else dict(params))
        self.number += 1
        self.go_on(steps)

    @rule(first=st.sampled_from(FIRSTS), waited=st.sampled_from([0.4, 0.6, 0.9]))
    def arrive_as_late_child(self, first: int, waited: float) -> None:
        """The second answer to a prompt, some time after the first one."""
        for child, wait in enumerate((0.0, waited)):
            CLOCK.advance(wait * LEASE_S)
            self.engine.arrive(f"{child}_r{self.number}", first, BLOCK_TOKENS + 1, dict(ASKS))
            self.go_on(3)
        self.number += 1

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        names = list(self.engine.scheduler.requests)
        self.engine.engine.abort(names[which % len(names)])

    # The engine

    @precondition(lambda self: len(self.engine.memory.passes) < 2)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.memory.passes)
    @rule()
    def process(self) -> None:
        self.process_one()

    @rule(steps=st.integers(1, 4))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.lender.turn()
            self.engine.schedule()
            leases = self.engine.lender.sessions._leases
            ended = [name for name in self.engine.side.pins._blocks if not leases.is_lent(name)]
            assert not ended, f"{ended} are not lent, and pinned"
            self.process_one()

    def process_one(self) -> None:
        known = len(self.engine.lent)
        self.engine.process()
        for one in self.engine.lent[known:]:
            assert self.engine.is_intact(one), f"{one} is lent, and something else is in its blocks"

    @rule(num_blocks=st.integers(1, NUM_BLOCKS))
    def make_room(self, num_blocks: int) -> None:
        self.engine.side.make_room(num_blocks)

    @rule()
    def turn(self) -> None:
        self.engine.lender.turn()

    @rule(seconds=st.sampled_from([0.01, LEASE_S / 2, LEASE_S]))
    def wait(self, seconds: float) -> None:
        CLOCK.advance(seconds)

    @rule(sleeps=st.booleans())
    def reset(self, sleeps: bool) -> None:
        """The cache is cleared, and the engine may sleep then."""
        engine, requests = self.engine, list(self.engine.scheduler.requests)
        is_alone = not requests and not engine.memory.passes
        engine.lender.turn()
        engine.side.unpin_freed()
        pinned = set(engine.side.pins._blocks)
        is_reset = engine.scheduler.reset_prefix_cache()
        assert is_reset or set(engine.side.pins._blocks) == pinned, "taken back, and not reset"
        assert is_reset or not is_alone, "nothing but leases holds blocks, and it is not reset"
        if is_reset:
            assert not len(engine.side.pins), "what was lent before a reset is lent"
            for one in engine.lent:
                one.is_revoked = True
            if sleeps and is_alone:
                engine.begin_boot()

    # Clients and readers

    @precondition(lambda self: self.engine.lent)
    @rule(which=WHICH, num_claims=st.integers(1, 2))
    def claim(self, which: int, num_claims: int) -> None:
        for _ in range(num_claims):
            self.engine.claim(lent := self.pick(which), lent.ticket)

    @precondition(lambda self: self.engine.lent)
    @rule(which=WHICH)
    def change_ticket(self, which: int) -> None:
        """A client can write what it likes into a ticket."""
        lent, lender = self.pick(which), self.engine.lender
        changed = replace(lent.ticket, num_tokens=lent.ticket.num_tokens + 1)
        lender.turn()
        before = lender.sessions.num_lent
        assert not self.engine.claim(lent, changed), "a changed ticket was granted"
        self.engine.side.take_back_own(changed)
        lender.turn()
        assert lender.sessions.num_lent == before, "a changed ticket has ended a lease"

    @precondition(lambda self: self.engine.lent)
    @rule(which=WHICH)
    def bring_back(self, which: int) -> None:
        """A router has chosen one engine for both legs."""
        lent, lender = self.pick(which), self.engine.lender
        lender.turn()
        self.engine.side.unpin_freed()
        is_newest = not any(
            one.ticket.request_id == lent.ticket.request_id
            for one in self.engine.lent
            if one is not lent
        )
        self.engine.side.take_back_own(lent.ticket)
        lender.turn()
        name = lent.ticket.request_id
        if is_newest and not self.is_claimed(lent):
            assert not lender.sessions._leases.is_lent(name), f"{lent} came back, and is lent"

    @precondition(lambda self: self.engine.claims)
    @rule(which=WHICH, what=st.sampled_from(["renew", "confirm", "confirm", "give_up"]))
    def read(self, which: int, what: str) -> None:
        claims = self.engine.claims
        one: Claimed = claims[which % len(claims)]
        if what == "renew":
            self.engine.renew(one)
        elif what == "give_up":
            self.engine.give_up(one)
        elif self.engine.confirm(one):
            assert self.engine.is_intact(one.lent), f"{one.lent} is confirmed, and is not there"
            assert not one.lent.is_revoked, f"{one.lent} is confirmed after a reset"

    def is_claimed(self, lent: Lent) -> bool:
        return lent in [one.lent for one in self.engine.claims]

    def pick(self, which: int) -> Lent:
        newest = self.engine.lent[-4:]
        return newest[which % len(newest)]

    # Laws

    @invariant()
    def what_is_lent_is_in_use(self) -> None:
        engine = self.engine
        leases = engine.lender.sessions._leases
        assert min(block.ref_cnt for block in engine.pool.blocks) >= 0, "freed twice"
        for one in engine.lent:
            if one.is_revoked or not leases.is_lent(one.ticket.request_id):
                continue
            free = [block for block in listed(one) if engine.pool.blocks[block].ref_cnt < 1]
            assert not free, f"{free} of {one} are lent and free"

    @invariant()
    def what_a_reader_believes_is_lent(self) -> None:
        leases = self.engine.lender.sessions._leases
        for claim in self.engine.claims:
            if CLOCK() < claim.until and not claim.lent.is_revoked:
                assert leases.is_lent(claim.lent.ticket.request_id), f"{claim} was let down"

    @invariant()
    def children_share_what_is_not_about_to_end(self) -> None:
        newest = self.engine.lent[-1:]
        for one in newest:
            siblings = [
                other
                for other in self.engine.lent[:-1]
                if not other.is_revoked
                and parent_of(other.ticket.request_id) is not None
                and parent_of(other.ticket.request_id) == parent_of(one.ticket.request_id)
            ]
            live = [other for other in siblings if one.at - other.at < LEASE_S / 2]
            ended = self.engine.lender.sessions._leases
            live = [other for other in live if ended.is_lent(other.ticket.request_id)]
            assert not live, f"{one} is lent, beside {live}"

    def check_end(self) -> None:
        """Requests end, and time passes: every lease ends, and every block is free."""
        engine = self.engine
        for _ in range(60 * (1 + self.number)):
            if not engine.scheduler.requests and not engine.memory.passes:
                break
            CLOCK.advance(LEASE_S)
            self.go_on(1)
            engine.lender.turn()
        left = list(engine.scheduler.requests)
        assert not left, f"{left} wait for ever"
        CLOCK.advance(3 * LEASE_S)
        for _ in range(3):
            engine.lender.turn()
            self.go_on(1)
        tables = (
            engine.side.pins, engine.side.prefixes, engine.side._lent._digests,
            engine.side._lent._shared, engine.lender.sessions._leases,
        )  # fmt: skip
        assert [len(table) for table in tables] == [0] * len(tables), "entries of nothing"
        assert {block.ref_cnt for block in engine.pool.blocks[1:]} == {0}, "blocks are in use"
        assert engine.pool.get_num_free_blocks() == NUM_BLOCKS - 1

    def close(self) -> None:
        self.engine.close()


def listed(lent: Lent) -> tuple[int, ...]:
    """Blocks that a ticket names."""
    [blocks] = lent.ticket.blocks
    return tuple(block for block in blocks.ids if block)


@pytest.mark.hypothesis
def test_every_block_that_is_lent_is_freed_once_and_not_under_a_reader() -> None:
    holds(PrefillMachine, examples=60, steps=STEPS)


# What those laws notice


class NeverUnpins(Lending):
    """Hears that leases have ended, and keeps their blocks."""

    def unpin_freed(self) -> None:
        if self._lender is not None:
            self._lender.take_reports()


class UnpinsAtOnce(Lending):
    """Unpins what gives way, though readers may read it."""

    def _end_leases(self, requests: Iterable[str], *, if_unclaimed: bool = False) -> None:
        requests = list(requests)
        super()._end_leases(requests, if_unclaimed=if_unclaimed)
        for request_id in requests:
            if request_id in self.pins:
                self.pins.unpin_lease(request_id)
                self.pins.pin(request_id, (), pins_module.LeaseKind.PROMPT, self._clock())


class TrustsTickets(Lending):
    """Ends the lease that a ticket names, whatever else it says."""

    def take_back_own(self, ticket: Any) -> None:
        if self._lender is not None:
            self._lender.abort_lease(ticket.request_id)


class WaitsForReaders(Lending):
    """Takes back what is not being read, and leaves the rest: the reset finds blocks in use."""

    def take_back(self) -> None:
        if self._lender is not None and self.pins:
            self._lender.abort_all()
            self._falls_to_zero(lambda: len(self.pins))


class DeafToResets(Lending):
    """Takes nothing back."""

    def take_back(self) -> None:
        self.unpin_freed()


class KeepsItsOwn(Lending):
    """Leaves a ticket that came back to its lease."""

    def take_back_own(self, ticket: Any) -> None:
        pass


class TakesBackAlways(Lending):
    """Takes back what is lent before a reset that cannot be, since a request runs."""

    def take_back(self) -> None:
        if self._lender is not None:
            self.unpin_freed()
            self._lender.revoke_all()
            self._falls_to_zero(lambda: len(self.pins))


class UnpinsWhatExpired(Lending):
    """Keeps what its readers have given up until the lease would have ended."""

    def unpin_freed(self) -> None:
        if self._lender is None:
            return
        for report in self._lender.take_reports():
            if isinstance(report, FreedLease) and report.why == "expired":
                self.pins.unpin_lease(report.request)


BROKEN = (
    NeverUnpins, UnpinsAtOnce, TrustsTickets, WaitsForReaders, DeafToResets, KeepsItsOwn,
    TakesBackAlways, UnpinsWhatExpired,
)  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_the_laws_notice_a_side_that_breaks_them(
    broken: type[Lending], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(our_scheduler, "Lending", broken)
    notices(PrefillMachine, examples=EXAMPLES, steps=STEPS)


def test_they_notice_blocks_that_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a request that is over are free, and another request's soon."""
    monkeypatch.setattr(pins_module, "pin_blocks", lambda pool, numbers: [])
    notices(PrefillMachine, examples=EXAMPLES, steps=STEPS, what="lent and free")


def test_they_notice_a_block_that_two_leases_pin_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pin = pins_module.LeasePins.pin

    def once(self: Any, name: str, ids: Any, kind: Any, now: float) -> list[str]:
        new = [[block for block in of if block not in self._leases_of] for of in ids]
        return pin(self, name, new, kind, now)

    monkeypatch.setattr(pins_module.LeasePins, "pin", once)
    notices(PrefillMachine, examples=EXAMPLES, steps=STEPS)


def test_they_notice_children_that_share_a_lease_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forget(self: LentTickets, request_id: str) -> None:
        self._digests.pop(request_id, None)

    monkeypatch.setattr(LentTickets, "forget_ticket", forget)
    notices(PrefillMachine, examples=EXAMPLES, steps=STEPS)


def test_they_notice_blocks_that_are_unpinned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    unpin: Any = vars(pins_module)["unpin_blocks"]

    def twice(pool: Any, blocks: Any) -> None:
        unpin(pool, blocks)
        unpin(pool, blocks)

    monkeypatch.setattr(pins_module, "unpin_blocks", twice)
    notices(PrefillMachine, examples=EXAMPLES, steps=STEPS)


def test_they_notice_children_that_share_what_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or is about to."""
    found = LentTickets.find_shared
    monkeypatch.setattr(
        LentTickets,
        "find_shared",
        lambda self, request_id, prompt, now: found(self, request_id, prompt, 0.0),
    )
    notices(PrefillMachine, examples=EXAMPLES, steps=STEPS)


def test_they_notice_children_that_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LentTickets, "find_shared", lambda *_: None)
    notices(PrefillMachine, examples=EXAMPLES, steps=STEPS, what="beside")


def test_they_notice_pins_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeasePins, "unpin_all", lambda self: self._blocks.clear())
    unpin = LeasePins.unpin_lease
    monkeypatch.setattr(
        LeasePins,
        "unpin_lease",
        lambda self, request_id: None if parent_of(request_id) else unpin(self, request_id),
    )
    notices(PrefillMachine, examples=EXAMPLES, steps=STEPS)
