"""Blocks in slots: in Python and compiled the same as in a plain account of what is held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product, takewhile
from operator import truth
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdconn.router.prefix.held_blocks import POD_BITS, HeldBlocks, PythonBlocks
from tests.router.prefix.conftest import COMPILED

PLACES = (0, 1, 63, 64, 70)
HASHES = [0, 1, (1 << 64) - 1, *range(2, 60)]
Op = tuple[str, int, int, list[int], int, bool]
"""What to do, place, plane, hashes, room, whether copies count."""

OPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "remove", "clear"]),
        st.sampled_from(PLACES),
        st.integers(0, 2),
        st.lists(st.sampled_from(HASHES), max_size=50),
        st.sampled_from([10, 1_000_000]),
        st.booleans(),
    ),
    max_size=12,
)
MANY = [*range(1, 41)]
TWICE = [("store", 0, 0, MANY, 1000, True)] * 2


class Account:
    """Every block that is held, one by one: the number of copies by place, plane and hash."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[int, int, int]] = Counter()

    def store(
        self, place: int, plane: int, hashes: list[int], room: int, counts_copies: bool
    ) -> tuple[int, int]:
        stored = refused = 0
        for one in hashes:
            if self.copies[place, plane, one]:
                self.copies[place, plane, one] += counts_copies
            elif stored < room:
                self.copies[place, plane, one] = 1
                stored += 1
            else:
                refused += 1
        return stored, refused

    def remove(self, place: int, plane: int, hashes: list[int]) -> tuple[int, int]:
        removed = unknown = 0
        for one in hashes:
            copies = self.copies[place, plane, one]
            unknown += copies == 0
            removed += copies == 1
            self.copies[place, plane, one] = max(0, copies - 1)
        return removed, unknown

    def clear(self, place: int) -> dict[int, int]:
        gone = [key for key, copies in self.copies.items() if copies and key[0] == place]
        for key in gone:
            del self.copies[key]
        return dict(Counter(plane for _, plane, _ in gone))

    def num_copies(self, place: int) -> int:
        return sum(n - 1 for key, n in self.copies.items() if n and key[0] == place)

    @property
    def num_hashes(self) -> int:
        return len({one for (_, _, one), copies in self.copies.items() if copies})

    def held(self, plane: int, word: int, hashes: Sequence[int]) -> list[int]:
        """The word of each hash."""
        return [
            sum(
                1 << place % POD_BITS
                for place in PLACES
                if place // POD_BITS == word and self.copies[place, plane, one]
            )
            for one in hashes
        ]


def _words(held: HeldBlocks, plane: int, word: int, hashes: Sequence[int]) -> list[int]:
    slots = np.frombuffer(held.slots_of(hashes), np.intp)
    words: list[int] = np.frombuffer(held.held(plane, word, slots), np.uint64).tolist()
    return words


def _agrees(held: HeldBlocks, ops: Sequence[Op]) -> bool:
    """Whether all that can be asked is as in the account, after each change."""
    account = Account()
    for _ in range(2):
        held.add_word()
    assert [held.add_plane() for _ in range(3)] == [0, 1, 2]
    for what, place, plane, hashes, room, counts in ops:
        if what == "store":
            same = held.store(place, plane, hashes, room, counts) == account.store(
                place, plane, hashes, room, counts
            )
        elif what == "remove":
            same = held.remove(place, plane, hashes) == account.remove(place, plane, hashes)
        else:
            same = held.clear(place) == account.clear(place)
        same &= held.num_hashes == account.num_hashes
        same &= all(held.num_copies(one) == account.num_copies(one) for one in PLACES)
        for at, word in product(range(3), range(2)):
            same &= _words(held, at, word, HASHES) == account.held(at, word, HASHES)
        if not same:
            return False
    return True


def compiled() -> HeldBlocks:
    made: HeldBlocks = COMPILED.HeldBlocks()  # type: ignore[union-attr]
    return made


needs_compiled = pytest.mark.skipif(COMPILED is None, reason="not built")
BOTH = pytest.mark.parametrize(
    "make", [PythonBlocks, pytest.param(compiled, marks=needs_compiled)], ids=["python", "compiled"]
)


@BOTH
@given(ops=OPS)
@example(ops=[("store", 0, 0, MANY, 1000, True), ("remove", 0, 0, MANY, 0, True)])
@example(ops=[("store", 0, 0, MANY, 1000, True), ("remove", 0, 0, MANY * 2, 0, True)])
@example(ops=[*TWICE, ("remove", 0, 0, MANY, 0, True), ("clear", 0, 0, [], 0, True)])
@example(ops=[*TWICE, ("clear", 0, 0, [], 0, True), *TWICE])
@example(ops=[*TWICE, *TWICE, *[("remove", 0, 0, MANY, 0, True)] * 5])
def test_what_is_held_is_what_was_stored_and_not_removed_since(
    make: Callable[[], HeldBlocks], ops: list[Op]
) -> None:
    assert _agrees(make(), ops)


