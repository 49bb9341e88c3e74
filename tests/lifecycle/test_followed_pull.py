"""Laws of a pull that follows a request: what is read when, and that nothing is believed early.

Its owner does as :class:`~pdconn.puller.pulls.Pulls` does: it posts reads, counts those in flight,
fails the machine when one of them fails, and settles it when there are none.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from pdconn.lifecycle.pull import (
    ENDED,
    AskChecksums,
    Effect,
    Patience,
    Pull,
    PullState,
    ReportFailed,
    ReportReceived,
    ReportReleased,
    SendClaim,
    SendConfirm,
    SendDone,
    SendRenew,
    StartRead,
)
from tests.property.scale import LawMachine, holds, notices

TTL_S = 9.0
PARK_S = 20.0
PATIENCE = Patience(claim_s=5.0, read_s=30.0, drain_s=2.0)
READS = st.sampled_from([1, 0, 2])
SETTLES = st.sampled_from([[None], [None, None], [], ["lost"], [None, "lost"]])
"""What becomes of reads in flight, of so many at most."""
EXAMPLES, STEPS = 300, 30
"""Orders of events until a broken pull is noticed, at most, and events of each."""


def held(verify: bool = False) -> Pull:
    """A pull of a stream whose claim is granted at 0.1 s."""
    pull = Pull(PATIENCE, 0.0, verify, follows=True)
    assert pull.greeted(0.0) == [SendClaim(1)]
    assert pull.granted(1, TTL_S, 0.1) == []
    return pull


def following() -> Pull:
    pull = held()
    assert pull.want(0.2) == [StartRead()]
    assert pull.state is PullState.FOLLOWING
    return pull


def test_each_announcement_is_read_and_the_last_read_is_confirmed() -> None:
    pull = following()
    assert pull.settled(0.3) == []
    assert pull.grew(1.0) == [StartRead()]
    assert pull.grew(1.5) == [StartRead()]
    assert pull.settled(1.6) == []
    assert pull.completed(2.0) == [StartRead()]
    assert pull.settled(2.1) == [SendConfirm(2)]
    assert pull.confirmed(2) == [ReportReceived()]


def test_what_is_complete_before_the_engine_has_blocks_is_read_as_with_a_ticket() -> None:
    pull = held()
    assert pull.grew(1.0) == []
    assert pull.completed(2.0) == []
    assert pull.want(3.0) == [StartRead()]
    assert pull.state is PullState.READING


def test_nothing_more_is_read_of_what_is_complete() -> None:
    pull = following()
    pull.completed(1.0)
    assert pull.grew(1.1) == []
    assert pull.completed(1.2) == []


def test_a_parked_claim_waits_for_its_request_and_then_for_a_grant() -> None:
    pull = Pull(PATIENCE, 0.0, follows=True)
    pull.greeted(0.0)
    pull.want(0.0)
    assert pull.parked(1, PARK_S, 0.1) == []
    assert pull.tick(PARK_S + PATIENCE.claim_s) == []
    assert pull.next_deadline() == pytest.approx(PARK_S + PATIENCE.claim_s + 0.1)
    silent = pull.tick(PARK_S + PATIENCE.claim_s + 0.2)
    assert [type(effect) for effect in silent] == [SendDone, ReportFailed]


def test_a_claim_that_was_parked_for_longer_than_it_holds_is_renewed_before_it_is_believed() -> (
    None
):
    pull = Pull(PATIENCE, 0.0, follows=True)
    pull.greeted(0.0)
    pull.want(0.0)
    pull.parked(1, PARK_S, 0.1)
    assert pull.granted(1, TTL_S, 12.0) == [SendRenew(2)]
    assert pull.granted(2, TTL_S, 12.1) == [StartRead()]


def test_only_the_claim_that_was_sent_is_parked() -> None:
    """A lender does not get a pull to wait by an answer to nothing."""
    pull = Pull(PATIENCE, 0.0, follows=True)
    pull.parked(1, PARK_S, 0.0)
    pull.greeted(0.0)
    pull.parked(7, PARK_S, 0.1)
    assert pull.next_deadline() == PATIENCE.claim_s
    known = held()
    known.parked(1, 1e9, 0.2)
    later = known.next_deadline()
    assert later is not None
    assert later <= TTL_S


@pytest.mark.parametrize("ttl_s", [1.0, PARK_S, 2.0**31 / 1000])
def test_a_lender_may_let_a_claim_wait_once_and_no_longer_than_a_read(ttl_s: float) -> None:
    """It may say 24 days in a message, and say so again."""
    pull, now = Pull(PATIENCE, 0.0, follows=True), 0.0
    pull.greeted(0.0)
    while pull.state is PullState.CLAIMING:
        assert now <= min(ttl_s, PATIENCE.read_s) + PATIENCE.claim_s
        pull.parked(1, ttl_s, now)
        now += 0.5
        pull.tick(now)
    assert pull.state is PullState.FAILED


@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_lender_that_announces_nothing_more_fails_the_pull(is_wanted: bool) -> None:
    """It answers renewals: its engine is stuck."""
    pull, now, seq = held(), 0.2, 1
    if is_wanted:
        pull.want(now)
    while pull.state not in (PullState.FAILED, PullState.DRAINING):
        deadline = pull.next_deadline()
        assert deadline is not None
        assert deadline <= now + PATIENCE.read_s
        now = deadline
        for effect in pull.tick(now):
            if isinstance(effect, SendRenew):
                seq = effect.seq
                pull.granted(seq, TTL_S, now)
    assert pull.reason == "prefill announced nothing in 30 s"
    assert now == pytest.approx(30.1, abs=0.2)


def test_the_owner_is_woken_when_blocks_are_to_be_asked_for() -> None:
    pull = held()
    pull.asks_at = 1.5
    assert pull.next_deadline() == 1.5
    pull.asks_at = 100.0
    deadline = pull.next_deadline()
    assert deadline is not None
    assert deadline <= TTL_S  # the claim does not wait for that


# In any order


class FollowingMachine(LawMachine):
    """A lender grants, announces, completes and falls silent; reads settle, and fail."""

    made: type[Pull] = Pull

    @initialize(verify=st.booleans(), is_parked=st.booleans(), is_wanted=st.booleans())
    def start(self, verify: bool, is_parked: bool, is_wanted: bool) -> None:
        self.now, self.verify = 0.0, verify
        self.pull = self.made(PATIENCE, 0.0, verify, follows=True)
        self.sent: dict[int, float] = {}
        self.held_until, self.reading, self.reads = -math.inf, 0, 0
        self.error: str | None = None
        self.is_complete = self.is_rest_read = self.is_verified = False
        self.asked: int | None = None
        self.received = self.failed = self.quarantined = self.released = self.left = 0
        self.perform(self.pull.greeted(0.0))
        if is_wanted:
            self.want(1)
        if is_parked:
            self.park()
            self.wait(9.5, is_heard=True)
        else:
            self.grant(0, 1)

    # What comes

    @precondition(lambda self: self.sent)
    @rule(back=st.sampled_from([0, 0, 1]), reads=READS)
    def grant(self, back: int, reads: int) -> None:
        """The lender answers the last message, or one before."""
        seq = max(1, max(self.sent) - back)
        self.reads = reads
        known = self.sent.get(seq, -math.inf) + TTL_S
        self.held_until = max(self.held_until, known)
        self.perform(self.pull.granted(seq, TTL_S, self.now))

    @rule()
    def park(self) -> None:
        self.perform(self.pull.parked(1, PARK_S, self.now))

    @rule(reads=READS)
    def want(self, reads: int) -> None:
        if not self.pull.wanted:
            self.reads = reads
            self.perform(self.pull.want(self.now))

    @rule(reads=READS, settles=SETTLES)
    def announce(self, reads: int, settles: list[str | None]) -> None:
        is_due = self.pull.state is PullState.FOLLOWING
        self.reads = reads
        effects = self.pull.grew(self.now)
        assert effects == ([StartRead()] if is_due else []), "announced, and not read"
        self.perform(effects)
        self.settle_some(settles)

    @precondition(lambda self: 1 in self.sent)
    @rule(reads=READS, settles=SETTLES)
    def complete(self, reads: int, settles: list[str | None]) -> None:
        self.is_complete, self.reads = True, reads
        self.perform(self.pull.completed(self.now))
        self.settle_some(settles)

    @rule(settles=SETTLES)
    def settle_some(self, settles: list[str | None]) -> None:
        for error in settles[: self.reading]:
            self.settle(error)

    def settle(self, error: str | None) -> None:
        self.reading -= 1
        if error is not None:
            self.error = error
            self.pull.fail(error, self.now)
        self.perform([] if self.reading else self.pull.settled(self.now))

    @rule(problem=st.sampled_from([None, None, None, "differs"]))
    def compare(self, problem: str | None) -> None:
        self.is_verified = self.is_verified or problem is None
        self.perform(self.pull.verified(problem, self.now))

    @rule(seq=st.integers(0, 4))
    def confirm(self, seq: int) -> None:
        """The lender confirms what it was asked (0), or something else."""
        is_asked = seq in (0, self.asked)
        seq = seq or self.asked or 0
        effects = self.pull.confirmed(seq)
        assert is_asked or not effects, "believes what it did not ask"
        self.perform(effects)

    @rule(
        seconds=st.sampled_from([0.1, 1.0, 3.0, 9.5]), is_heard=st.sampled_from([True, True, False])
    )
    def wait(self, seconds: float, is_heard: bool) -> None:
        """Time passes; the lender answers what the pull sends then, or does not."""
        self.now += seconds
        self.perform(self.pull.tick(self.now))
        if is_heard:
            self.grant(0, 1)

    @rule(how=st.sampled_from([None] * 8 + ["fail", "abandon"]))
    def give_up(self, how: str | None) -> None:
        if how is not None:
            end = self.pull.abandon if how == "abandon" else self.pull.fail
            self.perform(end("asked to", self.now))

    # What the pull asks for

    def perform(self, effects: list[Effect]) -> None:
        effects = effects or self.settle_idle()
        while effects:
            following: list[Effect] = []
            for effect in effects:
                following += self.perform_one(effect)
            effects = following or self.settle_idle()

    def settle_idle(self) -> list[Effect]:
        is_over = self.pull.state in (PullState.DRAINING, PullState.QUARANTINED)
        return self.pull.settled(self.now) if is_over and not self.reading else []

    def perform_one(self, effect: Effect) -> list[Effect]:
        if isinstance(effect, SendClaim | SendRenew):
            self.sent[effect.seq] = self.now
        elif isinstance(effect, StartRead):
            return self.read()
        elif isinstance(effect, AskChecksums):
            self.check_read()
        elif isinstance(effect, SendConfirm):
            self.check_read()
            assert self.is_verified or not self.verify, "confirmed, and not compared"
            self.asked = effect.seq
        elif isinstance(effect, SendDone):
            self.left += 1
        elif isinstance(effect, ReportReceived):
            self.received += 1
        elif isinstance(effect, ReportFailed):
            assert effect.quarantined or not self.reading, "reported under a read"
            self.failed += 1
            self.quarantined += effect.quarantined
        elif isinstance(effect, ReportReleased):
            assert not self.reading, "released under a read"
            self.released += 1
        return []

    def read(self) -> list[Effect]:
        assert self.pull.wanted, "read without blocks"
        assert self.now < self.held_until, "read without a claim"
        assert self.error is None, "read after an error"
        assert not self.is_rest_read, "read after the rest"
        self.is_rest_read = self.is_complete
        self.reading += self.reads
        return [] if self.reading else self.pull.settled(self.now)

    def check_read(self) -> None:
        assert self.is_complete, "believed before all is announced"
        assert self.is_rest_read, "believed before all is read"
        assert self.error is None, "believed after an error"
        assert not self.reading, "believed under a read"
        assert self.now < self.held_until, "believed after the claim"

    # Laws

    @invariant()
    def one_report_at_most(self) -> None:
        assert self.received + self.failed <= 1, "reported twice"
        assert self.pull.wanted or not self.received + self.failed, "reported to nobody"
        assert self.released <= self.quarantined <= self.failed
        assert self.left <= 1, "left twice"

    @invariant()
    def what_waits_is_woken(self) -> None:
        state = self.pull.state
        is_over = state in ENDED or state is PullState.QUARANTINED
        assert (self.pull.next_deadline() is None) == is_over

    def check_end(self) -> None:
        """The lender answers renewals, and announces nothing; reads settle."""
        for _ in range(60):
            while self.reading:
                self.settle(None)
            if not self.pull.wanted:
                self.give_up("fail")
            if (deadline := self.pull.next_deadline()) is None:
                break
            self.now = max(self.now, deadline)
            self.perform(self.pull.tick(self.now))
            self.grant(0, 0)
        assert self.pull.state in ENDED, f"it is {self.pull.state} for ever"
        assert self.received + self.failed == self.pull.wanted, "the engine is not answered"
        assert self.released == self.quarantined, "blocks are quarantined for ever"
        assert self.left == (self.pull.state is PullState.FAILED), "the lender is not told"


@pytest.mark.hypothesis
def test_what_is_followed_is_received_once_and_only_what_was_announced_read_and_confirmed() -> None:
    holds(FollowingMachine, examples=500, steps=STEPS)


# What those laws notice


class BelievesIncrements(Pull):
    """Takes the end of an increment for the end of the read."""

    def settled(self, now: float) -> list[Effect]:
        if self.state is PullState.FOLLOWING:
            self.state = PullState.READING
        return super().settled(now)


class FailsUnderReads(Pull):
    """Reports a failure while what was announced is being read."""

    def fail(self, reason: str, now: float, notify: bool = True) -> list[Effect]:
        if self.state is PullState.FOLLOWING:
            self.state, self._reason = PullState.FAILED, reason
            return [SendDone(), ReportFailed(reason)]
        return super().fail(reason, now, notify)


class ReadsOnAfterErrors(Pull):
    """Leaves an increment that failed to the end."""

    def fail(self, reason: str, now: float, notify: bool = True) -> list[Effect]:
        is_left = self.state is PullState.FOLLOWING and reason == "lost"
        return [] if is_left else super().fail(reason, now, notify)


class WaitsForEver(Pull):
    """Follows a lender that renews and announces nothing."""

    def _tick_claim(self, now: float) -> list[Effect]:
        if not self.is_complete:
            self._wait_until = math.inf
        return super()._tick_claim(now)


class BelievesLateGrants(Pull):
    """Counts the time of a parked claim from its grant."""

    def granted(self, seq: int, ttl_s: float, now: float) -> list[Effect]:
        if self._is_parked and seq in self._sent:
            self._sent[seq] = now
        return super().granted(seq, ttl_s, now)


class ReadsBeforeItHasBlocks(Pull):
    """Reads what is complete, whether or not the engine has blocks for it."""

    def completed(self, now: float) -> list[Effect]:
        is_held = self.state is PullState.HELD and now < self._deadline
        return super().completed(now) or ([StartRead()] if is_held else [])


class ForgetsTheRest(Pull):
    """Reads nothing more once all is announced."""

    def completed(self, now: float) -> list[Effect]:
        super().completed(now)
        return []


class SkipsAnnouncements(Pull):
    """Reads only the first and the last announcement."""

    def grew(self, now: float) -> list[Effect]:
        super().grew(now)
        return []


BROKEN = {
    BelievesIncrements: "believed before all is announced",
    FailsUnderReads: "reported under a read",
    ReadsOnAfterErrors: "read after an error",
    WaitsForEver: "for ever",
    BelievesLateGrants: "read without a claim",
    ReadsBeforeItHasBlocks: "read without blocks",
    ForgetsTheRest: "believed before all is read",
    SkipsAnnouncements: "announced, and not read",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_laws_notice_a_pull_that_breaks_them(broken: type[Pull]) -> None:
    machine = type("Machine", (FollowingMachine,), {"made": broken})
    notices(machine, examples=EXAMPLES, steps=STEPS, what=BROKEN[broken])
