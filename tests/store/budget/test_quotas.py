"""Quotas of tenants: nobody is pushed below his own, and one who floods the store takes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdconn.store.budget import root_budget
from pdconn.store.budget.accounts import Accounts
from pdconn.store.budget.quotas import (
    MOST_NAMED,
    NAMED_FRACTION,
    NO_TENANT,
    OTHERS,
    TenantCounts,
    TenantQuota,
    kept_by_each,
    tenants_above,
)
from pdconn.store.budget.root_budget import Evictor
from pdconn.store.budget.row_tree import RowTree
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.interface import StoredPart, StoredRow
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.budget.forest import key_of, needs, row_of
from tests.store.budget.roots import SIZES

SIZE = SIZES[RowKind.FA]
CAPACITY = 64 * SIZE
TENANTS = tuple(f"tenant-{number}".encode() for number in range(4))
holdings = st.dictionaries(st.binary(max_size=4), st.integers(1, 1000), min_size=1, max_size=8)


# What each keeps


@given(holdings, st.integers(1, 4000), st.integers(0, 1500))
def test_there_is_always_one_to_take_from_and_what_all_keep_has_room(
    held: dict[bytes, int], freed: int, quota: int
) -> None:
    kept = kept_by_each(held, freed, quota)
    remaining = max(0, sum(held.values()) - freed)
    assert tenants_above(held, kept)
    assert 0 <= kept <= quota
    assert sum(min(nbytes, kept) for nbytes in held.values()) <= remaining


@given(holdings, st.integers(1, 4000), st.integers(0, 1500))
def test_each_keeps_its_quota_where_there_is_room_for_all_of_them(
    held: dict[bytes, int], freed: int, quota: int
) -> None:
    kept = kept_by_each(held, freed, quota)
    remaining = max(0, sum(held.values()) - freed)
    if sum(min(nbytes, quota) for nbytes in held.values()) <= remaining:
        assert kept == quota
    else:  # as much as there is: one byte more for each is too much
        assert sum(min(nbytes, kept + 1) for nbytes in held.values()) > remaining


# The tree


def place_of(tenant: int, *path: int, kind: RowKind = RowKind.FA) -> tuple[str, RowName]:
    name = replace(row_of((tenant, *path), kind), tenant=TENANTS[tenant])
    return "ns", replace(name, index=name.index - 1, parent=key_of((tenant, *path)[:-1]))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "drop", "use"]),
            st.integers(0, 3),
            st.lists(st.integers(0, 1), min_size=1, max_size=3),
            st.sampled_from(RowKind),
            st.integers(0, 50),
        ),
        max_size=60,
    ),
    st.sets(st.sampled_from(TENANTS), min_size=1),
)
def test_the_victim_is_the_oldest_leaf_of_the_tenants_named(
    steps: list[tuple[str, int, list[int], RowKind, int]], tenants: set[bytes]
) -> None:
    tree = RowTree(by_tenant=True)
    rows: dict[tuple[str, RowName], float] = {}
    for what, tenant, path, kind, at in steps:
        place = place_of(tenant, *path, kind=kind)
        if what == "add":
            tree.add_row(StoredRow(*place, 7, float(at)))
            rows[place] = max(rows.get(place, 0.0), float(at))
        elif what == "use":
            tree.note_use(place, float(at))
            if place in rows:
                rows[place] = max(rows[place], float(at))
        elif not any(needs(place[1], other[1]) for other in rows):
            tree.drop_row(place)
            rows.pop(place, None)
        for among in (None, tenants):
            leaves = [
                (used, -one[1].index, one[1].kind is RowKind.FA, one)
                for one, used in rows.items()
                if not any(needs(one[1], other[1]) for other in rows)
                and (among is None or one[1].tenant in among)
            ]
            expected = min(leaves)[3] if leaves else None
            assert tree.victim(None, among) == expected
        for of_kind in (None, RowKind.WA):
            held: dict[bytes, int] = {}
            for _, name in rows:
                if of_kind in (None, name.kind):
                    held[name.tenant] = held.get(name.tenant, 0) + 7
            assert dict(tree.held_bytes(of_kind)) == held


# A root


class Root:
    """Tenants that save prompts of one row, and use them, in a root of 64 rows."""

    def __init__(self, path: Path, quota: int | None, wa_share: float | None = None) -> None:
        self.now = 0.0
        self.rows = MemoryRows(lambda: self.now)
        self.shelf = MemoryShelf(self.rows)
        self.accounts = Accounts(path, "ours", CAPACITY)
        self.accounts.recount(self.shelf)
        self.evictor = Evictor(self.accounts, wa_share, self.clock, self.clock, quota)
        self.low: dict[bytes, int] = {}

    def clock(self) -> float:
        return self.now

    def held(self) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for row in self.shelf.rows():
            found[row.name.tenant] = found.get(row.name.tenant, 0) + row.nbytes
        return found

    def ask(self, tenant: int, prompt: int) -> bool:
        """Whether the prompt's row is there; it is saved if not."""
        self.now += 1.0
        name = RowName(RowKind.FA, key_of((tenant, prompt)), bytes(16), 0, TENANTS[tenant])
        if self.shelf.has("ns", name):
            self.shelf.touch("ns", [name])
            return True
        while self.accounts.reserve(SIZE) < SIZE:
            before = self.held()
            # Kept rows go by a listing that is made anew.
            found = self.evictor.evict_rows(self.shelf) or self.evictor.evict_rows(self.shelf)
            gone = [row.tenant for _, row in found]
            assert gone, "nothing is freed"
            after = self.held()
            for each in set(gone):
                self.low[each] = min(self.low.get(each, CAPACITY), after.get(each, 0))
                assert after.get(each, 0) < before[each]
        self.shelf.begin("ours", "p", SIZE)
        part = StoredPart("ours", "p", SIZE)
        assert self.accounts.commit_row(self.shelf, part, StoredRow("ns", name, SIZE, self.now))
        return False

    def close(self) -> None:
        self.evictor.close()
        self.accounts.close()


