"""What was decided for the last requests, and which requests are in flight."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.router.events.caches import PrefixLookup, RankHit
from pdconn.router.fleet.flights import Flight, InflightTracker
from pdconn.router.prefix.hashing import HashScheme
from pdconn.router.prefix.score import Hit, Prompt
from pdconn.router.routing.decision_log import DecisionLog
from pdconn.router.routing.policy import Candidate, Decision, Ranking, ScoredCandidate
from pdconn.router.routing.routed_request import PENDING, Outcome

CBOR = HashScheme("sha256_cbor", 16)

# --- Decisions ----------------------------------------------------------------------------


def decision(request_id: str, num_hashes: int = 0) -> Decision:
    lookup = PrefixLookup({CBOR: Prompt([0] * num_hashes, 16 * num_hashes, 16)}, {}, {})
    return Decision(request_id, 0.0, "prefix", 16 * num_hashes, Ranking((), ()), lookup)


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 12))),
    st.integers(1, 6),
    st.integers(0, 30),
)
def test_decisions_are_bounded_and_the_oldest_go_first(added, most, most_hashes):
    kept = DecisionLog(most, most_hashes)
    for request_id, num_hashes in added:
        kept.add_decision(decision(request_id, num_hashes))
    # What an unbounded one holds, newest first, as far as the bounds allow.
    newest = [(one, dict(added)[one]) for one in dict.fromkeys(one for one, _ in reversed(added))]
    fits, left = [], most_hashes
    for request_id, num_hashes in newest[:most]:
        left -= num_hashes
        if left < 0:
            break
        fits.append(request_id)
    seen = [one.request_id for one, _ in kept.newest()]
    assert seen == fits[: len(seen)]
    if len(newest) == len(added):  # an id that came twice may have pushed out more
        assert seen == fits
    assert len(kept) <= most
    assert sum(one.num_hashes for one, _ in kept.newest()) <= most_hashes
    assert all(kept.find_decision(one) is not None for one in seen)


def test_a_decision_of_an_id_that_comes_again_replaces_the_first():
    kept = DecisionLog()
    kept.add_decision(decision("x", 1))
    kept.add_decision(decision("y", 1))
    again = decision("x", 2)
    kept.add_decision(again)
    assert [one.request_id for one, _ in kept.newest()] == ["x", "y"]
    assert kept.find_decision("x") == (again, PENDING)
    assert kept.find_decision("z") is None


def test_an_outcome_stands_beside_its_own_decision_only():
    """Clients may send one request id twice, at the same time even."""
    kept, outcome = DecisionLog(), Outcome(200, "p", "d")
    first, second = decision("x"), decision("x", 1)
    kept.add_decision(first)
    kept.add_decision(second)
    kept.end_decision(first, outcome)
    assert kept.find_decision("x") == (second, PENDING)
    kept.end_decision(second, outcome)
    assert kept.find_decision("x") == (second, outcome)
    kept.end_decision(decision("y"), outcome)  # pushed out meanwhile
    assert len(kept) == 1


# --- In flight ----------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 1000)) | st.integers(0, 20), max_size=60
    )
)
def test_requests_are_in_flight_from_start_to_finish(steps):
    inflight, under_way, finished = InflightTracker(), [], []
    for step in steps:
        if isinstance(step, tuple):
            under_way.append((step, inflight.start_request(*step)))
        elif under_way:
            _, flight = under_way.pop(step % len(under_way))
            flight.finish()
            finished.append(flight)
        for flight in finished[-2:]:
            flight.finish()  # a second time does nothing
        for engine in "abc":
            mine = [tokens for (name, tokens), _ in under_way if name == engine]
            assert inflight.requests_at(engine) == (len(mine), sum(mine))
        assert len(inflight) == len(under_way)
    for _, flight in under_way:
        flight.finish()
    assert len(inflight) == 0
    assert inflight._requests == inflight._tokens == inflight._flights == {}


RANKS = st.sampled_from([None, 0, 1])


def check_turns(sent: list[tuple[int, int | None]], most: int, rng: random.Random) -> None:
    """Requests of these sizes, to these ranks of one engine, have their turns in time."""
    inflight, turns = InflightTracker(), []
    flights = [inflight.start_request("a", *one) for one in sent]
    other = inflight.start_request("b", 99)
    for number, flight in enumerate(flights):
        flight.when_ahead(most, partial(turns.append, number))
    left = list(range(len(sent)))
    for number in rng.sample(left, len(left)):
        for one in left:
            rank = sent[one][1]
            before = [sent[each] for each in left if each < one]
            # An engine of ranks may have put a request that names none anywhere.
            ahead = sum(size for size, at in before if rank is None or at in (None, rank))
            assert (one in turns) == (ahead <= most)
        had = number in turns
        flights[number].finish()
        left.remove(number)
        assert (number in turns) == had
    assert len(set(turns)) == len(turns)
    other.finish()
    assert inflight._turns == inflight._flights == {}


@given(
    st.lists(st.tuples(st.integers(0, 5), RANKS), min_size=1, max_size=8),
    st.integers(0, 8),
    st.randoms(use_true_random=False),
)
def test_a_turn_comes_once_those_before_have_little_to_compute(sent, most, rng):
    """Later requests and those of other ranks do not delay it; one that has ended has no turn."""
    check_turns(sent, most, rng)


def test_it_is_noticed_if_other_ranks_delay_a_turn(monkeypatch):
    """The control: all requests at an engine were counted."""
    monkeypatch.setattr(Flight, "is_before", lambda self, other: self.number < other.number)
    check_turns([(5, 0), (5, 0)], 2, random.Random(0))
    with pytest.raises(AssertionError):
        check_turns([(5, 0), (5, 1)], 2, random.Random(0))


def test_prefill_is_held_to_the_rank_that_it_was_asked_for():
    """Asked for none, an engine of several chooses one that may hold less."""
    ranks = {
        "a": (RankHit(Hit(4, 64, 4.0), 2), RankHit(Hit(0, 0, 0.0), 0)),
        "b": (RankHit(Hit(1, 16, 1.0)),),
    }

    def promised(engine: str, rank: int | None) -> int:
        asked = (ScoredCandidate(Candidate(engine, rank=rank), 0.0, ""),)
        lookup = PrefixLookup({}, {}, ranks)
        made = Decision("id", 0.0, "prefix", 80, Ranking(asked, ()), lookup)
        return made.promised_tokens(engine)

    assert [promised("a", 2), promised("a", 0), promised("a", None)] == [64, 0, 0]
    assert [promised("b", None), promised("c", None)] == [16, 0]
