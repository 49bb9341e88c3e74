"""Laws of the mailbox: what is posted is taken, once, and whoever waits hears of it."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

import pytest

from pdconn.sidechannel.wakeup_queue import WakeupQueue

PATIENCE_S = 20.0


def is_woken(mailbox: WakeupQueue[int], seconds: float) -> bool:
    return bool(select.select([mailbox.socket], [], [], seconds)[0])


class Interrupted(deque[int]):
    """Somebody posts just after the owner saw that the last item was taken."""

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
    mailbox: WakeupQueue[int] = WakeupQueue()
    for number in range(100):
        mailbox.post(number)
    assert mailbox.socket.recv(4096) == b"\0"
    mailbox.hush()
    assert mailbox.take() == list(range(100))
    mailbox.post(100)
    assert is_woken(mailbox, PATIENCE_S)
    mailbox.hush()
    assert mailbox.take() == [100]
    assert not is_woken(mailbox, 0.0)
    mailbox.close()


def test_what_is_left_does_not_wake_the_owner() -> None:
    mailbox: WakeupQueue[int] = WakeupQueue()
    assert not mailbox
    mailbox.leave(1)
    assert mailbox
    assert not is_woken(mailbox, 0.0)
    mailbox.post(2)
    assert is_woken(mailbox, PATIENCE_S)
    assert mailbox.take() == [1, 2]
    assert not mailbox
    mailbox.close()


def test_taking_without_hushing_leaves_the_owner_awake() -> None:
    mailbox: WakeupQueue[int] = WakeupQueue()
    mailbox.post(1)
    assert mailbox.take() == [1]
    assert is_woken(mailbox, 0.0)
    mailbox.close()


class Full:
    """A pipe that has no room for a byte, for one of several reasons, the first few times."""

    def __init__(self, pipe: socket.socket, *errors: BaseException) -> None:
        self._pipe, self._errors = pipe, list(errors)

    def send(self, data: bytes) -> int:
        if self._errors:
            raise self._errors.pop(0)
        return self._pipe.send(data)

    def close(self) -> None:
        self._pipe.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOBUFS, "no room"), KeyboardInterrupt()])
def test_who_could_not_be_woken_is_woken_by_the_next_post(error: BaseException) -> None:
    mailbox: WakeupQueue[int] = WakeupQueue()
    mailbox._poke = Full(mailbox._poke, error)  # type: ignore[assignment]
    with contextlib.suppress(KeyboardInterrupt):
        mailbox.post(1)
    assert not is_woken(mailbox, 0.0)
    mailbox.post(2)
    assert is_woken(mailbox, PATIENCE_S)
    assert mailbox.take() == [1, 2]
    mailbox.close()


def test_what_is_posted_while_the_owner_takes_wakes_it_again() -> None:
    mailbox: WakeupQueue[int] = WakeupQueue()
    mailbox._items = Interrupted(lambda: mailbox.post(2))
    mailbox.post(1)
    mailbox.hush()
    assert mailbox.take() == [1]
    assert is_woken(mailbox, PATIENCE_S)
    assert mailbox.take() == [2]
    mailbox.close()


def test_nothing_is_left_behind_by_many_posters() -> None:
    mailbox: WakeupQueue[int] = WakeupQueue()
    posters, posts = 4, 5000

    def post(first: int) -> None:
        for number in range(first, first + posts):
            mailbox.post(number)

    threads = [threading.Thread(target=post, args=(n * posts,)) for n in range(posters)]
    for thread in threads:
        thread.start()
    taken: list[int] = []
    while len(taken) < posters * posts:
        assert is_woken(mailbox, PATIENCE_S), f"{len(taken)} taken, and nobody wakes us"
        mailbox.hush()
        taken += mailbox.take()
    assert sorted(taken) == list(range(posters * posts))
    for thread in threads:
        thread.join()
    mailbox.close()