MakeRoot = Callable[[int | None], Root]


@pytest.fixture
def make_root(tmp_path: Path) -> Iterator[MakeRoot]:
    """Makes empty roots of a quota."""
    made: list[Root] = []

    def make(quota: int | None) -> Root:
        made.append(Root(tmp_path / f"{len(made)}", quota))
        return made[-1]

    yield make
    for root in made:
        root.close()


def hit_share(root: Root, *, flood: int, seed: int) -> float:
    """Hits of tenant 1, which uses 20 prompts, while tenant 0 saves ``flood`` new ones for each."""
    rng, new, hits, asked = random.Random(seed), 1000, 0, 0
    for round_ in range(400):
        for _ in range(flood):
            root.ask(0, new)
            new += 1
        hit = root.ask(1, rng.randrange(20))
        if round_ >= 100:
            hits += hit
            asked += 1
    return hits / asked


@pytest.mark.parametrize("flood", [1, 5, 20])
def test_a_tenant_that_floods_the_store_costs_another_no_hits(
    make_root: MakeRoot, flood: int
) -> None:
    alone = hit_share(make_root(24 * SIZE), flood=0, seed=flood)
    beside = hit_share(make_root(24 * SIZE), flood=flood, seed=flood)
    assert alone - beside <= 0.02


def test_without_a_quota_it_would(make_root: MakeRoot) -> None:
    """The control: the one used longest ago goes, whoever's it is."""
    alone = hit_share(make_root(None), flood=0, seed=5)
    beside = hit_share(make_root(None), flood=5, seed=5)
    assert alone - beside > 0.2


