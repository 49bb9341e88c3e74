"""Blocks in a store: they count beside those on the GPU, weigh less, and come in whole rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.router.events.caches import PrefixCaches
from pdconn.router.events.subscriber import EventSource
from pdconn.router.prefix.block_index import Index
from pdconn.router.prefix.explain import explain, stored_blocks
from pdconn.router.prefix.groups import OUTSIDE, STORED, GroupSpec
from pdconn.router.prefix.kv_events import decode_batch
from pdconn.router.prefix.score import DEFAULT_WEIGHTS, Hit, Prompt, Scorer

pytestmark = pytest.mark.usefixtures("in_both")

HASHES = list(range(1, 17))
"""Of 16 blocks of 16 tokens; a stored row has four."""
PROMPT = Prompt(HASHES, 16 * 16 + 1, 16)
FULL = GroupSpec("full_attention", None, 16)
WINDOW = GroupSpec("sliding_window", 32, 16)


def index(gpu: Sequence[int] = (), stored: Sequence[int] = (), *, row: int | None = 64) -> Index:
    """A pod of one group with these blocks, by their numbers."""
    made = Index()
    made.learn_group("a", 0, FULL)
    made.store_blocks("a", 0, "gpu", [HASHES[one] for one in gpu])
    made.store_blocks("a", 0, STORED, [HASHES[one] for one in stored])
    if row is not None:
        made.learn_row("a", row)
    return made


def hit(made: Index, prompt: Prompt = PROMPT) -> Hit:
    return Scorer(made).score(prompt)["a"]


def test_a_hit_goes_on_from_the_gpu_into_the_store() -> None:
    assert hit(index(range(3), range(8))) == Hit(8, 128, 3 + 5 * 0.5, loaded_tokens=80)


def test_a_block_on_both_weighs_as_on_the_gpu() -> None:
    assert hit(index(range(8), range(8))) == Hit(8, 128, 8.0)
    assert hit(index((), range(8))) == Hit(8, 128, 4.0, loaded_tokens=128)
    assert DEFAULT_WEIGHTS[STORED] < DEFAULT_WEIGHTS["cpu"] < DEFAULT_WEIGHTS["gpu"]


@pytest.mark.parametrize("medium", sorted(OUTSIDE))
def test_whatever_lies_outside_the_engine_is_loaded_and_weighs_less(medium: str) -> None:
    """A bucket and a disk weighed as the GPU's memory, and counted as what an engine can lend."""
    made = index(range(2), row=None)
    made.store_blocks("a", 0, medium, HASHES[2:8])
    found = hit(made)
    assert (found.tokens, found.loaded_tokens, found.own_tokens) == (128, 96, 32)
    assert found.score == 2 + 6 * DEFAULT_WEIGHTS[medium] < 2 + 6 * DEFAULT_WEIGHTS["cpu"]
    control = index(range(2), row=None)
    control.store_blocks("a", 0, "cpu", HASHES[2:8])
    assert hit(control).own_tokens == 128


def test_a_removal_from_one_medium_leaves_the_other() -> None:
    made = index(range(8), range(8))
    made.remove_blocks("a", 0, STORED, HASHES[:8])
    assert hit(made) == Hit(8, 128, 8.0)
    made = index(range(8), range(8))
    made.remove_blocks("a", 0, "gpu", HASHES[:8])
    assert hit(made) == Hit(8, 128, 4.0, loaded_tokens=128)
    made.remove_blocks("a", 0, STORED, HASHES[:8])
    assert (hit(made).tokens, made.pods["a"].num_blocks, made.num_hashes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("gpu", "stored", "tokens"),
    [(0, 7, 64), (0, 3, 0), (5, 7, 80), (5, 8, 128), (7, 4, 112), (7, 0, 112)],
)
def test_a_hit_that_needs_stored_blocks_ends_at_the_end_of_a_row(
    gpu: int, stored: int, tokens: int
) -> None:
    assert hit(index(range(gpu), range(stored))).tokens == tokens


def test_without_a_known_row_stored_blocks_count_like_others() -> None:
    """Negative control of the law above."""
    assert hit(index((), range(7), row=None)).tokens == 112


def test_a_row_at_the_prompts_very_end_is_not_loaded() -> None:
    """The engine computes the last token itself, and a row is loaded whole."""
    made = index((), range(8))
    assert hit(made, Prompt(HASHES[:8], 128, 16)).tokens == 64
    assert hit(made, Prompt(HASHES[:8], 129, 16)).tokens == 128


def test_windows_count_on_any_medium() -> None:
    made = index(range(2), range(8))
    made.learn_group("a", 1, WINDOW)
    assert hit(made).tokens == 0
    made.store_blocks("a", 1, "gpu", HASHES[:2])
    assert hit(made).tokens == 32
    made.store_blocks("a", 1, STORED, HASHES[6:8])
    assert hit(made).tokens == 128
    made.remove_blocks("a", 1, STORED, HASHES[7:8])
    made.store_blocks("a", 1, "gpu", HASHES[7:8])
    assert hit(made).tokens == 128


def cut(made: Index) -> tuple[Any, ...]:
    found = explain(made, PROMPT, "a", hit(made))
    assert found is not None
    return found.group, found.kind, found.missing_token, found.why


