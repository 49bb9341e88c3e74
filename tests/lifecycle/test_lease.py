"""Laws of a lease: which readers may read, for how long, and when the blocks are free again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdconn.lifecycle.lease import (
    MAX_PULLS,
    Denied,
    Freed,
    FreedLease,
    Grant,
    Lease,
    LeaseOffer,
    LeaseState,
    LeaseTable,
)
from pdconn.protocol.messages import Reader, RefusalReason

BLOCKS = b"digest"


def lease(ttl_s: float = 10.0, max_pulls: int = MAX_PULLS) -> Lease:
    return Lease(LeaseOffer("r", BLOCKS, ttl_s, 0.0), max_pulls)


def refusal(answer: Grant | Denied) -> RefusalReason:
    assert isinstance(answer, Denied), answer
    return answer.why


def test_lease_is_freed_once_every_reader_is_done() -> None:
    lent = lease()
    readers = [Reader("p", rank, 3) for rank in range(3)]
    for reader in readers:
        assert lent.claim(reader, BLOCKS, 1.0) == Grant(10.0)
    for reader in readers[:2]:
        lent.done(reader, BLOCKS, 2.0)
        assert lent.freed is None
    lent.done(readers[2], BLOCKS, 2.0)
    assert lent.freed is Freed.READ


def test_repeated_reports_are_harmless() -> None:
    lent = lease()
    for _ in range(3):
        lent.done(Reader("p", 0, 2), BLOCKS, 1.0)
    assert lent.freed is None
    lent.done(Reader("p", 1, 2), BLOCKS, 1.0)
    assert lent.freed is Freed.READ


def test_a_reader_that_never_claimed_may_give_the_lease_up() -> None:
    lent = lease()
    lent.done(Reader("p", 0, 1), BLOCKS, 1.0)
    assert lent.freed is Freed.READ


def test_lease_expires_without_a_claim() -> None:
    lent = lease()
    lent.expire(9.99)
    assert lent.freed is None
    lent.expire(10.0)
    assert lent.freed is Freed.EXPIRED


def test_a_claim_keeps_the_blocks_for_its_whole_time() -> None:
    lent = lease()
    lent.claim(Reader("p", 0, 1), BLOCKS, 9.0)
    lent.expire(18.9)
    assert lent.freed is None
    lent.expire(19.0)
    assert lent.freed is Freed.EXPIRED


def test_blocks_stay_while_another_pull_may_still_believe_its_claim() -> None:
    lent = lease()
    lent.claim(Reader("a", 0, 1), BLOCKS, 1.0)
    lent.claim(Reader("b", 0, 1), BLOCKS, 5.0)
    lent.done(Reader("a", 0, 1), BLOCKS, 6.0)
    assert lent.state is LeaseState.CLOSING
    assert refusal(lent.claim(Reader("c", 0, 1), BLOCKS, 6.0)) is RefusalReason.CONSUMED
    lent.expire(14.9)
    assert lent.freed is None
    lent.expire(15.0)
    assert lent.freed is Freed.READ


def test_abort_waits_for_claims_that_hold() -> None:
    lent = lease()
    lent.claim(Reader("a", 0, 1), BLOCKS, 1.0)
    lent.abort(2.0)
    assert lent.freed is None
    lent.done(Reader("a", 0, 1), BLOCKS, 3.0)
    assert lent.freed is Freed.ABORTED


def test_abort_frees_at_once_without_a_claim() -> None:
    lent = lease()
    lent.abort(2.0)
    assert lent.freed is Freed.ABORTED


def test_a_claim_for_other_blocks_is_refused() -> None:
    assert refusal(lease().claim(Reader("p", 0, 1), b"other", 1.0)) is RefusalReason.ALTERED


def test_a_rank_that_is_done_cannot_claim_again() -> None:
    lent = lease()
    lent.done(Reader("p", 0, 2), BLOCKS, 1.0)
    assert refusal(lent.claim(Reader("p", 0, 2), BLOCKS, 1.0)) is RefusalReason.CONSUMED


def test_ranks_of_one_pull_must_agree_on_their_number() -> None:
    lent = lease()
    lent.claim(Reader("p", 0, 2), BLOCKS, 1.0)
    assert refusal(lent.claim(Reader("p", 1, 4), BLOCKS, 1.0)) is RefusalReason.BAD_READER


def test_a_lease_admits_so_many_pulls_and_no_more() -> None:
    lent = lease(max_pulls=2)
    for pull in "pq":
        assert lent.claim(Reader(pull, 0, 2), BLOCKS, 1.0) == Grant(10.0)
    assert lent.claim(Reader("x", 0, 1), BLOCKS, 1.0) == Denied(
        RefusalReason.TOO_MANY, "2 pulls have claimed this lease"
    )
    lent.done(Reader("x", 0, 1), BLOCKS, 1.0)
    assert lent.state is LeaseState.HELD
    assert lent.claim(Reader("p", 1, 2), BLOCKS, 1.0) == Grant(10.0)
    assert lent.renew(Reader("q", 0, 2), 2.0) == Grant(10.0)


def test_only_a_claim_that_holds_can_be_renewed() -> None:
    lent = lease()
    assert refusal(lent.renew(Reader("p", 0, 1), 1.0)) is RefusalReason.EXPIRED
    lent.claim(Reader("p", 0, 1), BLOCKS, 1.0)
    lent.claim(Reader("q", 0, 1), BLOCKS, 8.0)
    assert lent.renew(Reader("p", 0, 1), 10.0) == Grant(10.0)
    assert refusal(lent.renew(Reader("p", 0, 1), 20.5)) is RefusalReason.EXPIRED


def test_a_claim_is_confirmed_once_and_is_done_then() -> None:
    lent, reader = lease(), Reader("p", 0, 1)
    lent.claim(reader, BLOCKS, 1.0)
    assert lent.confirm(reader, BLOCKS, 2.0) is None
    assert lent.freed is Freed.READ
    again = lent.confirm(reader, BLOCKS, 2.0)
    assert again is not None
    assert again.why is RefusalReason.CONSUMED


@pytest.mark.parametrize(
    ("reader", "ticket", "why"),
    [
        (Reader("q", 0, 2), BLOCKS, RefusalReason.EXPIRED),
        (Reader("p", 1, 2), BLOCKS, RefusalReason.EXPIRED),
        (Reader("p", 0, 3), BLOCKS, RefusalReason.EXPIRED),
        (Reader("p", 0, 2), b"another", RefusalReason.ALTERED),
    ],
    ids=["another pull", "a rank without a claim", "another number of ranks", "another ticket"],
)
def test_only_a_claim_is_confirmed(reader: Reader, ticket: bytes, why: RefusalReason) -> None:
    lent = lease()
    lent.claim(Reader("p", 0, 2), BLOCKS, 1.0)
    denied = lent.confirm(reader, ticket, 2.0)
    assert denied is not None
    assert denied.why is why
    assert lent.is_claimed(Reader("p", 0, 2), 2.0)


def test_an_expired_claim_is_confirmed_while_the_blocks_were_not_given_back() -> None:
    lent, slow, other = lease(), Reader("p", 0, 1), Reader("q", 0, 1)
    lent.claim(slow, BLOCKS, 1.0)
    lent.claim(other, BLOCKS, 9.0)
    lent.expire(15.0)
    assert refusal(lent.renew(slow, 15.0)) is RefusalReason.EXPIRED
    assert lent.confirm(slow, BLOCKS, 15.0) is None


def test_a_revoked_lease_is_free_at_once_and_grants_and_confirms_nothing() -> None:
    table, reader = LeaseTable(), Reader("p", 0, 1)
    for name in "abc":
        table.add_lease(LeaseOffer(name, BLOCKS, 10.0, 0.0))
    table.claim_lease("a", reader, BLOCKS, 1.0)
    assert table.abort_all(2.0) == [FreedLease(name, Freed.ABORTED) for name in "bc"]
    assert table.renew_lease("a", reader, 2.5) == Grant(10.0)
    assert table.revoke_all() == [FreedLease("a", Freed.ABORTED)]
    for name in "abc":
        assert refusal(table.claim_lease(name, reader, BLOCKS, 3.0)) is RefusalReason.ABORTED
        assert refusal(table.renew_lease(name, reader, 3.0)) is RefusalReason.ABORTED
        denied, freed = table.confirm_lease(name, reader, BLOCKS, 3.0)
        assert denied is not None
        assert denied.why is RefusalReason.ABORTED
        assert freed == []
    assert table.next_expiry() is None


def test_time_to_live_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"ttl_s: expected 0\.001 or more, got 0"):
        LeaseOffer("r", BLOCKS, 0, 0.0)


def test_the_table_says_how_a_lease_ended() -> None:
    table = LeaseTable()
    reader = Reader("p", 0, 1)
    assert refusal(table.claim_lease("r", reader, BLOCKS, 0.0)) is RefusalReason.UNKNOWN
    table.add_lease(LeaseOffer("r", BLOCKS, 10.0, 0.0))
    assert table.end_claim("r", reader, BLOCKS, 1.0) == [FreedLease("r", Freed.READ)]
    assert refusal(table.claim_lease("r", reader, BLOCKS, 1.0)) is RefusalReason.CONSUMED
    assert table.end_claim("r", reader, BLOCKS, 1.0) == []
    table.add_lease(LeaseOffer("s", BLOCKS, 10.0, 1.0))
    assert table.free_expired(11.0) == [FreedLease("s", Freed.EXPIRED)]
    assert refusal(table.claim_lease("s", reader, BLOCKS, 11.0)) is RefusalReason.EXPIRED
    assert table.next_expiry() is None


def test_one_request_has_one_lease() -> None:
    table = LeaseTable()
    table.add_lease(LeaseOffer("r", BLOCKS, 10.0, 0.0))
    with pytest.raises(ValueError, match="has a lease already"):
        table.add_lease(LeaseOffer("r", BLOCKS, 10.0, 0.0))


def test_renewed_leases_do_not_hold_up_others() -> None:
    """A lease behind a renewed one in the timer queue still expires (vLLM issue 58222)."""
    table = LeaseTable()
    table.add_lease(LeaseOffer("renewed", BLOCKS, 10.0, 0.0))
    table.add_lease(LeaseOffer("silent", BLOCKS, 10.0, 0.1))
    table.claim_lease("renewed", Reader("p", 0, 1), BLOCKS, 9.0)
    assert table.free_expired(10.1) == [FreedLease("silent", Freed.EXPIRED)]


def test_the_table_forgets_old_endings() -> None:
    table = LeaseTable(remember=2)
    for name in "abc":
        table.add_lease(LeaseOffer(name, BLOCKS, 1.0, 0.0))
        table.abort_lease(name, 0.0)
    assert refusal(table.claim_lease("a", Reader("p", 0, 1), BLOCKS, 0.0)) is RefusalReason.UNKNOWN
    assert refusal(table.claim_lease("c", Reader("p", 0, 1), BLOCKS, 0.0)) is RefusalReason.ABORTED


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "renew", "confirm", "done", "abort", "revoke", "tick"]),
        st.sampled_from("pq"),
        st.integers(0, 1),
        st.floats(0, 8, allow_nan=False),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(_STEPS)
def test_freed_once_and_never_while_a_claim_can_be_believed(steps) -> None:  # type: ignore[no-untyped-def]
    """Law 3: against a plain list of everything that was ever granted.

    A lease that is revoked frees what is claimed, and confirms none of it.
    """
    table, now, freed = LeaseTable(), 0.0, []
    table.add_lease(LeaseOffer("r", BLOCKS, 10.0, now))
    believed: dict[tuple[str, int], float] = {}
    for step, pull, rank, wait in steps:
        now += wait
        reader = Reader(pull, rank, 2)
        before = len(freed)
        if step == "claim":
            answer: object = table.claim_lease("r", reader, BLOCKS, now)
        elif step == "renew":
            answer = table.renew_lease("r", reader, now)
        else:
            answer = None
        if isinstance(answer, Grant):
            assert not freed
            believed[pull, rank] = now + answer.ttl_s
        if step == "confirm":
            denied, ended = table.confirm_lease("r", reader, BLOCKS, now)
            if denied is None:
                assert not freed
                assert (pull, rank) in believed
                del believed[pull, rank]
            freed += ended
        elif step == "revoke":
            believed.clear()
            freed += table.revoke_all()
            assert freed
        elif step == "done":
            believed.pop((pull, rank), None)
            freed += table.end_claim("r", reader, BLOCKS, now)
        elif step == "abort":
            freed += table.abort_lease("r", now)
        elif step == "tick":
            freed += table.free_expired(now)
        if len(freed) > before:
            assert all(end <= now for end in believed.values())
    freed += table.free_expired(now + 1000)
    assert len(freed) == 1
    assert len(table) == 0
    assert table.next_expiry() is None