def lows(root: Root, seed: int) -> dict[bytes, int]:
    """The least that evictions have left to each of three tenants of drawn demand."""
    rng, new = random.Random(seed), 0
    for _ in range(1500):
        tenant = rng.choice([0, 0, 0, 0, 1, 2])
        if rng.random() < 0.5:
            new += 1
            root.ask(tenant, new)
        else:
            root.ask(tenant, rng.randrange(max(1, new // 2)))
    return root.low


@pytest.mark.parametrize("quota", [4 * SIZE, 15 * SIZE + 3, 20 * SIZE])
def test_a_quota_is_held_to_a_row(make_root: MakeRoot, quota: int) -> None:
    """No eviction leaves one with less than his quota but a row."""
    found = lows(make_root(quota), quota)
    assert len(found) == 3, "each has lost rows"
    assert min(found.values()) > quota - SIZE


def test_an_evictor_that_takes_of_all_does_not_hold_it(
    make_root: MakeRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(root_budget, "tenants_above", lambda held, kept: list(held))
    assert min(lows(make_root(15 * SIZE), 15 * SIZE).values()) < 13 * SIZE


def test_what_tenants_hold_is_known_before_there_is_anything_to_evict(make_root: MakeRoot) -> None:
    root = make_root(4 * SIZE)
    for number in range(6):
        root.ask(number % 2, number)
    assert root.evictor.bytes_by_label() == {}
    assert root.evictor.evict_rows(root.shelf) == []
    expected = {TENANTS[0].hex(): 3 * SIZE, TENANTS[1].hex(): 3 * SIZE, OTHERS: 0, NO_TENANT: 0}
    assert root.evictor.bytes_by_label() == expected
    assert make_root(None).evictor.bytes_by_label() == {}


def test_quotas_for_which_there_is_no_room_become_even_shares(make_root: MakeRoot) -> None:
    root = make_root(CAPACITY)
    for number in range(600):
        root.ask(number % 4 if number < 80 else 0, number)
    held = root.held()
    # What the evictor keeps free is a sixteenth of the capacity.
    assert min(held.values()) >= (CAPACITY * 15 // 16) // 4 - 2 * SIZE
    assert max(held.values()) <= (CAPACITY * 15 // 16) // 4 + 5 * SIZE


def test_windows_above_their_share_are_taken_of_who_has_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_budget, "HEADROOM", 1 << 20)
    root = Root(tmp_path, 40 * SIZE, wa_share=8 / 64)
    nbytes = SIZES[RowKind.WA]
    for tenant, count in ((1, 4), (0, 20)):
        for prompt in range(count):
            root.now += 1.0
            name = RowName(RowKind.WA, key_of((tenant, prompt)), bytes(16), 0, TENANTS[tenant])
            assert root.accounts.reserve(nbytes) == nbytes
            root.shelf.begin("ours", "p", nbytes)
            row = StoredRow("ns", name, nbytes, root.now)
            assert root.accounts.commit_row(root.shelf, StoredPart("ours", "p", nbytes), row)
    gone = [name.tenant for _, name in root.evictor.evict_rows(root.shelf)]
    root.close()
    assert gone == [TENANTS[0]] * 8, "the other's are older, and fewer than an even share"


def test_one_who_keeps_all_that_he_has_costs_another_nothing_below_the_quota(
    make_root: MakeRoot,
) -> None:
    root = make_root(20 * SIZE)
    for number in range(18):
        root.ask(1, number)
    for number in range(1000, 1200):
        root.ask(0, number)
        rows = [row.name for row in root.shelf.rows() if row.name.tenant == TENANTS[0]]
        root.shelf.touch("ns", rows, root.now + 3600.0)
    assert root.held()[TENANTS[1]] == 18 * SIZE


# Names


def test_a_bounded_number_of_tenants_is_named_and_the_rest_is_one() -> None:
    quota = TenantQuota(1)
    rng = random.Random(1)
    labels = set()
    for step in range(300):
        held = {rng.randbytes(8): rng.randrange(1, 10_000) for _ in range(rng.randrange(1, 40))}
        held |= {b"": step}
        found = quota.bytes_by_label({one: nbytes for one, nbytes in held.items() if nbytes})
        assert sum(found.values()) == sum(held.values())
        assert found[NO_TENANT] == step
        labels |= found.keys()
    assert len(labels) == MOST_NAMED + 2
    assert {NO_TENANT, OTHERS} <= labels


def test_counts_of_a_bounded_number_of_tenants_have_their_names() -> None:
    tenants, large = TenantCounts(), TENANTS[0][:8]
    rng = random.Random(3)
    for number in range(20_000):
        tenant = rng.choice([large, b"", number.to_bytes(8)])
        tenants.add_request(tenant)
        tenants.add("hits", tenant, 2)
    counts = tenants.counts
    assert counts.total() == 40_000
    assert counts.keys() == {f"hits/{large.hex()}", f"hits/{NO_TENANT}", f"hits/{OTHERS}"}
    assert counts[f"hits/{large.hex()}"] > 10_000
    assert counts[f"hits/{NO_TENANT}"] > 10_000
    assert counts[f"hits/{OTHERS}"] > 10_000
    assert len(tenants._requests) <= 2 + MOST_NAMED * NAMED_FRACTION


def test_many_small_tenants_do_not_take_the_names_of_large_ones() -> None:
    quota = TenantQuota(1)
    small = {number.to_bytes(8): 10 for number in range(1000)}
    assert quota.bytes_by_label(small).keys() == {NO_TENANT, OTHERS}
    found = quota.bytes_by_label({**small, TENANTS[0][:8]: 5000})
    assert found[TENANTS[0][:8].hex()] == 5000
    assert found[OTHERS] == 10_000
