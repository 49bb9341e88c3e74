"""What is known of the engines' caches, of the last decisions, and of what is on its way."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from pdconn.router.events.caches import TRIES, Feed, PrefixCaches, PrefixLookup, RankHit, pod_name
from pdconn.router.events.subscriber import EventSource, Status
from pdconn.router.events.tracker import State
from pdconn.router.prefix.events import Batch, Cleared, Event, Removed, Stored
from pdconn.router.prefix.hashing import NOTHING, Extras, HashScheme, chain, external
from pdconn.router.prefix.score import Hit, Prompt
from pdconn.router.routing import decision_log as decisions_module
from pdconn.router.routing.decision_log import DecisionLog, RouteRecord
from pdconn.router.routing.inflight import InflightTracker
from pdconn.router.routing.policy import Candidate, Decision, ScoredCandidate

CBOR = HashScheme("sha256_cbor", 16)
PICKLE = HashScheme("sha256", 32)
PROMPT = list(range(1000, 1000 + 160))
SALTED = Extras(cache_salt="s")


def source(engine: str = "a", rank: int = 0) -> EventSource:
    return EventSource(engine, rank, "tcp://h:1", None)


def stored(
    tokens: list[int] = PROMPT,
    scheme: HashScheme = CBOR,
    extras: Extras = NOTHING,
    **fields: Any,
) -> Stored:
    """What an engine of this scheme says that it holds of a prompt."""
    hashes = [external(full) for full in chain(scheme, tokens, extras)]
    keys = None if extras == NOTHING else [[["cache_salt", "s"]]] + [None] * (len(hashes) - 1)
    said = {
        "hashes": hashes,
        "group": 0,
        "medium": "gpu",
        "block_tokens": scheme.block_tokens,
        "kind": "full_attention",
        "token_ids": Raw(msgspec.msgpack.encode(tokens)),
        "extra_keys": None if keys is None else Raw(msgspec.msgpack.encode(keys)),
    }
    return Stored(**{**said, **fields})


def tell(caches: PrefixCaches, *events: Event, source: EventSource = source()) -> None:  # noqa: B008
    caches.apply(source, Batch(0.0, list(events)))


def held(
    caches: PrefixCaches, tokens: list[int] = PROMPT, extras: Extras = NOTHING
) -> dict[str, int]:
    """Tokens of a prompt by pod; one more follows, as an engine computes the last one."""
    return {pod: hit.tokens for pod, hit in caches.look_for([*tokens, 1], extras).pods.items()}


# --- How engines hash ---------------------------------------------------------------------


def test_an_engines_hashing_is_found_in_its_events_and_its_blocks_count_from_the_first():
    caches = PrefixCaches()
    assert held(caches) == {}
    tell(caches, stored())
    assert caches.feeds["a"].scheme == CBOR
    assert held(caches) == {"a": 160}
    assert held(caches, [*PROMPT[:80], *PROMPT]) == {"a": 80}
    assert held(caches, PROMPT[1:]) == {"a": 0}


def test_what_cannot_tell_is_kept_and_no_try():
    """Blocks of salted prompts and the like lie there when a plain one tells how to look."""
    caches = PrefixCaches()
    masked = {"hashes": stored().hashes[1:]}
    cannot = [
        stored(extras=SALTED),
        stored(**masked),
        stored(parent=7),
        stored(lora="an adapter"),
        stored(token_ids=None),
        stored(token_ids=Raw(b"\x91\xa1x")),
    ]
    for _ in range(TRIES):
        tell(caches, *cannot)
    feed = caches.feeds["a"]
    assert (feed.scheme, feed.tries) == (None, 0)
    tell(caches, stored())
    assert caches.feeds["a"].scheme == CBOR
    assert held(caches, extras=SALTED) == {"a": 160}


def test_hashes_of_an_unknown_kind_are_said_once_and_count_for_nothing(caplog):
    caches = PrefixCaches()
    strange = stored(hashes=list(range(10)))
    with caplog.at_level(logging.WARNING):
        for _ in range(TRIES - 1):
            tell(caches, strange)
        assert not caplog.records  # not said too soon
        for _ in range(TRIES):
            tell(caches, strange)
    (said,) = caplog.records
    assert "pod=a" in said.getMessage()
    assert "--hash-seed" in said.getMessage()
    tell(caches, stored())  # given up: nothing is tried any more
    assert caches.feeds["a"].scheme is None
    assert held(caches) == {}
    caches.reset(source(), "another engine")
    tell(caches, stored())
    assert held(caches) == {"a": 160}


@pytest.mark.parametrize("seed", [None, "7"])
def test_a_seed_is_needed_where_the_engines_have_one(seed):
    caches = PrefixCaches(seed=seed)
    tell(caches, stored(scheme=HashScheme("xxhash", 16, "7")))
    assert held(caches) == ({} if seed is None else {"a": 160})


def test_a_scheme_that_was_told_is_not_looked_for():
    caches = PrefixCaches(scheme=CBOR)
    tell(caches, stored(token_ids=None))
    assert held(caches) == {"a": 160}
    tell(caches, stored(scheme=PICKLE), source=source("b"))
    assert caches.feeds["b"].scheme == CBOR
    assert held(caches)["b"] == 0


def test_engines_that_hash_differently_are_asked_each_in_its_way():
    caches = PrefixCaches()
    tell(caches, stored(), source=source("a"))
    tell(caches, stored(PROMPT[:96], PICKLE), source=source("b"))
    looked = caches.look_for([*PROMPT, 1], NOTHING)
    assert {name: hit.tokens for name, hit in looked.pods.items()} == {"a": 160, "b": 96}
    assert set(looked.prompts) == {CBOR, PICKLE}
    assert [len(looked.prompts[one].hashes) for one in (CBOR, PICKLE)] == [10, 5]


# --- Hits ---------------------------------------------------------------------------------


def test_an_engines_best_rank_is_named():
    caches = PrefixCaches()
    tell(caches, stored(PROMPT[:32]), source=source("a", 0))
    tell(caches, stored(PROMPT[:64]), source=source("a", 1))
    tell(caches, stored(PROMPT[:48]), source=source("a", 2))
    tell(caches, stored(PROMPT[:16]), source=source("b", 0))
    looked = caches.look_for([*PROMPT, 1], NOTHING)
    assert set(looked.pods) == {"a", "a#1", "a#2", "b"}
    assert {e: (ranks[0].rank, ranks[0].hit.tokens) for e, ranks in looked.ranks.items()} == {
        "a": (1, 64),
        "b": (0, 16),
    }
    assert [len(looked.ranks[engine]) for engine in "ab"] == [3, 1]
    tell(caches, Removed(stored(PROMPT[:64]).hashes, 0, "gpu"), source=source("a", 1))
    assert caches.look_for([*PROMPT, 1], NOTHING).best("a").rank == 2


def test_a_heavier_medium_decides_between_equal_hits():
    caches = PrefixCaches(weights={"gpu": 1.0, "cpu": 0.5})
    tell(caches, stored(medium="cpu"), source=source("a", 0))
    tell(caches, stored(medium="gpu"), source=source("a", 1))
    assert caches.look_for([*PROMPT, 1], NOTHING).best("a").rank == 1


def test_salt_and_adapter_make_other_prompts():
    caches = PrefixCaches()
    adapter = Extras(lora=("x", "/x"))
    tell(caches, stored(), source=source("plain"))
    for name, extras in (("salted", SALTED), ("adapted", adapter)):
        tell(caches, stored([1] * 16), stored(extras=extras), source=source(name))
    for name, extras in (("plain", NOTHING), ("salted", SALTED), ("adapted", adapter)):
        found = held(caches, extras=extras)
        assert found == {**dict.fromkeys(found, 0), name: 160}


def test_a_prompt_shorter_than_a_block_is_looked_for_and_not_found():
    caches = PrefixCaches()
    tell(caches, stored())
    assert caches.look_for([], NOTHING).ranks == caches.look_for(PROMPT[:15], NOTHING).ranks
    assert caches.look_for(PROMPT[:15], NOTHING).ranks == {"a": (RankHit(),)}


# --- Draining -----------------------------------------------------------------------------


def test_a_reset_forgets_the_blocks_and_how_they_were_hashed():
    caches = PrefixCaches()
    tell(caches, stored(), stored())
    assert caches.index.num_hashes == 10
    caches.reset(source(), "it started anew")
    assert caches.index.num_hashes == 0
    assert caches.index.pods["a"].groups == {}
    assert caches.feeds["a"].scheme is None
    tell(caches, stored(scheme=PICKLE))
    assert (caches.feeds["a"].scheme, held(caches)) == (PICKLE, {"a": 160})


def test_forgetting_every_source_leaves_nothing():
    caches = PrefixCaches()
    sources = [source(engine, rank) for engine in "abc" for rank in range(3)]
    for number, one in enumerate(sources):
        tell(caches, stored(PROMPT[: 16 * (number + 1)]), source=one)
        caches.state(one, Status(State.LIVE))
    assert caches.index.num_hashes == 9
    for one in sources[:-1]:
        caches.forget(one)
    assert caches.index.num_hashes == 9  # the control: the last one holds them all
    caches.forget(sources[-1])
    caches.forget(sources[-1])
    assert (caches.index.num_hashes, caches.index.pods, caches.feeds) == (0, {}, {})
    assert held(caches) == {}


def test_a_cleared_cache_is_an_empty_one_of_the_same_engine():
    caches = PrefixCaches()
    tell(caches, stored(), Cleared())
    assert caches.index.num_hashes == 0
    assert caches.feeds["a"].scheme == CBOR


def test_a_state_makes_a_pod_known_before_it_holds_anything():
    caches = PrefixCaches()
    caches.state(source("a", 1), Status(State.SYNCING))
    assert caches.feeds == {"a#1": Feed(source("a", 1), None, Status(State.SYNCING))}
    assert "a#1" in caches.index.pods
    assert pod_name(source("a", 0)) == "a"


# --- Decisions ----------------------------------------------------------------------------


def course(request_id: str, num_hashes: int = 0) -> RouteRecord:
    looked = PrefixLookup({CBOR: Prompt([0] * num_hashes, 16 * num_hashes, 16)}, {}, {})
    return RouteRecord(request_id, 0.0, "prefix", 16 * num_hashes, Decision((), ()), looked)


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 12))),
    st.integers(1, 6),
    st.integers(0, 30),
)
def test_decisions_are_bounded_and_the_oldest_go_first(added, most, most_hashes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions_module, "MOST", most)
        patch.setattr(decisions_module, "MOST_HASHES", most_hashes)
        kept = DecisionLog()
        for request_id, num_hashes in added:
            kept.add(course(request_id, num_hashes))
    # What an unbounded one holds, newest first, as far as the bounds allow.
    newest = [(one, dict(added)[one]) for one in dict.fromkeys(one for one, _ in reversed(added))]
    fits, left = [], most_hashes
    for request_id, num_hashes in newest[:most]:
        left -= num_hashes
        if left < 0:
            break
        fits.append(request_id)
    seen = [one.request_id for one in kept.newest()]
    assert seen == fits[: len(seen)]
    if len(newest) == len(added):  # an id that came twice may have pushed out more
        assert seen == fits
    assert len(kept) <= most
    assert sum(one.num_hashes for one in kept.newest()) <= most_hashes
    assert all(kept.get(one) is not None for one in seen)


def test_a_decision_of_an_id_that_comes_again_replaces_the_first():
    kept = DecisionLog()
    kept.add(course("x", 1))
    kept.add(course("y", 1))
    again = course("x", 2)
    kept.add(again)
    assert [one.request_id for one in kept.newest()] == ["x", "y"]
    assert kept.get("x") is again
    assert kept.get("z") is None


# --- Flights ------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 1000)) | st.integers(0, 20), max_size=60
    )
)
def test_flights_hold_what_took_off_and_has_not_landed(steps):
    flights, under_way, landed = InflightTracker(), [], []
    for step in steps:
        if isinstance(step, tuple):
            under_way.append((step, flights.take_off(*step)))
        elif under_way:
            _, flight = under_way.pop(step % len(under_way))
            flight.land()
            landed.append(flight)
        for flight in landed[-2:]:
            flight.land()  # a second time does nothing
        for engine in "abc":
            mine = [tokens for (name, tokens), _ in under_way if name == engine]
            assert flights.num_requests(engine) == len(mine)
            assert flights.num_tokens(engine) == sum(mine)
        assert len(flights) == len(under_way)
    for _, flight in under_way:
        flight.land()
    assert len(flights) == 0
    assert not flights._requests
    assert not flights._tokens


def test_prefill_is_held_to_the_rank_that_it_was_asked_for():
    """Asked for none, an engine of several chooses one that may hold less."""
    ranks = {
        "a": (RankHit(Hit(4, 64, 4.0), 2), RankHit(Hit(0, 0, 0.0), 0)),
        "b": (RankHit(Hit(1, 16, 1.0)),),
    }

    def promised(engine: str, rank: int | None) -> int:
        asked = (ScoredCandidate(Candidate(engine, rank=rank), 0.0, ""),)
        course = RouteRecord(
            "id", 0.0, "prefix", 80, Decision(asked, ()), PrefixLookup({}, {}, ranks)
        )
        course.prefill = engine
        return course.promised_tokens()

    assert [promised("a", 2), promised("a", 0), promised("a", None)] == [64, 0, 0]
    assert [promised("b", None), promised("c", None)] == [16, 0]
