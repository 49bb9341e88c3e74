"""Laws of the two queues: every item is taken once, a sleeping owner is woken, no count is lost."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable

import pytest

from pdconn.sidechannel.thread_queues import Outbox, WakeupQueue

PATIENCE_S = 20.0


def is_woken(queue: WakeupQueue[int], seconds: float) -> bool:
    return bool(select.select([queue.socket], [], [], seconds)[0])


class Interrupted(deque[int]):
    """A deque in which an item is put just after the owner saw that it is empty."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        super().__init__()
        self._interrupt: Callable[[], None] | None = interrupt

    def __bool__(self) -> bool:
        if len(self):
            return True
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            interrupt()
        return False


def test_one_byte_is_written_until_the_owner_looks() -> None:
    queue: WakeupQueue[int] = WakeupQueue()
    for number in range(100):
        queue.put(number)
    assert queue.socket.recv(4096) == b"\0"
    queue.drain()
    assert queue.take() == list(range(100))
    queue.put(100)
    assert is_woken(queue, PATIENCE_S)
    queue.drain()
    assert queue.take() == [100]
    assert not is_woken(queue, 0.0)
    queue.close()


def test_a_quiet_put_does_not_wake_the_owner() -> None:
    queue: WakeupQueue[int] = WakeupQueue()
    assert not queue.items
    queue.put_quietly(1)
    assert queue.items
    assert not is_woken(queue, 0.0)
    queue.put(2)
    assert is_woken(queue, PATIENCE_S)
    assert queue.take() == [1, 2]
    assert not queue.items
    queue.close()


def test_taking_without_draining_leaves_the_owner_awake() -> None:
    queue: WakeupQueue[int] = WakeupQueue()
    queue.put(1)
    assert queue.take() == [1]
    assert is_woken(queue, 0.0)
    queue.close()


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
    queue: WakeupQueue[int] = WakeupQueue()
    queue._poke = Full(queue._poke, error)  # type: ignore[assignment]
    with contextlib.suppress(KeyboardInterrupt):
        queue.put(1)
    assert not is_woken(queue, 0.0)
    queue.put(2)
    assert is_woken(queue, PATIENCE_S)
    assert queue.take() == [1, 2]
    queue.close()


def test_an_item_put_while_the_owner_takes_wakes_it_again() -> None:
    queue: WakeupQueue[int] = WakeupQueue()
    queue.items = Interrupted(lambda: queue.put(2))
    queue.put(1)
    queue.drain()
    assert queue.take() == [1]
    assert is_woken(queue, PATIENCE_S)
    assert queue.take() == [2]
    queue.close()


def test_no_item_of_many_threads_is_lost() -> None:
    queue: WakeupQueue[int] = WakeupQueue()
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
        queue.drain()
        taken += queue.take()
    assert sorted(taken) == list(range(num_threads * puts))
    for thread in threads:
        thread.join()
    queue.close()


class Paused(Counter[str]):
    """Stops before it adds to ``claims``, where Python may switch threads at any time."""

    def __init__(self, counted: dict[str, int]) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        super().__init__(counted)

    def __setitem__(self, key: str, value: int) -> None:
        if key == "claims" and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
        super().__setitem__(key, value)


def _counted_in_the_end(outbox: Outbox[int]) -> Counter[str]:
    """Counts are taken while others are being added."""
    paused = outbox._counts = Paused({"before": 1})
    adding = threading.Thread(target=outbox.put, args=((), {"lent": 1, "claims": 1}))
    adding.start()
    assert paused.reached.wait(PATIENCE_S)
    total: Counter[str] = Counter()
    taking = threading.Thread(target=lambda: total.update(outbox.take_counts()))
    taking.start()
    taking.join(0.3)  # without the lock it is over by now; with it, it waits
    paused.go_on.set()
    for thread in (adding, taking):
        thread.join(PATIENCE_S)
    total.update(outbox.take_counts())
    return total


def test_counts_that_are_taken_while_others_are_added_are_not_lost() -> None:
    assert _counted_in_the_end(Outbox()) == {"before": 1, "lent": 1, "claims": 1}


def test_without_its_lock_an_outbox_loses_counts() -> None:
    """Negative control."""
    outbox: Outbox[int] = Outbox()
    outbox._lock = contextlib.nullcontext()  # type: ignore[assignment]
    assert _counted_in_the_end(outbox)["claims"] == 0
