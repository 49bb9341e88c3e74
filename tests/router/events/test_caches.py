"""What is known of the engines' prefix caches."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from pdconn.router.events.caches import TRIES, Feed, PrefixCaches, RankHit, pod_name
from pdconn.router.events.subscriber import EventSource, Status
from pdconn.router.events.tracker import State
from pdconn.router.prefix.block_index import Index
from pdconn.router.prefix.hashing import NOTHING, Extras, HashScheme, chain, external
from pdconn.router.prefix.kv_events import Batch, Cleared, Event, Removed, Stored

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
    defaults = {
        "hashes": hashes,
        "group": 0,
        "medium": "gpu",
        "block_tokens": scheme.block_tokens,
        "kind": "full_attention",
        "token_ids": Raw(msgspec.msgpack.encode(tokens)),
        "extra_keys": None if keys is None else Raw(msgspec.msgpack.encode(keys)),
    }
    return Stored(**{**defaults, **fields})


def apply_events(caches: PrefixCaches, *events: Event, source: EventSource = source()) -> None:  # noqa: B008
    caches.apply_batch(source, Batch(0.0, list(events)))


def held(
    caches: PrefixCaches, tokens: list[int] = PROMPT, extras: Extras = NOTHING
) -> dict[str, int]:
    """Tokens of a prompt by pod; one more follows, as an engine computes the last one."""
    return {pod: hit.tokens for pod, hit in caches.lookup([*tokens, 1], extras).pods.items()}


# --- How engines hash ---------------------------------------------------------------------


def test_an_engines_hashing_is_found_in_its_events_and_its_blocks_count_from_the_first():
    caches = PrefixCaches()
    assert held(caches) == {}
    apply_events(caches, stored())
    assert caches.feeds["a"].scheme == CBOR
    assert held(caches) == {"a": 160}
    assert held(caches, [*PROMPT[:80], *PROMPT]) == {"a": 80}
    assert held(caches, PROMPT[1:]) == {"a": 0}


def test_what_cannot_tell_is_kept_and_no_try():
    """Blocks of salted prompts and the like lie there when a plain one reveals the scheme."""
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
        apply_events(caches, *cannot)
    feed = caches.feeds["a"]
    assert (feed.scheme, feed.tries) == (None, 0)
    apply_events(caches, stored())
    assert caches.feeds["a"].scheme == CBOR
    assert held(caches, extras=SALTED) == {"a": 160}


def test_hashes_of_an_unknown_kind_are_logged_once_and_count_for_nothing(caplog):
    caches = PrefixCaches()
    strange = stored(hashes=list(range(10)))
    with caplog.at_level(logging.WARNING):
        for _ in range(TRIES - 1):
            apply_events(caches, strange)
        assert not caplog.records  # not logged too soon
        for _ in range(TRIES):
            apply_events(caches, strange)
    (record,) = caplog.records
    assert "pod=a" in record.getMessage()
    assert "--hash-seed" in record.getMessage()
    apply_events(caches, stored())  # given up: nothing is tried any more
    assert caches.feeds["a"].scheme is None
    assert held(caches) == {}
    caches.drop_pod(source(), "another engine")
    apply_events(caches, stored())
    assert held(caches) == {"a": 160}


@pytest.mark.parametrize("seed", [None, "7"])
def test_a_seed_is_needed_where_the_engines_have_one(seed):
    caches = PrefixCaches(seed=seed)
    apply_events(caches, stored(scheme=HashScheme("xxhash", 16, "7")))
    assert held(caches) == ({} if seed is None else {"a": 160})


def test_a_scheme_that_is_configured_is_not_looked_for():
    caches = PrefixCaches(scheme=CBOR)
    apply_events(caches, stored(token_ids=None))
    assert held(caches) == {"a": 160}
    apply_events(caches, stored(scheme=PICKLE), source=source("b"))
    assert caches.feeds["b"].scheme == CBOR
    assert held(caches)["b"] == 0


def test_engines_that_hash_differently_are_asked_each_in_its_way():
    caches = PrefixCaches()
    apply_events(caches, stored(), source=source("a"))
    apply_events(caches, stored(PROMPT[:96], PICKLE), source=source("b"))
    looked = caches.lookup([*PROMPT, 1], NOTHING)
    assert {name: hit.tokens for name, hit in looked.pods.items()} == {"a": 160, "b": 96}
    assert set(looked.prompts) == {CBOR, PICKLE}
    assert [len(looked.prompts[one].hashes) for one in (CBOR, PICKLE)] == [10, 5]


# --- Hits ---------------------------------------------------------------------------------


def test_an_engines_best_rank_is_named():
    caches = PrefixCaches()
    apply_events(caches, stored(PROMPT[:32]), source=source("a", 0))
    apply_events(caches, stored(PROMPT[:64]), source=source("a", 1))
    apply_events(caches, stored(PROMPT[:48]), source=source("a", 2))
    apply_events(caches, stored(PROMPT[:16]), source=source("b", 0))
    looked = caches.lookup([*PROMPT, 1], NOTHING)
    assert set(looked.pods) == {"a", "a#1", "a#2", "b"}
    assert {e: (ranks[0].rank, ranks[0].hit.tokens) for e, ranks in looked.ranks.items()} == {
        "a": (1, 64),
        "b": (0, 16),
    }
    assert [len(looked.ranks[engine]) for engine in "ab"] == [3, 1]
    apply_events(caches, Removed(stored(PROMPT[:64]).hashes, 0, "gpu"), source=source("a", 1))
    assert caches.lookup([*PROMPT, 1], NOTHING).best("a").rank == 2


def test_a_heavier_medium_decides_between_equal_hits():
    caches = PrefixCaches(weights={"gpu": 1.0, "cpu": 0.5})
    apply_events(caches, stored(medium="cpu"), source=source("a", 0))
    apply_events(caches, stored(medium="gpu"), source=source("a", 1))
    assert caches.lookup([*PROMPT, 1], NOTHING).best("a").rank == 1


def test_a_rank_with_a_little_less_in_its_cache_comes_before_one_with_all_in_a_store():
    caches = PrefixCaches()
    apply_events(caches, stored(medium="storage"), source=source("a", 0))
    apply_events(caches, stored(PROMPT[:144]), source=source("a", 1))
    ranks = caches.lookup([*PROMPT, 1], NOTHING).ranks["a"]
    assert [(one.rank, one.hit.tokens) for one in ranks] == [(1, 144), (0, 160)]


def test_salt_and_adapter_make_other_prompts():
    caches = PrefixCaches()
    adapter = Extras(lora=("x", "/x"))
    apply_events(caches, stored(), source=source("plain"))
    for name, extras in (("salted", SALTED), ("adapted", adapter)):
        apply_events(caches, stored([1] * 16), stored(extras=extras), source=source(name))
    for name, extras in (("plain", NOTHING), ("salted", SALTED), ("adapted", adapter)):
        found = held(caches, extras=extras)
        assert found == {**dict.fromkeys(found, 0), name: 160}


def test_a_prompt_shorter_than_a_block_is_looked_for_and_not_found():
    caches = PrefixCaches()
    apply_events(caches, stored())
    assert caches.lookup([], NOTHING).ranks == caches.lookup(PROMPT[:15], NOTHING).ranks
    assert caches.lookup(PROMPT[:15], NOTHING).ranks == {"a": (RankHit(),)}


# --- Draining -----------------------------------------------------------------------------


def test_a_reset_forgets_the_blocks_and_how_they_were_hashed():
    caches = PrefixCaches()
    apply_events(caches, stored(), stored())
    assert caches.index.num_hashes == 10
    caches.drop_pod(source(), "it started anew")
    assert caches.index.num_hashes == 0
    assert caches.index.pods["a"].groups == {}
    assert caches.feeds["a"].scheme is None
    apply_events(caches, stored(scheme=PICKLE))
    assert (caches.feeds["a"].scheme, held(caches)) == (PICKLE, {"a": 160})


def test_forgetting_every_source_leaves_nothing():
    caches = PrefixCaches()
    sources = [source(engine, rank) for engine in "abc" for rank in range(3)]
    for number, one in enumerate(sources):
        apply_events(caches, stored(PROMPT[: 16 * (number + 1)]), source=one)
        caches.status_changed(one, Status(State.LIVE))
    assert caches.index.num_hashes == 9
    for one in sources[:-1]:
        caches.forget_source(one)
    assert caches.index.num_hashes == 9  # the control: the last one holds them all
    caches.forget_source(sources[-1])
    caches.forget_source(sources[-1])
    assert (caches.index.num_hashes, caches.index.pods, caches.feeds) == (0, {}, {})
    assert held(caches) == {}


def test_a_cleared_cache_is_an_empty_one_of_the_same_engine():
    caches = PrefixCaches()
    apply_events(caches, stored(), Cleared())
    assert caches.index.num_hashes == 0
    assert caches.feeds["a"].scheme == CBOR


EVENTS = st.lists(
    st.one_of(
        st.builds(
            Stored,
            hashes=st.lists(st.integers(1, 9), max_size=4),
            group=st.sampled_from([None, 0, 1]),
            medium=st.sampled_from(["gpu", "storage"]),
            block_tokens=st.sampled_from([16, 32]),
            kind=st.sampled_from([None, "full_attention", "mamba"]),
        ),
        st.builds(
            Removed,
            hashes=st.lists(st.integers(1, 9), max_size=4),
            group=st.sampled_from([None, 0, 1]),
            medium=st.sampled_from(["gpu", "storage"]),
        ),
        st.just(Cleared()),
    ),
    max_size=10,
)


def known(index: Index) -> object:
    pod = index.pods["a"]
    held = index.held_by("a", range(10)), pod.num_blocks, pod.num_stored, index.num_copies("a")
    return held, pod.groups, pod.seen, pod.row_tokens, sorted(index.planes(), key=str)


def says_the_same(caches: PrefixCaches, events: list[Event]) -> bool:
    """Whether a batch leaves what its events leave, one by one."""
    by_one = Index()
    by_one.add_pod("a")
    for event in events:
        by_one.apply_event("a", event)
    apply_events(caches, *events)
    return known(caches.index) == known(by_one)


@given(EVENTS)
def test_a_batch_that_clears_leaves_what_its_events_leave(events: list[Event]) -> None:
    assert says_the_same(PrefixCaches(), events)


def test_a_batch_that_forgets_what_is_cleared_wholly_is_noticed(monkeypatch) -> None:
    """The control: groups are learned from what is cleared, too."""
    events = [Stored([1], 0, "gpu", 16, "mamba"), Cleared()]
    assert says_the_same(PrefixCaches(), events)
    caches = PrefixCaches()
    monkeypatch.setattr(caches.index, "learn_from", lambda *_: None)
    assert not says_the_same(caches, events)


def test_a_batch_clears_once_however_often_it_says_so(monkeypatch) -> None:
    """A million times would stop the router for minutes: each takes time for every block."""
    caches, cleared = PrefixCaches(), []
    apply_events(caches, stored())
    monkeypatch.setattr(caches.index, "clear_pod", cleared.append)
    apply_events(caches, *[stored(), Cleared()] * 50, stored())
    assert cleared == ["a"]


def test_a_state_makes_a_pod_known_before_it_holds_anything():
    caches = PrefixCaches()
    caches.status_changed(source("a", 1), Status(State.SYNCING))
    assert caches.feeds == {"a#1": Feed(source("a", 1), None, Status(State.SYNCING))}
    assert "a#1" in caches.index.pods
    assert pod_name(source("a", 0)) == "a"
