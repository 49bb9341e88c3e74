"""An allowance: ready bytes follow demand, and never what is not reserved."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdconn.store.budget.accounts import Accounts
from pdconn.store.budget.root_budget import Allowance
from pdconn.store.store_errors import ShelfFailure
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf

CAPACITY = 1 << 20
ROW = 1 << 10


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[Accounts]:
    accounts = Accounts(tmp_path, "ours", CAPACITY)
    accounts.recount(MemoryShelf(MemoryRows()))
    yield accounts
    accounts.close()


def test_nothing_is_given_before_it_is_reserved(accounts: Accounts) -> None:
    allowance = Allowance(ROW)
    assert not allowance.room.take_amount(1)
    allowance.top_up(accounts)
    assert allowance.room.take_amount(ROW)
    assert accounts.usage().reserved == allowance.ready + ROW


def test_what_is_missed_makes_it_grow_and_idling_makes_it_shrink(accounts: Accounts) -> None:
    allowance = Allowance(ROW)
    allowance.top_up(accounts)
    usual = allowance.ready
    assert usual == CAPACITY // 16
    for _ in range(10):
        assert not allowance.room.take_amount(CAPACITY)
        allowance.top_up(accounts)
    assert allowance.ready == CAPACITY // 4
    for _ in range(200):
        allowance.top_up(accounts)
    assert allowance.ready <= usual * 5 // 4
    assert accounts.usage().reserved == allowance.ready


def test_many_writers_leave_room_for_rows(accounts: Accounts, tmp_path: Path) -> None:
    engines = [Accounts(tmp_path, f"w{number}", CAPACITY) for number in range(8)]
    allowances = [Allowance(CAPACITY // 8) for _ in engines]
    for _ in range(3):
        for allowance, engine in zip(allowances, engines, strict=True):
            allowance.top_up(engine)
    assert accounts.usage().reserved <= CAPACITY // 2
    assert all(allowance.ready for allowance in allowances)
    for engine in engines:
        engine.close()


def test_a_small_root_gives_at_least_the_least_where_half_of_it_has_room(tmp_path: Path) -> None:
    with_rows = Accounts(tmp_path, "ours", 3 * ROW)
    with_rows.recount(MemoryShelf(MemoryRows()))
    allowance = Allowance(ROW)
    allowance.top_up(with_rows)
    assert allowance.room.take_amount(ROW)
    with_rows.close()


def test_what_cannot_be_released_stays_ready(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowance = Allowance(ROW)
    allowance.top_up(accounts)
    accounts.reserve(CAPACITY // 2)
    allowance.give_back(CAPACITY // 2)

    def release(nbytes: int) -> None:
        raise ShelfFailure("locked")

    with monkeypatch.context() as patch:
        patch.setattr(accounts, "release_reserved", release)
        with pytest.raises(ShelfFailure):
            allowance.top_up(accounts)
    assert accounts.usage().reserved == allowance.ready


def test_no_byte_is_lost_or_made_between_threads(accounts: Accounts) -> None:
    allowance = Allowance(ROW)
    kept = [0, 0]
    before = sys.getswitchinterval()

    def take_all(number: int) -> None:
        for _ in range(3000):
            if allowance.room.take_amount(64):
                kept[number] += 64
                if kept[number] > CAPACITY // 8:
                    allowance.give_back(kept[number])
                    kept[number] = 0

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=take_all, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            allowance.top_up(accounts)
    finally:
        sys.setswitchinterval(before)
    assert accounts.usage().reserved == allowance.ready + sum(kept)
