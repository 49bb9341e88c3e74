"""Laws of boxes: every item is taken once and in order, and a sleeping owner is woken."""

from __future__ import annotations

import contextlib
import errno
import itertools
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

import pytest

from pdconn.threads import AmountBox, Box, SelectedBox

PATIENCE_S = 20.0


def is_woken(queue: SelectedBox[int], seconds: float) -> bool:
    return bool(select.select([queue.socket], [], [], seconds)[0])


class Interrupted(deque[int]):
    """A deque in which an item is put just after the owner took the last, or saw that none is."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        super().__init__()
        self._interrupt: Callable[[], None] | None = interrupt

    def popleft(self) -> int:
        item = super().popleft()
        interrupt, self._interrupt = self._interrupt, None
        if not len(self) and interrupt is not None:
            interrupt()
        return item

    def __bool__(self) -> bool:
        found = len(self) > 0
        interrupt, self._interrupt = self._interrupt, None
        if not found and interrupt is not None:
            interrupt()
        return found


def test_one_byte_is_written_until_the_owner_looks() -> None:
    queue: SelectedBox[int] = SelectedBox()
    for number in range(100):
        queue.put(number)
    assert queue.socket.recv(4096) == b"\0"
    queue.drain_socket()
    assert queue.take_all() == list(range(100))
    queue.put(100)
    assert is_woken(queue, PATIENCE_S)
    queue.drain_socket()
    assert queue.take_all() == [100]
    assert not is_woken(queue, 0.0)
    queue.free_sockets()


def test_a_quiet_put_does_not_wake_the_owner() -> None:
    queue: SelectedBox[int] = SelectedBox()
    assert not queue.items
    queue.put_quietly(1)
    assert queue.items
    assert not is_woken(queue, 0.0)
    queue.put(2)
    assert is_woken(queue, PATIENCE_S)
    assert queue.take_all() == [1, 2]
    assert not queue.items
    queue.free_sockets()


def test_taking_without_draining_leaves_the_owner_awake() -> None:
    queue: SelectedBox[int] = SelectedBox()
    queue.put(1)
    assert queue.take_all() == [1]
    assert is_woken(queue, 0.0)
    queue.free_sockets()


class Full:
    """A pipe whose first sends fail, each with one of ``errors``."""

    def __init__(self, pipe: socket.socket, *errors: BaseException) -> None:
        self._pipe, self._errors = pipe, list(errors)

    def send(self, data: bytes) -> int:
        if self._errors:
            raise self._errors.pop(0)
        return self._pipe.send(data)

    def close(self) -> None:
        self._pipe.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOBUFS, "no room"), KeyboardInterrupt()])
def test_an_owner_that_could_not_be_woken_is_woken_by_the_next_put(error: BaseException) -> None:
    queue: SelectedBox[int] = SelectedBox()
    queue._poke = Full(queue._poke, error)  # type: ignore[assignment]
    with contextlib.suppress(KeyboardInterrupt):
        queue.put(1)
    assert not is_woken(queue, 0.0)
    queue.put(2)
    assert is_woken(queue, PATIENCE_S)
    assert queue.take_all() == [1, 2]
    queue.free_sockets()


def test_an_item_put_while_the_owner_takes_wakes_it_again() -> None:
    queue: SelectedBox[int] = SelectedBox()
    queue.items = Interrupted(lambda: queue.put(2))
    queue.put(1)
    queue.drain_socket()
    assert queue.take_all() == [1]
    assert is_woken(queue, PATIENCE_S)
    assert queue.take_all() == [2]
    queue.free_sockets()


def test_no_item_of_many_threads_is_lost() -> None:
    queue: SelectedBox[int] = SelectedBox()
    num_threads, puts = 4, 5000

    def put_all(first: int) -> None:
        for number in range(first, first + puts):
            queue.put(number)

    threads = [threading.Thread(target=put_all, args=(n * puts,)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    taken: list[int] = []
    while len(taken) < num_threads * puts:
        assert is_woken(queue, PATIENCE_S), f"{len(taken)} taken, and no wake-up"
        queue.drain_socket()
        taken += queue.take_all()
    assert sorted(taken) == list(range(num_threads * puts))
    for thread in threads:
        thread.join()
    queue.free_sockets()


def test_only_a_sleep_beyond_an_items_time_is_ended_by_it() -> None:
    queue: SelectedBox[int] = SelectedBox()
    queue.sleeps_until = 5.0
    queue.put_before(1, due=6.0)
    assert not is_woken(queue, 0.0)
    queue.put_before(2, due=4.0)
    assert is_woken(queue, PATIENCE_S)
    assert queue.take_all() == [1, 2]
    queue.free_sockets()


# Owners that sleep on a lock


def test_an_item_put_just_before_the_owner_sleeps_ends_the_sleep() -> None:
    """Between the owner's look and its sleep; there the wake-up finds nobody asleep."""
    box: Box[int] = Box()
    box.items = Interrupted(lambda: box.put(7))
    assert box.wait_for_item(PATIENCE_S)
    assert box.take_all() == [7]


