"""Stored rows are announced in vLLM's own hashes: against the events of vLLM's own block pool."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from pdconn.router.events.caches import PrefixCaches
from pdconn.router.events.subscriber import EventSource
from pdconn.router.prefix.hashing import NOTHING
from pdconn.router.prefix.kv_events import decode_batch
from pdconn.store.format.prompt_rows import Chain
from pdconn.store.format.row import Layer, RowKind, RowLayout, RowName, Section, StoreLayout
from registration.references import AttentionKind
from transport.testing.inprocess.faults import ManualClock

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request

    from pdconn.vllm.store import events as module
    from pdconn.vllm.store.events import StoreEvents, event_groups

ROW, HASH = 64, 16
WINDOW = 30  # reaches 29 tokens back: a row keeps its last 32


def section(layer: str, window: int | None, tokens: int) -> Section:
    kind = AttentionKind.FULL if window is None else AttentionKind.SLIDING_WINDOW
    layers = (Layer(layer, 0, 64),)
    return Section(
        kind, window, 1, tokens, is_opaque=False, first_head=0, num_heads=1, layers=layers
    )


LAYOUT = StoreLayout(
    RowLayout(RowKind.FA, ROW, (section("full", None, ROW), section("coarse", None, ROW))),
    RowLayout(RowKind.WA, ROW, (section("window", WINDOW, 32),)),
)


def group(layer: str, block: int, window: int | None = None) -> KVCacheGroupSpec:
    common: dict[str, Any] = {
        "block_size": block, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16,
    }  # fmt: skip
    if window is None:
        return KVCacheGroupSpec([layer], FullAttentionSpec(**common))
    return KVCacheGroupSpec([layer], SlidingWindowSpec(**common, sliding_window=window))


CONFIG = KVCacheConfig(
    100, [], [group("full", 16), group("coarse", 32), group("window", 16, WINDOW)]
)
SIZES = {0: 16, 1: 32, 2: 16}


@pytest.fixture(autouse=True, scope="module")
def _hashing() -> None:
    init_none_hash(sha256_cbor)


def make(clock: ManualClock | None = None, **settings: Any) -> StoreEvents:
    return StoreEvents(
        event_groups(CONFIG, LAYOUT, HASH),
        row_tokens=ROW,
        hash_block_tokens=HASH,
        locality="LOCAL",
        clock=clock or ManualClock(1000.0),
        **settings,
    )


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(32_000) for _ in range(num_tokens)]


def request(tokens: Sequence[int], **more: Any) -> Request:
    hasher = get_request_block_hasher(HASH, sha256_cbor)
    params = SamplingParams(max_tokens=4)
    return Request("r", list(tokens), params, None, block_hasher=hasher, **more)


def rows(tokens: Sequence[int], kind: RowKind = RowKind.FA) -> list[RowName]:
    chain = Chain(ROW).extended(tokens)
    return [chain.name(kind, index) for index in range(len(chain.keys))]


def of_the_pool(asked: Request, num_tokens: int) -> list[BlockStored]:
    """What vLLM publishes when it caches the prompt's beginning in every group."""
    pool = BlockPool(200, True, HASH, enable_kv_cache_events=True)
    for number, size in SIZES.items():
        count = num_tokens // size
        pool.cache_full_blocks(asked, pool.get_new_blocks(count), 0, count, size, number)
    return pool.take_events()


def take_all(events: StoreEvents) -> list[Any]:
    taken: list[Any] = []
    while some := events.next_events():
        taken += some
    return taken


def said(taken: Sequence[Any]) -> dict[int, list[int]]:
    """Hashes by group that are held after these events."""
    held: dict[int, list[int]] = {}
    for event in taken:
        assert event.medium == "STORAGE"
        assert event.locality == "LOCAL"
        for block in event.block_hashes:
            if isinstance(event, BlockStored):
                held.setdefault(event.group_idx, []).append(block)
            else:
                held[event.group_idx].remove(block)
    return held


def pieces(event: BlockStored) -> Iterator[tuple[Any, ...]]:
    """One tuple per block: its hash, the hash before it, its tokens, and its extra keys."""
    parent, size = event.parent_block_hash, event.block_size
    for number, block in enumerate(event.block_hashes):
        tokens = tuple(event.token_ids[number * size : (number + 1) * size])
        keys = None if event.extra_keys is None else event.extra_keys[number]
        yield event.group_idx, block, parent, tokens, keys, event.lora_name, event.lora_id
        parent = block


LORA = {"lora_request": LoRARequest("adapter", 3, "/nowhere")}


@pytest.mark.parametrize("more", [{}, LORA, {"cache_salt": "s"}], ids=["plain", "lora", "salt"])
def test_blocks_are_told_as_the_block_pool_tells_them(more: dict[str, Any]) -> None:
    tokens = prompt(4 * ROW + 9)
    asked, events = request(tokens, **more), make()
    names = rows(tokens) + rows(tokens, RowKind.WA)
    events.note_saving(asked, names)
    events.note_rows(names, [])
    ours = {piece for event in take_all(events) for piece in pieces(event)}
    theirs = [piece for event in of_the_pool(asked, 4 * ROW) for piece in pieces(event)]
    full = {piece for piece in theirs if piece[0] != 2}
    tails = {piece for at, piece in enumerate(one for one in theirs if one[0] == 2) if at % 4 > 1}
    assert ours == full | tails