def test_it_is_explained_what_cut_a_hit_on_stored_blocks() -> None:
    assert cut(index((), range(7))) == (
        None, "stored", 64, "a hit on stored blocks ends at a multiple of 64 tokens, a stored row",
    )  # fmt: skip
    assert cut(index((), range(8)))[:3] == (0, "full_attention", 128)
    made = index(range(5), range(5))
    made.learn_group("a", 1, WINDOW)
    made.store_blocks("a", 1, STORED, HASHES[:5])
    assert cut(made) == (
        1, "sliding_window", 64,
        "a hit that ends at token 80 needs blocks 3 to 4, and block 4 is missing outside the store",
    )  # fmt: skip


def test_it_is_told_how_much_of_a_hit_is_stored_only() -> None:
    made = index(range(3), range(1, 8))
    assert stored_blocks(made, PROMPT, "a", hit(made)) == 5
    assert stored_blocks(made, PROMPT, "a", Hit(0, 0, 0.0)) == 0
    assert made.pods["a"].num_stored == 7
    made.clear_pod("a")
    assert made.pods["a"].num_stored == 0


def stored_event(blocks: slice, group: int = 0, **fields: Any) -> dict[str, Any]:
    chosen = HASHES[blocks]
    return {
        "type": "BlockStored", "block_hashes": chosen, "parent_block_hash": None,
        "token_ids": [0] * 16 * len(chosen), "block_size": 16, "medium": "STORAGE",
        "group_idx": group, "kv_cache_spec_kind": "full_attention", "locality": "LOCAL", **fields,
    }  # fmt: skip


def feed(made: Index, *events: dict[str, Any]) -> None:
    for event in decode_batch(msgspec.msgpack.encode([1.0, list(events), None])).events:
        made.apply_event("a", event)


def test_the_row_is_learned_from_events_of_full_attention_alone() -> None:
    made = Index()
    feed(made, stored_event(slice(0, 2), medium="GPU"))
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}
    feed(made, stored_event(slice(2, 4), group=1, **window))
    assert made.pods["a"].row_tokens is None
    feed(made, stored_event(slice(0, 4)), stored_event(slice(4, 8)))
    assert made.pods["a"].row_tokens == 64
    feed(made, stored_event(slice(8, 16)))
    assert made.pods["a"].row_tokens == 64


def test_a_pod_that_is_learned_anew_has_no_stored_blocks_either() -> None:
    caches, source = PrefixCaches(), EventSource("a", 0, "tcp://nowhere:1", None)
    events = [stored_event(slice(0, 4)), stored_event(slice(0, 4), medium="GPU")]
    batch = decode_batch(msgspec.msgpack.encode([1.0, events, None]))
    caches.apply_batch(source, batch)
    assert set(caches.index.planes()) == {(0, STORED), (0, "gpu")}
    caches.drop_pod(source, "a gap")
    assert (set(caches.index.planes()), caches.index.pods["a"].row_tokens) == (set(), None)
    caches.apply_batch(source, batch)
    cleared = msgspec.msgpack.encode([2.0, [{"type": "AllBlocksCleared"}], None])
    caches.apply_batch(source, decode_batch(cleared))
    assert caches.index.num_hashes == 0


# --- Any order of events ------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear"]),
        st.integers(0, 1),
        st.sampled_from(["GPU", "CPU", "STORAGE"]),
        st.integers(0, 15),
        st.integers(1, 16),
    ),
    max_size=30,
)
Steps = list[tuple[str, int, str, int, int]]


def replay(made: Index, steps: Steps) -> set[tuple[int, str, int]]:
    """Feed events, and count (group, medium, hash) beside; only the GPU holds copies."""
    held: Counter[tuple[int, str, int]] = Counter()
    for what, group, medium, first, count in steps:
        blocks = slice(first, first + count)
        keys = {(group, medium.lower(), block) for block in HASHES[blocks]}
        if what == "store":
            held = held + Counter(keys) if medium == "GPU" else held | Counter(keys)
            feed(made, stored_event(blocks, group, medium=medium))
        elif what == "remove":
            held -= Counter(keys)
            removed = {"type": "BlockRemoved", "medium": medium, "group_idx": group}
            feed(made, removed | {"block_hashes": HASHES[blocks]})
        elif first == 0:
            held.clear()
            feed(made, {"type": "AllBlocksCleared"})
    return set(held)


def agrees(made: Index, steps: Steps) -> bool:
    made.add_pod("a")
    held = replay(made, steps)
    found = made.held_by("a", HASHES)
    media = {(group, medium, block) for (group, medium), some in found.items() for block in some}
    pod = made.pods["a"]
    stored = sum(medium == STORED for _, medium, _ in held)
    return (media, pod.num_blocks, pod.num_stored) == (held, len(held), stored)


@given(STEPS)
def test_each_medium_holds_what_was_stored_there_and_not_removed_since(steps: Steps) -> None:
    assert agrees(Index(), steps)


class _AllMedia(Index):
    """A removal from the store takes the block from the GPU too."""

    def remove_blocks(
        self, name: str, group: int | None, medium: str, hashes: Sequence[int]
    ) -> None:
        gone = list(hashes)
        super().remove_blocks(name, group, medium, gone)
        super().remove_blocks(name, group, "gpu", gone)


def test_an_index_that_drops_the_gpu_with_the_store_is_noticed() -> None:
    steps: Steps = [("store", 0, medium, 0, 4) for medium in ("GPU", "STORAGE")]
    steps.append(("remove", 0, "STORAGE", 0, 4))
    assert agrees(Index(), steps)
    assert not agrees(_AllMedia(), steps)
