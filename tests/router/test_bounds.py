"""What a hostile engine or client says costs its own part only, and is bounded."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from pdconn.router.events.tracker import Numbered, Tracker
from pdconn.router.openai.requests import Direct
from pdconn.router.prefix.block_index import MAX_PLANES, Index
from pdconn.router.prefix.groups import GroupSpec
from pdconn.router.prefix.hashing import NOTHING
from pdconn.router.prefix.kv_events import Cleared, Removed, decode_batch
from pdconn.router.prefix.score import Prompt, Scorer
from pdconn.router.prefix.snapshot import explain_snapshot, read_snapshot
from pdconn.router.routing.policy import TIE_TOKENS
from pdconn.router.routing.tokenize import MAX_SALT
from tests.fakes.event_loop import in_loop
from tests.fakes.fake_engine import ANSWER
from tests.fakes.routed import fleet, other_prompt
from tests.router.events.test_caches import (
    CBOR,
    PICKLE,
    PROMPT,
    PrefixCaches,
    apply_events,
    held,
    source,
    stored,
)

KINDS = ("sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba", "fuzzy")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 1, 2**53])
@pytest.mark.parametrize("block_tokens", [1, 16, 2**24])
def test_no_group_that_an_engine_describes_breaks_scoring(
    kind: str, window: int, block_tokens: int
) -> None:
    index = Index()
    index.learn_group("odd", 0, GroupSpec(kind, window, block_tokens))
    index.learn_group("plain", 0, GroupSpec("full_attention", None, 16))
    index.store_blocks("odd", 0, "gpu", [1, 2, 3])
    index.store_blocks("plain", 0, "gpu", [1, 2, 3])
    hits = Scorer(index).score(Prompt([1, 2, 3], 49, 16))
    assert hits["plain"].tokens == 48
    assert hits["odd"].blocks <= 3


def test_planes_are_bounded_and_go_with_their_last_block() -> None:
    index = Index()
    for group, medium in itertools.product(range(100), "abcdef"):
        index.store_blocks("liar", group, medium, [])
    assert list(index.planes()) == []
    for group, medium in itertools.product(range(100), "abcdef"):
        index.store_blocks("liar", group, medium, [group])
    assert len(list(index.planes())) == MAX_PLANES
    assert index.pods["liar"].refused == 600 - MAX_PLANES
    index.remove_blocks("liar", 0, "a", [0])
    assert (0, "a") not in index.planes()
    index.store_blocks("honest", 0, "gpu", [7])
    assert (0, "gpu") in index.planes()
    index.drop_pod("liar")
    assert list(index.planes()) == [(0, "gpu")]
    index.clear_pod("honest")
    assert list(index.planes()) == []
    assert index.num_hashes == 0


def test_waiting_batches_are_bounded_in_bytes() -> None:
    payload = decode_batch(msgspec.msgpack.encode([1.0, [], 0]))
    tracker = Tracker(held_nbytes=1000)
    tracker.connected()  # asks for a replay, so live batches wait
    for seq in range(50, 60):
        tracker.live(Numbered(seq, seq, payload, 400))
    assert tracker._held._nbytes <= 1000
    assert tracker._held.first.seq == 58


def test_engines_that_hash_alike_tell_each_other_of_their_groups() -> None:
    """One that has only pulled may have spoken of full attention alone."""
    caches = PrefixCaches()
    window = {"group": 1, "kind": "sliding_window", "window": 33}
    apply_events(caches, stored(), stored(**window), source=source("a"))
    apply_events(caches, stored(), source=source("b"))
    assert caches.index.pods["b"].groups == caches.index.pods["a"].groups
    assert held(caches) == {"a": 160, "b": 0}
    # Where descriptions differ, or hashes do, nothing is taken over.
    apply_events(caches, stored(kind="mla_attention"), source=source("c"))
    apply_events(caches, stored(scheme=PICKLE), source=source("d"))
    assert [list(caches.index.pods[name].groups) for name in "cd"] == [[0], [0]]
    apply_events(caches, Removed(stored().hashes, 1, "gpu"), Cleared(), source=source("a"))
    assert list(caches.index.pods["a"].groups) == [0, 1]


def test_chains_of_schemes_that_no_engine_has_any_more_are_forgotten() -> None:
    caches = PrefixCaches()
    for scheme in (CBOR, PICKLE, CBOR):
        apply_events(caches, stored(scheme=scheme))
        caches.lookup(PROMPT, NOTHING)
        assert list(caches._chains) == [scheme]
        caches.drop_pod(source(), "restarted")
    assert caches._chains == {}


@in_loop
async def test_what_a_client_sends_is_neither_kept_nor_shown_at_length() -> None:
    async with fleet() as f:
        await f.pod(f.prefill[0]).store(other_prompt(1))
        await f.events_applied()
        assert (await f.ask(cache_salt="s" * MAX_SALT)).unknown is None
        assert "cache_salt is longer" in ((await f.ask(cache_salt="s" * 900_000)).unknown or "")
        routed = await f.chat([{"type": "A" * 900_000}])
        assert 0 < len(routed.unknown or "") <= 200


@in_loop
async def test_a_name_that_is_no_text_is_refused_by_its_field() -> None:
    async with fleet() as f:
        raw = b'{"prompt": "x", "vllm_xargs": {"\xff": 1}}'
        reply = await f.send("/v1/completions", raw)
        assert (reply.status, reply.error["param"]) == (400, "vllm_xargs")
        assert (await f.complete(prompt="x")).body == ANSWER


@in_loop
async def test_when_the_holder_of_a_prefix_is_gone_the_prompt_is_handed_over() -> None:
    async with fleet(num_decode=2) as f:
        holder, other = f.decode
        await f.pod(holder).store(other_prompt(1))
        await f.events_applied()
        assert (await f.ask([*other_prompt(1), 7])).decode == holder.url
        assert f.metric("direct_requests_total", reason=Direct.PREFIX_HELD.value) == 1
        await holder.stop()
        routed = await f.ask([*other_prompt(1), 8])
        assert (routed.decode, routed.prefill is not None) == (other.url, True)
        assert f.metric("direct_requests_total", reason=Direct.PREFIX_HELD.value) == 1
        assert f.leases.granted == 1


@in_loop
async def test_a_prefix_that_all_ranks_hold_pins_none() -> None:
    async with fleet(num_prefill=1, ranks=3, alone_below=0) as f:
        (engine,) = f.prefill
        for rank in range(3):
            await f.pod(engine, rank).store(other_prompt(1) * 4)
        await f.events_applied()
        await f.ask([*other_prompt(1) * 4, 7])
        assert "X-data-parallel-rank" not in engine.seen[-1].headers
        await f.pod(engine, 2).remove(other_prompt(1) * 4)
        await f.events_applied()
        await f.ask([*other_prompt(1) * 4, 7])
        assert engine.seen[-1].headers["X-data-parallel-rank"] in ("0", "1")
        assert len(other_prompt(1) * 4) >= TIE_TOKENS


@in_loop
async def test_a_snapshot_holds_only_pods_that_hash_as_the_request() -> None:
    """Blocks of a size that the request's hashes do not make up, kinds of newer engines."""
    async with fleet() as f:
        one, two = f.prefill
        await f.pod(one).store(other_prompt(1))
        await f.pod(one).store(other_prompt(1), group=1, kv_cache_spec_kind="of tomorrow")
        await f.pod(one).store(other_prompt(2), group=2, block_size=24)
        await f.pod(two).store(other_prompt(1), block_size=40)
        await f.events_applied()
        routed = await f.ask([*other_prompt(1), 7])
        reply = await f.send(f"/debug/route/{routed.decision.request_id}?snapshot=1", method="GET")
        assert reply.status == 200
        snapshot = read_snapshot(reply.body)
        assert one.url in snapshot.pods
        assert two.url not in snapshot.pods
        assert snapshot.pods[one.url].groups["1"].kind == "unknown"
        assert set(explain_snapshot(snapshot)) == set(snapshot.pods)
