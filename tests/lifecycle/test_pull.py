"""Laws of a pull: what is reported, when, and what the lender is sent."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdconn.lifecycle.pull import (
    TRANSITIONS,
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

TTL_S = 9.0
PATIENCE = Patience(claim_s=5.0, drain_s=2.0)


def reading(now: float = 0.0, verify: bool = False) -> Pull:
    """A pull whose read is under way, claimed at ``now``."""
    pull = Pull(PATIENCE, now, verify)
    assert pull.greeted(now) == [SendClaim(1)]
    assert pull.want(now) == []
    assert pull.granted(1, TTL_S, now + 0.1) == [StartRead()]
    return pull


def test_a_pull_that_settles_in_time_is_received() -> None:
    pull = reading()
    assert pull.settled(8.99) == [SendConfirm(2)]
    assert pull.confirmed(2) == [ReportReceived()]
    assert pull.state is PullState.DONE


def test_nothing_is_received_until_the_lender_confirms_it() -> None:
    """A reader's clock may have stood still while the lender's ran."""
    pull = reading()
    assert pull.settled(1.0) == [SendConfirm(2)]
    assert pull.granted(1, TTL_S, 1.1) == []
    assert pull.confirmed(1) == []
    assert pull.tick(5.9) == []
    assert pull.tick(6.0) == [SendDone(), ReportFailed("the read was not confirmed")]
    assert pull.confirmed(2) == []


def test_a_read_that_the_lender_does_not_confirm_is_failed() -> None:
    pull = reading()
    pull.settled(1.0)
    assert pull.fail("refused, expired", 1.1) == [SendDone(), ReportFailed("refused, expired")]


def test_a_confirmation_that_was_not_asked_for_is_ignored() -> None:
    """A lender cannot make a reader believe a read that has not settled."""
    pull = reading()
    for seq in (0, 1, 2):
        assert pull.confirmed(seq) == []
    assert pull.state is PullState.READING


def test_a_read_that_settles_after_its_deadline_is_failed() -> None:
    """The deadline counts from sending the claim, not from hearing of the grant."""
    pull = reading()
    effects = pull.settled(9.0)
    assert effects[0] == SendDone()
    assert isinstance(effects[1], ReportFailed)
    assert "after the claim expired" in effects[1].reason


def test_a_renewal_moves_the_deadline() -> None:
    pull = reading()
    assert pull.tick(3.0) == [SendRenew(2)]
    assert pull.granted(2, TTL_S, 3.1) == []
    assert pull.settled(11.9) == [SendConfirm(3)]
    assert pull.confirmed(3) == [ReportReceived()]


def test_an_unanswered_renewal_does_not_move_the_deadline() -> None:
    pull = reading()
    assert pull.tick(3.0) == [SendRenew(2)]
    assert not isinstance(pull.settled(9.5)[0], SendConfirm)


def test_an_answer_to_an_older_message_counts_from_that_message() -> None:
    pull = reading()
    pull.tick(3.0)
    pull.tick(5.0)
    assert pull.granted(2, TTL_S, 6.0) == []
    assert not isinstance(pull.settled(12.5)[0], SendConfirm)


def test_answers_out_of_the_blue_are_ignored() -> None:
    pull = reading()
    assert pull.granted(77, 1e9, 1.0) == []
    assert not isinstance(pull.settled(10.0)[0], SendConfirm)


def test_a_claim_is_kept_while_the_request_queues() -> None:
    pull = Pull(PATIENCE, 0.0)
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
    pull = Pull(PATIENCE, 0.0)
    pull.greeted(0.0)
    pull.granted(1, TTL_S, 0.1)
    assert pull.tick(9.0) == [SendDone()]
    [failed] = pull.want(9.5)
    assert isinstance(failed, ReportFailed)


def test_no_answer_to_the_claim_is_a_failure() -> None:
    pull = Pull(PATIENCE, 0.0)
    pull.want(0.0)
    pull.greeted(0.0)
    assert pull.tick(4.9) == []
    assert [type(effect) for effect in pull.tick(5.0)] == [SendDone, ReportFailed]


def test_nothing_is_reported_while_a_read_can_still_write() -> None:
    pull = reading()
    assert pull.fail("the lender refused a renewal", 1.0) == []
    assert pull.state is PullState.DRAINING
    assert pull.fail("again", 1.0) == []
    assert pull.settled(2.0) == [
        SendDone(),
        ReportFailed("the lender refused a renewal"),
    ]


def test_a_read_that_hangs_ends_in_quarantine_and_is_released_when_it_settles() -> None:
    pull = reading()
    assert pull.tick(3.0) == [SendRenew(2)]
    assert pull.tick(9.0) == []  # the claim is over, the read is not
    assert pull.tick(10.9) == []
    [failed] = pull.tick(11.0)
    assert isinstance(failed, ReportFailed)
    assert failed.quarantined
    assert pull.next_deadline() is None
    assert pull.settled(60.0) == [SendDone(), ReportReleased()]
    assert pull.state is PullState.FAILED


def test_a_grant_that_arrives_after_its_own_time_grants_nothing() -> None:
    pull = Pull(PATIENCE, 0.0)
    pull.greeted(0.0)
    pull.want(0.0)
    [done, failed] = pull.granted(1, 1.0, 1.0)
    assert done == SendDone()
    assert isinstance(failed, ReportFailed)


def test_what_was_read_is_received_only_with_its_checksum() -> None:
    pull = reading(verify=True)
    assert pull.settled(1.0) == [AskChecksums()]
    assert pull.verified(None, 2.0) == [SendConfirm(2)]
    assert pull.confirmed(2) == [ReportReceived()]
    pull = reading(verify=True)
    pull.settled(1.0)
    assert pull.verified("differs", 2.0) == [SendDone(), ReportFailed("differs")]
    assert pull.verified(None, 3.0) == []
    pull = reading(verify=True)
    pull.settled(1.0)
    assert pull.tick(5.9) == [SendRenew(2)]
    assert pull.tick(6.0) == [SendDone(), ReportFailed("no checksum of what was lent")]


def test_a_claim_is_renewed_while_checksums_are_computed() -> None:
    """Otherwise a pull that verifies for longer than a lease is never confirmed."""
    pull = reading(verify=True)
    assert pull.settled(1.0) == [AskChecksums()]
    assert pull.answered(1.5) == []
    assert pull.next_deadline() == 3.0
    assert pull.tick(3.0) == [SendRenew(2)]
    assert pull.granted(2, TTL_S, 3.1) == []
    assert pull.verified(None, 11.0) == [SendConfirm(3)]


def test_a_late_read_is_not_worth_a_checksum() -> None:
    assert AskChecksums() not in reading(verify=True).settled(9.0)


def test_a_failure_before_the_engine_asks_is_kept_for_when_it_does() -> None:
    pull = Pull(PATIENCE, 0.0)
    assert pull.fail("refused", 0.0) == [SendDone()]
    assert pull.want(1.0) == [ReportFailed("refused")]


def test_a_lost_peer_is_sent_nothing() -> None:
    pull = Pull(PATIENCE, 0.0)
    pull.want(0.0)
    assert pull.fail("gone", 0.0, notify=False) == [ReportFailed("gone")]


def test_every_state_but_the_last_two_can_be_left() -> None:
    leaving = {state for state, _ in TRANSITIONS}
    assert {state for state in PullState if state not in leaving} == {
        PullState.DONE,
        PullState.FAILED,
    }


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["greeted", "granted", "want", "settled", "error", "confirmed", "fail", "tick"]
        ),
        st.integers(1, 4),
        st.floats(0, 6, allow_nan=False),
    ),
    max_size=30,
)


@settings(max_examples=400)
@given(_EVENTS)
def test_reported_at_most_once_and_only_what_was_verified(events) -> None:  # type: ignore[no-untyped-def]
    """Law 4, against a plain record of what was sent and granted."""
    pull, now = Pull(Patience(100.0, 2.0), 0.0), 0.0
    sent: dict[int, float] = {}
    good_until, reports, in_flight, released = 0.0, [], False, 0
    asked: int | None = None

    def apply(effects: list[Effect]) -> None:
        nonlocal in_flight, released, asked
        for effect in effects:
            if isinstance(effect, (SendClaim, SendRenew)):
                sent[effect.seq] = now
            elif isinstance(effect, StartRead):
                in_flight = True
            elif isinstance(effect, SendConfirm):
                assert event == "settled"
                assert now < good_until
                asked = effect.seq
            elif isinstance(effect, (ReportReceived, ReportFailed)):
                if isinstance(effect, ReportReceived):
                    assert (event, seq) == ("confirmed", asked)
                assert in_flight == (isinstance(effect, ReportFailed) and effect.quarantined)
                reports.append(effect)
            elif isinstance(effect, ReportReleased):
                assert not in_flight
                released += 1

    for event, seq, wait in events:
        now += wait
        if event == "greeted":
            apply(pull.greeted(now))
        elif event == "granted":
            if seq in sent:
                good_until = max(good_until, sent[seq] + TTL_S)
            apply(pull.granted(seq, TTL_S, now))
        elif event == "want":
            apply(pull.want(now))
        elif event in ("settled", "error") and in_flight:
            in_flight = False
            if event == "error":
                apply(pull.fail("broken", now))
            apply(pull.settled(now))
        elif event == "confirmed":
            apply(pull.confirmed(seq))
        elif event == "fail":
            apply(pull.fail("asked to", now))
        elif event == "tick":
            apply(pull.tick(now))
    assert sum(isinstance(report, ReportReceived) for report in reports) <= 1
    quarantined = sum(isinstance(report, ReportFailed) and report.quarantined for report in reports)
    assert released == (quarantined if not in_flight else 0)
    assert len({type(report) for report in reports}) <= 1