def test_a_sleep_without_a_second_look_is_lost() -> None:
    """Negative control: the same interruption, and an owner that looks once."""

    class LooksOnce(Box[int]):
        def wait(self, timeout_s: float | None = None) -> bool:
            if self.items:
                return True
            bed = threading.Lock()
            bed.acquire()
            self._sleepers.append(bed)
            return bed.acquire(timeout=-1 if timeout_s is None else timeout_s)

    box = LooksOnce()
    box.items = Interrupted(lambda: box.put(7))
    assert not box.wait(0.05)


@pytest.mark.parametrize("num_owners", [1, 3])
def test_owners_take_every_item_once_and_each_its_own_in_order(num_owners: int) -> None:
    box: Box[int] = Box()
    num_putters, puts = 3, 3000
    taken: list[list[int]] = [[] for _ in range(num_owners)]

    def take_all(mine: list[int]) -> None:
        while (item := box.take_one()) is not None:
            mine.append(item)

    def put_all(first: int) -> None:
        for number in range(first, first + puts):
            box.put(number)

    owners = [threading.Thread(target=take_all, args=(mine,)) for mine in taken]
    putters = [threading.Thread(target=put_all, args=(n * puts,)) for n in range(num_putters)]
    for thread in (*owners, *putters):
        thread.start()
    for thread in putters:
        thread.join()
    box.close()
    for thread in owners:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "an owner sleeps on"
    assert sorted(itertools.chain(*taken)) == list(range(num_putters * puts))
    for mine in taken:
        for first in range(0, num_putters * puts, puts):
            of_one = [item for item in mine if first <= item < first + puts]
            assert of_one == sorted(of_one)


def test_what_is_put_first_is_taken_first_and_in_order() -> None:
    box: Box[int] = Box()
    box.put_all([3, 4])
    box.put_first([1, 2])
    assert [box.take_one(), *box.take_all()] == [1, 2, 3, 4]


class Item:
    """Told from others by identity."""


def test_what_is_taken_back_is_taken_by_nobody_and_the_rest_keeps_its_order() -> None:
    box: Box[Item] = Box()
    items = [Item() for _ in range(6)]
    box.put_all(items)
    assert box.take_one() is items[0]
    assert box.take_back(lambda item: item in items[0:6:2]) == [items[2], items[4]]
    assert box.take_all() == [items[1], items[3], items[5]]


def test_each_item_goes_to_an_owner_or_back_and_to_one_of_them() -> None:
    box: Box[Item] = Box()
    items = [Item() for _ in range(4000)]
    box.put_all(items)
    taken: list[Item] = []

    def take_all() -> None:
        while (item := box.take_one(0.0)) is not None:
            taken.append(item)

    owner = threading.Thread(target=take_all)
    owner.start()
    back = box.take_back(lambda item: True)
    owner.join()
    assert len(taken) + len(back) == len(items)
    assert {*taken, *back} == set(items)


def test_all_sleeping_owners_are_woken_for_as_many_items() -> None:
    box: Box[int] = Box()
    both = threading.Barrier(3)

    def take_one() -> None:
        assert box.take_one(PATIENCE_S) is not None
        both.wait(PATIENCE_S)

    owners = [threading.Thread(target=take_one) for _ in range(2)]
    for owner in owners:
        owner.start()
    while len(box._sleepers) < 2:
        pass
    box.put_all([1, 2])
    both.wait(PATIENCE_S)
    for owner in owners:
        owner.join()


def test_a_sleep_ends_in_time_and_leaves_no_bed() -> None:
    box: Box[int] = Box()
    assert box.take_one(0.001) is None
    assert not box.wait_for_item(0.001)
    assert not box._sleepers
    box.put_quietly(1)
    assert box.take_one(0.0) == 1


def test_a_closed_box_gives_what_is_in_it_and_waits_for_no_more() -> None:
    box: Box[int] = Box()
    box.put(1)
    box.close()
    assert [box.take_one(), box.take_one()] == [1, None]
    assert not box.wait_for_item()


# Amounts


def test_an_amount_is_taken_whole_or_not_at_all() -> None:
    box = AmountBox()
    box.add_amount(10)
    assert box.take_amount(7)
    assert not box.take_amount(4)
    assert (box.amount, box.take_missed(), box.take_missed()) == (3, True, False)
    assert box.take_above(2, slack=1) == 0
    assert box.take_above(1, slack=1) == 2
    assert box.amount == 1


def _left(box: AmountBox) -> int:
    """What is left when one adds and another takes as much, at the same time."""
    times = 20_000

    def add() -> None:
        for _ in range(times):
            box.add_amount(1)

    adding = threading.Thread(target=add)
    adding.start()
    num_taken = 0
    while num_taken < times and (adding.is_alive() or box.amount > 0):
        num_taken += box.take_amount(1)
    adding.join()
    return box.amount + num_taken - times


def test_no_amount_is_lost_between_two_threads() -> None:
    assert _left(AmountBox()) == 0


class Unlocked(AmountBox):
    """As if ``+=`` were one step: another thread comes between its read and its write."""

    def add(self, amount: int) -> None:
        before = self.amount
        self.take_amount(1)
        self.amount = before + amount


def test_without_its_lock_an_amount_is_lost() -> None:
    """Negative control."""
    box = Unlocked()
    box.add(1)
    box.add(1)
    assert box.amount == 2, "one was taken in between"
    locked = AmountBox()
    locked.add_amount(1)
    locked.take_amount(1)
    locked.add_amount(1)
    assert locked.amount == 1
