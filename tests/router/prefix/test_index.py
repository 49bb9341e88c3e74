"""What the index takes for held: exactly what an engine has not removed since."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import truth
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdconn.router.prefix.block_index import Index, Plane, Pod
from tests.fakes.event_loop import in_loop
from tests.fakes.routed import ASKED, PROMPT, fleet


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
    assert (index.num_hashes, list(index.planes()), index.pods["a"].copies) == (0, [], {})


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


HELD = st.lists(st.integers(1, 60), max_size=50)
OPS = st.lists(
    st.tuples(
        st.booleans(),
        st.sampled_from("ab"),
        st.integers(0, 1),
        st.sampled_from(["gpu", "fs"]),
        HELD,
    ),
    max_size=12,
)
APART = [*range(1, 41)]


def _known(index: Index) -> object:
    """Everything that an index knows, without the numbers of its slots."""
    pods = {
        name: (
            index.held_by(name, range(1, 61)), pod.num_blocks, pod.num_stored,
            sum(pod.copies.values()), pod.refused, pod.unknown_removals,
        )
        for name, pod in index.pods.items()
    }  # fmt: skip
    return pods, index.num_hashes, sorted(index.planes(), key=str)


def _agree(together: Index, ops: Sequence[tuple[bool, str, int, str, list[int]]]) -> bool:
    """Whether an index that may process lists at once knows the same as one by one."""
    by_one = Index(max_blocks=together._max_blocks)
    for stores, name, group, medium, hashes in ops:
        for index, blocks in ((together, hashes), (by_one, iter(hashes))):
            change = index.store_blocks if stores else index.remove_blocks
            change(name, group, medium, blocks)
    return _known(together) == _known(by_one)


@given(OPS, st.sampled_from([30, 4_000_000]))
@example([(True, "a", 0, "gpu", APART), (False, "a", 0, "gpu", APART)], 4_000_000)
@example([(True, "a", 0, "gpu", APART), (False, "a", 0, "gpu", APART * 2)], 4_000_000)
def test_many_blocks_at_once_are_the_same_as_one_by_one(ops: Any, max_blocks: int) -> None:
    assert _agree(Index(max_blocks), ops)


def test_a_copy_that_is_processed_at_once_is_noticed() -> None:
    """The control: without the look at what the pod holds, a copy would count as a block."""

    class Careless(Index):
        def _store_together(self, pod: Pod, plane: Plane, hashes: list[int]) -> bool:
            before = self._planes[plane][0].copy()
            self._planes[plane][0][:] = 0
            stored = super()._store_together(pod, plane, hashes)
            self._planes[plane][0] |= before
            return stored

    ops = [(True, "a", 0, "gpu", APART)] * 2
    assert _agree(Index(), ops)
    assert not _agree(Careless(), ops)


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


def _one_by_one(index: Index, hashes: Sequence[int]) -> list[int]:
    """The leading slots, each from the dictionary."""
    return list(takewhile(truth, index.slots_of(hashes).tolist()))


class CountedDict(dict[int, int]):
    """Counts what it is asked."""

    asked = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


def _asked_for(index: Index, hashes: Sequence[int]) -> int:
    """How often a look-up asks the dictionary."""
    index._slots = counted = CountedDict(index._slots)
    found = index.leading_slots_of(hashes)
    asked = counted.asked
    assert found.tolist() == _one_by_one(index, hashes)
    assert len(found) == len(hashes)
    return asked


def _churned() -> tuple[Index, list[int]]:
    """Ten prompts of 1000 blocks went through a pod that holds two, evicted from their ends."""
    index = Index()
    prompts = [[*range(first, first + 1000)] for first in range(1, 10_001, 1000)]
    for number, prompt in enumerate(prompts):
        if number >= 2:
            index.remove_blocks("a", 0, "gpu", prompts[number - 2][::-1])
        index.store_blocks("a", 0, "gpu", prompt)
    return index, prompts[-1]


def test_a_long_prompt_is_found_in_rows_of_slots() -> None:
    index, prompt = _churned()
    assert _asked_for(index, prompt) < 100
    # The control: in another order there are no rows, and every hash is asked for.
    assert _asked_for(index, prompt[::-1]) >= 1000


def test_a_row_of_slots_ends_at_a_removed_block() -> None:
    """Its slot still names its hash."""
    index, prompt = _churned()
    index.remove_blocks("a", 0, "gpu", [prompt[700]])
    assert len(index.leading_slots_of(prompt)) == 700
    index.store_blocks("a", 0, "gpu", [20_000])  # gets that slot
    assert len(index.leading_slots_of(prompt)) == 700
    index.store_blocks("a", 0, "gpu", [prompt[700]])
    assert len(index.leading_slots_of(prompt)) == 1000


@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 400), st.booleans()), max_size=20),
    st.integers(0, 900),
)
def test_leading_slots_are_those_of_the_dictionary(
    changes: list[tuple[int, int, bool]], begin: int
) -> None:
    index = Index()
    for first, number, stores in changes:
        change = index.store_blocks if stores else index.remove_blocks
        change("a", 0, "gpu", [*range(first + 1, first + 1 + number)])
    prompt = [*range(begin + 1, 1400)]
    assert index.leading_slots_of(prompt).tolist() == _one_by_one(index, prompt)
