"""Over real sockets: engines report stored rows, and prompts go where loading them pays off."""

from __future__ import annotations

import json

from pdconn.router.prefix.groups import STORED
from pdconn.router.prefix.hashing import chain, external
from pdconn.router.prefix.snapshot import explain_snapshot, read_snapshot
from tests.fakes.event_loop import in_loop
from tests.fakes.routed import ASKED, PROMPT, SCHEME, Fleet, Pod, fleet

ROW = 64
"""Tokens of a stored row: 4 blocks."""


async def store(pod: Pod, rows: int) -> None:
    """One event per row, as an engine with a store publishes it."""
    hashes = [external(full) for full in chain(SCHEME, PROMPT)]
    for row in range(rows):
        first = row * ROW // SCHEME.block_tokens
        await pod.publisher.publish(
            {
                "type": "BlockStored",
                "block_hashes": hashes[first : first + 4],
                "parent_block_hash": hashes[first - 1] if row else None,
                "token_ids": PROMPT[row * ROW : (row + 1) * ROW],
                "block_size": SCHEME.block_tokens,
                "medium": "STORAGE",
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
                "locality": "LOCAL",
            }
        )


async def remove_stored(pod: Pod) -> None:
    hashes = [external(full) for full in chain(SCHEME, PROMPT)]
    await pod.publisher.publish(
        {"type": "BlockRemoved", "block_hashes": hashes, "medium": "STORAGE", "group_idx": 0}
    )


async def asked(f: Fleet) -> tuple[str | None, int, int]:
    """The prefill engine that served, and the hits predicted of both."""
    await f.events_applied()
    routed = await f.ask(ASKED)
    first, second = (routed.hit_tokens(engine.url) for engine in f.prefill)
    return routed.prefill, first, second


@in_loop
async def test_a_prompt_goes_to_the_store_before_none_and_to_the_cache_before_the_store() -> None:
    async with fleet(alone_below=0) as f:
        a, b = f.prefill
        await store(f.pod(b), 5)
        assert await asked(f) == (b.url, 0, 320)
        await f.pod(a).store(PROMPT)
        assert await asked(f) == (a.url, 320, 320)
        await f.pod(a).remove(PROMPT)
        assert await asked(f) == (b.url, 0, 320)
        await remove_stored(f.pod(b))
        assert (await asked(f))[1:] == (0, 0)


@in_loop
async def test_what_is_stored_and_cached_stays_cached_when_the_store_evicts_it() -> None:
    async with fleet(alone_below=0) as f:
        a = f.prefill[0]
        await f.pod(a).store(PROMPT)
        await store(f.pod(a), 5)
        await remove_stored(f.pod(a))
        assert await asked(f) == (a.url, 320, 0)


@in_loop
async def test_decode_serves_alone_from_its_store() -> None:
    async with fleet(num_prefill=1) as f:
        await store(f.pod(f.decode[0]), 5)
        await f.events_applied()
        assert (await f.ask(ASKED)).alone


@in_loop
async def test_pages_tell_of_stored_blocks_and_a_snapshot_scores_the_same() -> None:
    async with fleet(alone_below=0) as f:
        a, b = f.prefill
        await store(f.pod(a), 3)
        await f.pod(a).store(PROMPT[:32])
        await f.events_applied()
        routed = await f.ask(ASKED)
        page = f"/debug/route/{routed.decision.request_id}"
        reply = await f.send(page, method="GET")
        now = json.loads(reply.body)["now"]
        assert now[a.url]["stored_blocks"] == 10
        assert (now[a.url]["hit_tokens"], now[a.url]["score"]) == (192, 2 + 10 * 0.5)
        assert "80 to load" in str(json.loads(reply.body)["prefill_order"])
        state = json.loads((await f.send("/debug/state", method="GET")).body)
        pods = {one["pod"]: one for one in state["pods"]}
        assert (pods[a.url]["stored_blocks"], pods[a.url]["row_tokens"]) == (12, ROW)
        assert (pods[b.url]["stored_blocks"], pods[b.url]["row_tokens"]) == (0, None)
        snapshot = read_snapshot((await f.send(f"{page}?snapshot=1", method="GET")).body)
        assert snapshot.weights[STORED] == 0.5
        explained = explain_snapshot(snapshot)[a.url]
        assert (explained.hit_tokens, explained.stored_blocks, explained.score) == (192, 10, 7.0)