class _Careless(PythonBlocks):
    """Does not look whether a pod holds a block already when it stores many at once."""

    def _store_together(self, place: int, plane: int, hashes: Sequence[int]) -> bool:
        words = self._planes[plane][place // POD_BITS]
        before = words.copy()
        words[:] = 0
        stored = super()._store_together(place, plane, hashes)
        words |= before
        return stored


class _Deaf(PythonBlocks):
    """Keeps what it has when a pod is cleared."""

    def clear(self, place: int, /) -> dict[int, int]:
        return {}


@pytest.mark.parametrize(
    ("wrong", "ops"),
    [(_Careless, TWICE), (_Deaf, [*TWICE, ("clear", 0, 0, [], 0, True)])],
)
def test_wrong_blocks_are_noticed(wrong: type[PythonBlocks], ops: list[Op]) -> None:
    assert _agrees(PythonBlocks(), ops)
    assert not _agrees(wrong(), ops)


@BOTH
def test_slots_are_found_after_growth_and_churn(make: Callable[[], HeldBlocks]) -> None:
    """50 000 hashes of 64 bits, of which a random half goes and comes, ten times."""
    held, rng = make(), Random(3)
    held.add_word()
    held.add_plane()
    known = [rng.getrandbits(64) for _ in range(50_000)]
    there: set[int] = set()
    for _ in range(10):
        some = set(rng.sample(known, 25_000))
        fresh = [one for one in some if one not in there]
        assert held.store(0, 0, fresh, 1 << 30, True) == (len(fresh), 0)
        gone = rng.sample(sorted(there | some), 20_000)
        assert held.remove(0, 0, gone) == (20_000, 0)
        there = (there | some) - set(gone)
        assert held.num_hashes == len(there)
        assert _words(held, 0, 0, known) == [int(one in there) for one in known]


@BOTH
def test_planes_and_words_come_and_go(make: Callable[[], HeldBlocks]) -> None:
    held = make()
    held.add_word()
    first = held.add_plane()
    held.store(5, first, [7, 8], 10, True)
    held.add_word()
    second = held.add_plane()
    held.store(64, first, [8], 10, True)
    held.store(5, second, [8], 10, True)
    assert (_words(held, first, 0, [7, 8]), _words(held, first, 1, [7, 8])) == ([32, 32], [0, 1])
    held.remove(5, first, [7, 8])
    held.remove(64, first, [8])
    held.drop_plane(first)
    assert (held.num_hashes, held.num_words) == (1, 2)
    again = held.add_plane()
    assert again == first
    assert (_words(held, again, 0, [8]), _words(held, second, 0, [8])) == ([0], [32])


@BOTH
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 900), st.integers(1, 400), st.booleans()), max_size=20
    ),
    begin=st.integers(0, 900),
)
def test_leading_slots_are_those_before_the_first_unknown_hash(
    make: Callable[[], HeldBlocks], changes: list[tuple[int, int, bool]], begin: int
) -> None:
    held = _one_plane(make)
    for first, number, stores in changes:
        blocks = [*range(first + 1, first + 1 + number)]
        if stores:
            held.store(0, 0, blocks, 1 << 30, True)
        else:
            held.remove(0, 0, blocks)
    prompt = [*range(begin + 1, 1400)]
    assert _leading(held, prompt) == _one_by_one(held, prompt)


def _one_plane(make: Callable[[], HeldBlocks]) -> HeldBlocks:
    held = make()
    held.add_word()
    held.add_plane()
    return held


def _leading(held: HeldBlocks, hashes: Sequence[int]) -> list[int]:
    found: list[int] = np.frombuffer(held.leading_slots_of(hashes), np.intp).tolist()
    return found


def _one_by_one(held: HeldBlocks, hashes: Sequence[int]) -> list[int]:
    return list(takewhile(truth, np.frombuffer(held.slots_of(hashes), np.intp).tolist()))


# Rows of slots, in Python


class CountedDict(dict[int, int]):
    """Counts what it is asked."""

    asked = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


def _asked_for(held: PythonBlocks, hashes: Sequence[int]) -> int:
    """How often a look-up asks the dictionary."""
    held._slots = counted = CountedDict(held._slots)
    found = _leading(held, hashes)
    asked = counted.asked
    assert found == _one_by_one(held, hashes)
    assert len(found) == len(hashes)
    return asked


def _churned(make: Callable[[], HeldBlocks]) -> tuple[Any, list[int]]:
    """Ten prompts of 1000 blocks went through a pod that holds two, evicted from their ends."""
    held = _one_plane(make)
    prompts = [[*range(first, first + 1000)] for first in range(1, 10_001, 1000)]
    for number, prompt in enumerate(prompts):
        if number >= 2:
            held.remove(0, 0, prompts[number - 2][::-1])
        held.store(0, 0, prompt, 1 << 30, True)
    return held, prompts[-1]


def test_a_long_prompt_is_found_in_rows_of_slots() -> None:
    held, prompt = _churned(PythonBlocks)
    assert _asked_for(held, prompt) < 100
    # The control: in another order there are no rows, and every hash is asked for.
    assert _asked_for(held, prompt[::-1]) >= 1000


@BOTH
def test_the_leading_slots_end_at_a_removed_block(make: Callable[[], HeldBlocks]) -> None:
    """In Python its slot still names its hash."""
    held, prompt = _churned(make)
    held.remove(0, 0, [prompt[700]])
    assert len(_leading(held, prompt)) == 700
    held.store(0, 0, [20_000], 1, True)  # gets that slot
    assert len(_leading(held, prompt)) == 700
    held.store(0, 0, [prompt[700]], 1, True)
    assert len(_leading(held, prompt)) == 1000
