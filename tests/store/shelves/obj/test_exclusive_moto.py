"""Of two conditional writes at once one succeeds, on the server that tests use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from tests.store.shelves.obj.exclusive_moto import one_at_a_time
from tests.store.shelves.plain_rows import at_once

Wrapper = Callable[[Callable[[], bool]], Callable[[], Any]]


def writes_that_succeed(wrap: Wrapper) -> int:
    """Of two at once: each looks first, and then writes once the other has looked, if it may."""
    written: set[str] = set()
    both_looked = threading.Barrier(2)

    def put() -> bool:
        is_new = "key" not in written
        with contextlib.suppress(threading.BrokenBarrierError):
            both_looked.wait(0.2)
        written.add("key")
        return is_new

    wrapped = wrap(put)
    return sum(at_once(wrapped for _ in range(2)))


def test_of_two_writes_at_once_one_succeeds() -> None:
    assert writes_that_succeed(one_at_a_time) == 1


def test_without_the_lock_both_succeed() -> None:
    """Negative control."""
    assert writes_that_succeed(lambda put: put) == 2