@pytest.mark.parametrize("keeps", [16, 0])
def test_of_a_compressor_the_whole_window_is_told_though_a_row_keeps_less(keeps: int) -> None:
    """A router that knows its window alone would not count a boundary otherwise."""
    config = KVCacheConfig(100, [], [*CONFIG.kv_cache_groups, group("state", 16, 33)])
    assert LAYOUT.wa is not None
    kept = (section("state", keeps + 1, keeps),) if keeps else ()
    layout = msgspec.structs.replace(
        LAYOUT, wa=msgspec.structs.replace(LAYOUT.wa, sections=LAYOUT.wa.sections + kept)
    )
    state = event_groups(config, layout, HASH)[3]
    assert (state.group, state.row, state.window) == (3, RowKind.WA, 33)
    assert state.num_blocks() == 2, "32 tokens back"
    assert event_groups(config, layout, HASH)[:3] == event_groups(CONFIG, LAYOUT, HASH)
    without = msgspec.structs.replace(LAYOUT, wa=None)
    if not keeps:
        assert event_groups(config, without, HASH)[-1].row is RowKind.FA, "all rows there are"


def test_media_in_a_prompt_are_told_as_extra_keys() -> None:
    tokens = prompt(3 * ROW)
    position = SimpleNamespace(offset=ROW + 5, length=40)
    media = SimpleNamespace(identifier="picture", mm_position=position, data=None, modality="image")
    asked, events = request(tokens, mm_features=[media]), make()
    events.note_saving(asked, rows(tokens))
    events.note_rows(rows(tokens), [])
    ours = {piece for event in take_all(events) for piece in pieces(event)}
    theirs = {piece for event in of_the_pool(asked, 3 * ROW) for piece in pieces(event)}
    assert ours == {piece for piece in theirs if piece[0] != 2}
    assert any(piece[4] for piece in ours)


def test_every_event_is_of_one_row_and_describes_its_group() -> None:
    tokens, events = prompt(3 * ROW), make()
    events.note_hit(request(tokens), rows(tokens) + rows(tokens, RowKind.WA)[-1:])
    taken = take_all(events)
    shapes = [(e.group_idx, len(e.token_ids), e.block_size) for e in taken]
    assert shapes == [(0, ROW, 16), (1, ROW, 32)] * 3 + [(2, 32, 16)]
    assert taken[0].kv_cache_spec_kind == "full_attention"
    last = taken[-1]
    assert (last.kv_cache_spec_kind, last.kv_cache_spec_sliding_window) == ("sliding_window", 30)


def test_rows_are_told_once_they_are_committed_and_not_before() -> None:
    tokens, events = prompt(2 * ROW), make()
    asked, names = request(tokens), rows(tokens)
    events.note_saving(asked, names)
    assert events.next_events() == []
    events.note_rows(names[:1], [])
    assert len(said(take_all(events))[0]) == 4
    events.note_rows(names[:1], [])
    assert events.next_events() == []


def test_a_row_of_a_request_that_is_not_known_is_not_told() -> None:
    events = make()
    events.note_rows(rows(prompt(ROW)), rows(prompt(ROW, 1)))
    assert take_all(events) == []


def test_removals_name_exactly_what_was_told() -> None:
    tokens, events = prompt(4 * ROW), make()
    full, windowed = rows(tokens), rows(tokens, RowKind.WA)
    events.note_hit(request(tokens), full + windowed)
    before = take_all(events)
    events.note_rows([], windowed)
    after = take_all(events)
    assert all(isinstance(event, BlockRemoved) and event.group_idx == 2 for event in after)
    events.note_rows([], full[2:])
    after += take_all(events)
    held = said(before + after)
    theirs = {
        event.group_idx: event.block_hashes for event in of_the_pool(request(tokens), 2 * ROW)
    }
    assert held == {0: theirs[0], 1: theirs[1], 2: []}
    events.note_rows([], full + windowed)
    assert all(not blocks for blocks in said(before + after + take_all(events)).values())
    assert len(events) == 0


def test_a_removal_of_the_wrong_kind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the law above fails where a window's removal takes full attention too."""
    monkeypatch.setattr(module, "_BITS", {RowKind.FA: 1, RowKind.WA: 1})
    with pytest.raises((AssertionError, KeyError, ValueError)):
        test_removals_name_exactly_what_was_told()


def test_a_row_that_is_served_again_is_told_again_after_a_while() -> None:
    clock, tokens = ManualClock(1000.0), prompt(2 * ROW)
    events, asked = make(clock), request(tokens)
    events.note_hit(asked, rows(tokens))
    assert len(take_all(events)) == 4
    events.note_hit(asked, rows(tokens))
    assert take_all(events) == []
    clock.advance(module.AGAIN_S)
    events.note_hit(asked, rows(tokens))
    assert len(take_all(events)) == 4


