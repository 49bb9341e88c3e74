"""The tree gives the victim that an exhaustive search gives, whatever was done to it before."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.store.budget.row_tree import Place, RowTree, _Order
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.interface import StoredRow
from tests.store.budget.forest import NAMESPACES, needs, row_of

Step = tuple[str, Place, float]


class Search:
    """What :class:`RowTree` is to do, by looking at all rows each time."""

    def __init__(self) -> None:
        self.rows: dict[Place, float] = {}
        self.passed: set[Place] = set()

    def leaves(self) -> Iterator[Place]:
        for place in self.rows:
            namespace, name = place
            if place not in self.passed and not any(
                namespace == other[0] and needs(name, other[1]) for other in self.rows
            ):
                yield place

    def victim(self, kind: RowKind | None) -> Place | None:
        found = [place for place in self.leaves() if kind in (None, place[1].kind)]
        return min(found, key=self._order, default=None)

    def _order(self, place: Place) -> tuple[float, int, bool, Place]:
        name = place[1]
        return self.rows[place], -name.index, name.kind is RowKind.FA, place


def check(tree: RowTree, steps: list[Step]) -> None:
    """Do the steps with both, and compare after each."""
    search = Search()
    for what, place, at in steps:
        if what == "add":
            tree.add_row(StoredRow(*place, 1, at))
            search.rows[place] = max(at, search.rows.get(place, at))
        elif what == "touch":
            tree.note_use(place, at)
            if place in search.rows:
                search.rows[place] = max(at, search.rows[place])
        elif what == "remove":
            tree.drop_row(place)
            search.rows.pop(place, None)
            search.passed.discard(place)
        elif (victim := search.victim(None)) is not None:
            if what == "pass":
                tree.skip_row(victim)
                search.passed.add(victim)
            else:
                tree.drop_row(victim)
                del search.rows[victim]
        for kind in (None, *RowKind):
            assert tree.victim(kind) == search.victim(kind)
        assert len(tree) == len(search.rows)


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
PLACES = st.builds(
    lambda namespace, path, kind: (namespace, row_of(path, kind)),
    st.sampled_from(NAMESPACES),
    PATHS,
    st.sampled_from(RowKind),
)
STEPS = st.tuples(
    st.sampled_from(["add", "add", "add", "touch", "remove", "evict", "pass"]),
    PLACES,
    st.integers(0, 5).map(float),
)


@given(st.lists(STEPS, max_size=40))
def test_the_victim_is_the_leaf_used_longest_ago(steps: list[Step]) -> None:
    check(RowTree(), steps)


def random_steps(seed: int) -> list[Step]:
    rng = random.Random(seed)
    whats = ["add"] * 4 + ["touch", "remove", "evict", "pass"]
    steps = []
    for _ in range(60):
        path = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 5)))
        place = rng.choice(NAMESPACES), row_of(path, rng.choice(list(RowKind)))
        steps.append((rng.choice(whats), place, float(rng.randrange(6))))
    return steps


def test_evicting_everything_never_leaves_a_row_without_what_it_needs() -> None:
    rng = random.Random(7)
    names = {
        row_of(path[:depth], kind)
        for path in (tuple(rng.randrange(3) for _ in range(6)) for _ in range(40))
        for depth in range(1, 7)
        for kind in RowKind
        if kind is RowKind.FA or rng.random() < 0.3
    }
    left = set(names)
    tree = RowTree(StoredRow("ns", name, 1, rng.random()) for name in names)
    while (victim := tree.victim()) is not None:
        left.discard(victim[1])
        assert not any(needs(victim[1], other) for other in left)
        tree.drop_row(victim)
    assert not left


def test_two_files_of_one_key_do_no_harm() -> None:
    first, second = row_of((0, 1)), RowName(RowKind.FA, row_of((0, 1)).key, bytes(range(16)), 1)
    tree = RowTree(StoredRow("ns", name, 1, 1.0) for name in (first, second))
    seen = set()
    while (victim := tree.victim()) is not None:
        seen.add(victim[1])
        tree.drop_row(victim)
    assert seen == {first, second}


class IgnoresChildren(RowTree):
    def _is_leaf(self, place: Place) -> bool:
        return place[1].kind is RowKind.WA or not self._windows[place[0], place[1].key]


class IgnoresWindows(RowTree):
    def _is_leaf(self, place: Place) -> bool:
        return place[1].kind is RowKind.WA or not self._after[place[0], place[1].key]


class IgnoresUse(RowTree):
    def note_use(self, place: Place, used_at: float) -> None:
        pass


class IgnoresNamespaces(RowTree):
    def _is_leaf(self, place: Place) -> bool:
        return all(super(IgnoresNamespaces, self)._is_leaf((ns, place[1])) for ns in NAMESPACES)


class FullBeforeWindow(RowTree):
    def _order(self, place: Place) -> _Order:
        used_at, depth, is_full = super()._order(place)
        return used_at, depth, not is_full


class NewestFirst(RowTree):
    def _order(self, place: Place) -> _Order:
        used_at, depth, is_full = super()._order(place)
        return -used_at, depth, is_full


class ForgetsWhatWasFreed(RowTree):
    def drop_row(self, place: Place) -> None:
        heaps = defaultdict(list, {which: [*heap] for which, heap in self._heaps.items()})
        super().drop_row(place)
        self._heaps = heaps


MUTANTS = [
    IgnoresChildren,
    IgnoresWindows,
    IgnoresUse,
    IgnoresNamespaces,
    FullBeforeWindow,
    NewestFirst,
    ForgetsWhatWasFreed,
]


@pytest.mark.parametrize("mutant", [RowTree, *MUTANTS])
def test_a_wrong_tree_is_told(mutant: type[RowTree]) -> None:
    def run() -> None:
        for seed in range(200):
            check(mutant(), random_steps(seed))

    if mutant is RowTree:
        run()
    else:
        with pytest.raises(AssertionError):
            run()
