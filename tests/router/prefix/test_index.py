"""What the index takes for held: exactly what an engine has not removed since."""

from __future__ import annotations

import pytest

from pdconn.router.prefix.block_index import Index
from tests.fakes.event_loop import in_loop
from tests.fakes.routed import ASKED, PROMPT, fleet

pytestmark = pytest.mark.usefixtures("in_both")


def test_a_block_is_held_until_its_last_copy_is_gone() -> None:
    index = Index()
    index.store_blocks("a", 0, "gpu", [1, 2])
    index.store_blocks("a", 0, "gpu", [1, 2])
    index.store_blocks("a", 1, "gpu", [1])
    index.store_blocks("a", 0, "gpu", [1])
    assert index.pods["a"].num_blocks == 3
    for _ in range(2):
        index.remove_blocks("a", 0, "gpu", [1])
        assert index.held_by("a", [1, 2]) == {(0, "gpu"): [1, 2], (1, "gpu"): [1]}
    index.remove_blocks("a", 0, "gpu", [1])
    assert index.held_by("a", [1, 2]) == {(0, "gpu"): [2], (1, "gpu"): [1]}
    index.clear_pod("a")
    index.store_blocks("a", 0, "gpu", [2])
    index.remove_blocks("a", 0, "gpu", [2])
    assert (index.num_hashes, list(index.planes()), index.num_copies("a")) == (0, [], 0)


def test_a_store_has_no_copies() -> None:
    """What two engines report of one shelf, or one engine reports twice, is one row."""
    index = Index()
    index.store_blocks("a", 0, "storage", [1])
    index.store_blocks("a", 0, "storage", [1])
    index.remove_blocks("a", 0, "storage", [1])
    assert index.num_hashes == 0


def test_a_block_that_may_be_repeated_is_gone_with_one_removal() -> None:
    """vLLM's ``full`` report mode repeats what is held; a client can ask an engine for it."""
    index = Index(counts_copies=False)
    index.store_blocks("a", 0, "gpu", [1, 2])
    index.store_blocks("a", 0, "gpu", [1, 2])
    assert index.pods["a"].num_blocks == 2
    index.remove_blocks("a", 0, "gpu", [1])
    assert index.held_by("a", [1, 2]) == {(0, "gpu"): [2]}
    index.remove_blocks("a", 0, "gpu", [1])  # the other copy, if there was one
    assert index.pods["a"].unknown_removals == 1
    index.remove_blocks("a", 0, "gpu", [2])
    assert (index.num_hashes, list(index.planes())) == (0, [])


@pytest.mark.parametrize(
    ("allow_xargs", "held"), [((), 320), (("kv_cache_report_mode",), 0)], ids=["copies", "repeats"]
)
@in_loop
async def test_what_an_engine_tells_again_is_a_copy_or_a_repeat(allow_xargs, held) -> None:
    """A repeat that counts as a copy draws prompts to an engine that computes all of them."""
    async with fleet(allow_xargs=allow_xargs) as f:
        pod = f.pod(f.prefill[0])
        await pod.store(PROMPT)
        await pod.store(PROMPT)
        await f.events_applied()
        assert (await f.ask(ASKED)).hit_tokens(f.prefill[0].url) == 320
        await pod.remove(PROMPT)
        await f.events_applied()
        assert (await f.ask(ASKED)).hit_tokens(f.prefill[0].url) == held


def test_slots_are_used_again_and_found_after_growth() -> None:
    index = Index()
    many = [*range(1, 5001)]
    index.store_blocks("a", 0, "gpu", many)
    index.remove_blocks("a", 0, "gpu", many[:3000])
    index.store_blocks("b", 0, "gpu", [*range(6000, 10_000)])
    assert index.slots_of([*many[3000:], *range(6000, 10_000)]).max() <= 6000
    assert index.held_by("a", many) == {(0, "gpu"): many[3000:]}
    assert index.held_by("b", [1, 6000, 9999]) == {(0, "gpu"): [6000, 9999]}


def test_the_leading_slots_end_at_the_first_unknown_hash() -> None:
    index = Index()
    index.store_blocks("a", 0, "gpu", [1, 2, 4])
    assert index.leading_slots_of([1, 2, 3, 4]).tolist() == index.slots_of([1, 2]).tolist()
    assert len(index.leading_slots_of([3, 1])) == 0