def test_a_reset_removes_all_that_was_told_and_nothing_on_its_way_is_told_after_it() -> None:
    tokens, other, events = prompt(70 * ROW), prompt(ROW, 1), make()
    events.note_hit(request(tokens), rows(tokens))
    before = take_all(events)
    events.note_saving(request(other), rows(other))
    events.note_reset(engine_announces=False)
    events.note_rows(rows(other), [])
    after = take_all(events)
    assert all(isinstance(event, BlockRemoved) for event in after)
    assert all(not blocks for blocks in said(before + after).values())
    events.note_hit(request(tokens), rows(tokens)[:1])
    assert len(take_all(events)) == 2


def test_a_reset_that_the_engine_tells_of_is_not_told_again() -> None:
    tokens, events = prompt(3 * ROW), make()
    events.note_hit(request(tokens), rows(tokens))
    take_all(events)
    events.note_reset(engine_announces=True)
    events.note_rows([], rows(tokens))
    assert (take_all(events), len(events)) == ([], 0)
    events.note_hit(request(tokens), rows(tokens))
    assert len(take_all(events)) == 6


def test_forgotten_rows_are_told_as_removed_and_the_beginning_of_a_prompt_is_forgotten_last() -> (
    None
):
    tokens, events = prompt(4 * ROW), make(max_rows=4)
    events.note_hit(request(tokens), rows(tokens))
    taken = take_all(events)
    events.note_hit(request(tokens), rows(tokens))
    other = prompt(2 * ROW, 1)
    events.note_hit(request(other), rows(other))
    taken += take_all(events)
    assert len(events) == 4
    theirs = {
        event.group_idx: event.block_hashes for event in of_the_pool(request(tokens), 2 * ROW)
    }
    assert said(taken)[0][:8] == theirs[0]


def test_one_step_tells_a_few_rows_and_the_next_ones_the_rest() -> None:
    tokens, events = prompt(300 * ROW), make()
    events.note_hit(request(tokens), rows(tokens))
    steps = []
    while some := events.next_events():
        steps.append(len(some) // 2)
    assert sum(steps) == 300
    assert max(steps) <= module.ROWS_AT_ONCE


def test_rows_that_are_never_committed_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NOTED", 3)
    tokens, events = prompt(8 * ROW), make()
    events.note_saving(request(tokens), rows(tokens))
    events.note_rows(rows(tokens), [])
    assert len(take_all(events)) == 2 * 3


def test_a_row_whose_hashes_are_not_there_yet_is_left_out() -> None:
    tokens, events = prompt(2 * ROW), make()
    events.note_hit(request(tokens[: ROW + 40]), rows(tokens))
    assert len(take_all(events)) == 2


def test_hashes_are_bytes_where_vllm_publishes_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    tokens, events = prompt(2 * ROW), make()
    events.note_hit(request(tokens), rows(tokens))
    theirs = {
        event.group_idx: event.block_hashes for event in of_the_pool(request(tokens), 2 * ROW)
    }
    taken = take_all(events)
    events.note_rows([], rows(tokens)[1:])
    assert said(taken + take_all(events)) == {0: theirs[0][:4], 1: theirs[1][:2]}
    assert isinstance(theirs[0][0], bytes)


def test_groups_that_rows_do_not_hold_are_left_out() -> None:
    groups = [
        group("full", 16),
        group("elsewhere", 16),
        group("coarse", 48),
        group("window", 8, 30),
    ]
    found = event_groups(KVCacheConfig(100, [], groups), LAYOUT, HASH)
    assert [one.group for one in found] == [0]


def test_a_router_counts_stored_rows_as_the_store_would_serve_them() -> None:
    """Through vLLM's encoding: full attention of two rows, and the window at the first's end."""
    tokens, events = prompt(3 * ROW), make()
    caches, source = PrefixCaches(), EventSource("engine", 0, "tcp://nowhere:1", None)
    full, windowed = rows(tokens), rows(tokens, RowKind.WA)

    def hit(asked: Sequence[int]) -> tuple[int, float]:
        batch = KVEventBatch(ts=1.0, events=take_all(events))
        caches.apply_batch(source, decode_batch(msgspec.msgpack.encode(batch)))
        found = caches.lookup(asked, NOTHING).pods["engine"]
        return found.tokens, found.score

    events.note_hit(request(tokens), full[:2] + windowed[:1])
    assert hit(tokens) == (ROW, 0.5 * ROW / HASH)
    events.note_hit(request(tokens), windowed[1:2])
    assert hit(tokens) == (2 * ROW, 0.5 * 2 * ROW / HASH)
    # A prompt that parts inside the second row: the store has no row of it there.
    assert hit(tokens[: ROW + 48] + prompt(ROW, 9))[0] == ROW
    assert hit(tokens[: 2 * ROW])[0] == ROW, "the last token is computed, and rows are whole"
    events.note_rows([], windowed[1:2])
    assert hit(tokens)[0] == ROW
    events.note_reset(engine_announces=False)
    assert hit(tokens) == (0, 0.0)
