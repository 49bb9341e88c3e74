"""What a reader can cost a lender with the messages of one lease: little time, and no memory.

A lease that closes looked at all of its claims for each message, and set a timer anew for each: a
frame of 4096 Done took 4.5 s, in which the lender served no connection, and left 4096 timers.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdconn.lifecycle.lease import Lease, LeaseOffer, LeaseState, LeaseTable
from pdconn.protocol.messages import Reader

TICKET = b"digest"
TTL_S = 10.0
RANKS = 16


def closing(num_claims: int) -> LeaseTable:
    """A table with a lease that closes, with so many claims; the first ends last."""
    table = LeaseTable()
    table.add_lease(LeaseOffer("r", TICKET, TTL_S, 0.0))
    for number in range(num_claims):
        reader = Reader(f"p{number // RANKS}", number % RANKS, RANKS)
        table.claim_lease("r", reader, TICKET, 0.0)
    table.renew_lease("r", Reader("p0", 0, RANKS), 5.0)
    table.abort_lease("r", 6.0)
    return table


def leave_again(table: LeaseTable, count: int) -> None:
    for _ in range(count):
        table.end_claim("r", Reader("p0", 0, RANKS), TICKET, 6.0)


def keeps_few_timers() -> None:
    table = closing(2 * RANKS)
    leave_again(table, 1000)
    assert len(table._timers) <= 2, "a timer for each message"
    assert table.free_expired(TTL_S - 0.1) == []
    assert [freed.request for freed in table.free_expired(TTL_S)] == ["r"]
    assert not table._due
    assert table.next_expiry() is None


def test_a_lease_has_one_timer_however_many_messages_come() -> None:
    keeps_few_timers()


def test_that_law_notices_a_table_that_forgets_its_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LeaseTable._settle

    def forgetful(self, request, lease):  # type: ignore[no-untyped-def]
        self._due.clear()
        return real(self, request, lease)

    monkeypatch.setattr(LeaseTable, "_settle", forgetful)
    with pytest.raises(AssertionError, match="a timer for each message"):
        keeps_few_timers()


def seconds(num_claims: int) -> float:
    """Of 500 messages to a lease that closes."""

    def once() -> float:
        table = closing(num_claims)
        began = time.thread_time()
        leave_again(table, 500)
        return time.thread_time() - began

    return min(once() for _ in range(3))


def costs_the_same() -> None:
    assert seconds(128 * RANKS) < 8 * seconds(2 * RANKS), "the time goes with the claims"


def test_a_message_costs_the_same_however_many_claims_a_lease_has() -> None:
    costs_the_same()


def test_that_law_notices_a_lease_that_looks_at_all_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_expiry(self: Lease) -> float:
        if self.state is LeaseState.HELD:
            return self.deadline
        return max(end for pull in self._pulls.values() for end in pull.claims.values())

    monkeypatch.setattr(Lease, "next_expiry", next_expiry)
    with pytest.raises(AssertionError, match="the time goes with the claims"):
        costs_the_same()


READERS = st.builds(Reader, st.sampled_from("pq"), st.integers(0, 1), st.just(2))
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "claim", "renew", "confirm", "done", "leave", "abort", "wait"]),
        READERS,
        st.sampled_from([0.0, 1.0, 4.0, TTL_S]),
    ),
    max_size=20,
)


def ends_are_of_claims(events: list[tuple[str, Reader, float]]) -> None:
    lease, now = Lease(LeaseOffer("r", TICKET, TTL_S, 0.0)), 0.0
    for what, reader, wait in events:
        now += wait
        if what in ("claim", "confirm", "done"):
            getattr(lease, what)(reader, TICKET, now)
        elif what in ("renew", "leave"):
            getattr(lease, what)(reader, now)
        else:
            (lease.abort if what == "abort" else lease.expire)(now)
        claims = [end for pull in lease._pulls.values() for end in pull.claims.values()]
        assert lease._ends == Counter(claims), "ends of other claims"
        assert 0 not in lease._ends.values()


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_what_a_lease_counts_are_the_ends_of_its_claims(
    events: list[tuple[str, Reader, float]],
) -> None:
    ends_are_of_claims(events)


def test_that_law_notices_a_claim_that_ends_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "_end_claim", lambda self, pull, rank: pull.claims.pop(rank, None))
    reader = Reader("p", 0, 2)
    with pytest.raises(AssertionError, match="ends of other claims"):
        ends_are_of_claims([("claim", reader, 0.0), ("renew", reader, 1.0)])
