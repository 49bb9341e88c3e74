"""Laws of a pull: what is reported, when, and what the lender hears."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdconn.lifecycle.pull import (
    TRANSITIONS,
    Effect,
    Failed,
    Pull,
    PullState,
    Received,
    SendClaim,
    SendDone,
    SendRenew,
    StartRead,
)

TTL_S = 9.0


def reading(now: float = 0.0) -> Pull:
    """A pull whose read is under way, claimed at ``now``."""
    pull = Pull(claim_timeout_s=5.0, now=now)
    assert pull.greeted(now) == [SendClaim(1)]
    assert pull.want(now) == []
    assert pull.granted(1, TTL_S, now + 0.1) == [StartRead()]
    return pull


def test_a_pull_that_settles_in_time_is_received() -> None:
    pull = reading()
    assert pull.settled(None, 8.99) == [SendDone(ok=True), Received()]
    assert pull.state is PullState.DONE


def test_a_read_that_settles_after_its_deadline_is_failed() -> None:
    """The deadline counts from sending the claim, not from hearing of the grant."""
    pull = reading()
    effects = pull.settled(None, 9.0)
    assert effects[0] == SendDone(ok=False)
    assert isinstance(effects[1], Failed)
    assert "after the claim was over" in effects[1].reason


def test_a_renewal_moves_the_deadline() -> None:
    pull = reading()
    assert pull.tick(3.0) == [SendRenew(2)]
    assert pull.granted(2, TTL_S, 3.1) == []
    assert pull.settled(None, 11.9) == [SendDone(ok=True), Received()]


def test_an_unanswered_renewal_does_not_move_the_deadline() -> None:
    pull = reading()
    assert pull.tick(3.0) == [SendRenew(2)]
    assert Received() not in pull.settled(None, 9.5)


def test_an_answer_to_an_older_message_counts_from_that_message() -> None:
    pull = reading()
    pull.tick(3.0)
    pull.tick(5.0)
    assert pull.granted(2, TTL_S, 6.0) == []
    assert Received() not in pull.settled(None, 12.5)


def test_answers_out_of_the_blue_are_ignored() -> None:
    pull = reading()
    assert pull.granted(77, 1e9, 1.0) == []
    assert Received() not in pull.settled(None, 10.0)


def test_a_claim_is_kept_while_the_request_queues() -> None:
    pull = Pull(claim_timeout_s=5.0, now=0.0)
    pull.greeted(0.0)
    pull.granted(1, TTL_S, 0.1)
    now, seq = 0.0, 1
    for _ in range(20):
        deadline = pull.next_deadline()
        assert deadline is not None
        now, seq = deadline, seq + 1
        assert pull.tick(now) == [SendRenew(seq)]
        pull.granted(seq, TTL_S, now + 0.01)
    assert pull.want(now) == [StartRead()]


def test_a_claim_that_cannot_be_renewed_fails_before_reading() -> None:
    pull = Pull(claim_timeout_s=5.0, now=0.0)
    pull.greeted(0.0)
    pull.granted(1, TTL_S, 0.1)
    assert pull.tick(9.0) == [SendDone(ok=False)]
    [failed] = pull.want(9.5)
    assert isinstance(failed, Failed)


def test_no_answer_to_the_claim_is_a_failure() -> None:
    pull = Pull(claim_timeout_s=5.0, now=0.0)
    pull.want(0.0)
    pull.greeted(0.0)
    assert pull.tick(4.9) == []
    assert [type(effect) for effect in pull.tick(5.0)] == [SendDone, Failed]


def test_nothing_is_reported_while_a_read_can_still_write() -> None:
    pull = reading()
    assert pull.fail("the lender refused a renewal") == []
    assert pull.state is PullState.DRAINING
    assert pull.fail("again") == []
    assert pull.settled(None, 2.0) == [
        SendDone(ok=False),
        Failed("the lender refused a renewal"),
    ]


def test_a_failure_before_the_engine_asks_is_kept_for_when_it_does() -> None:
    pull = Pull(claim_timeout_s=5.0, now=0.0)
    assert pull.fail("refused") == [SendDone(ok=False)]
    assert pull.want(1.0) == [Failed("refused")]


def test_a_lost_peer_is_not_told() -> None:
    pull = Pull(claim_timeout_s=5.0, now=0.0)
    pull.want(0.0)
    assert pull.fail("gone", tell=False) == [Failed("gone")]


def test_every_state_but_the_last_two_can_be_left() -> None:
    leaving = {state for state, _ in TRANSITIONS}
    assert {state for state in PullState if state not in leaving} == {
        PullState.DONE,
        PullState.FAILED,
    }


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["greeted", "granted", "want", "settled", "error", "fail", "tick"]),
        st.integers(1, 4),
        st.floats(0, 6, allow_nan=False),
    ),
    max_size=30,
)


@settings(max_examples=400, deadline=None)
@given(_EVENTS)
def test_reported_at_most_once_and_only_what_was_proven(events) -> None:  # type: ignore[no-untyped-def]
    """Law 4, against a plain record of what was sent and granted."""
    pull, now = Pull(claim_timeout_s=100.0, now=0.0), 0.0
    sent: dict[int, float] = {}
    good_until, reports, in_flight = 0.0, [], False

    def heed(effects: list[Effect]) -> None:
        nonlocal in_flight
        for effect in effects:
            if isinstance(effect, (SendClaim, SendRenew)):
                sent[effect.seq] = now
            elif isinstance(effect, StartRead):
                in_flight = True
            elif isinstance(effect, (Received, Failed)):
                assert not in_flight
                reports.append(effect)

    for event, seq, wait in events:
        now += wait
        if event == "greeted":
            heed(pull.greeted(now))
        elif event == "granted":
            if seq in sent:
                good_until = max(good_until, sent[seq] + TTL_S)
            heed(pull.granted(seq, TTL_S, now))
        elif event == "want":
            heed(pull.want(now))
        elif event in ("settled", "error") and in_flight:
            in_flight = False
            heed(pull.settled(None if event == "settled" else "broken", now))
            if reports and isinstance(reports[-1], Received):
                assert event == "settled"
                assert now < good_until
        elif event == "fail":
            heed(pull.fail("told to"))
        elif event == "tick":
            heed(pull.tick(now))
    assert sum(isinstance(report, Received) for report in reports) <= 1
    assert len({type(report) for report in reports}) <= 1
