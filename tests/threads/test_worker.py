"""Laws of workers: a thread ends soon after its box is closed, and never silently by an error."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from pdconn.threads import Box, ThreadDied, Worker

PATIENCE_S = 20.0


@pytest.mark.parametrize("error", [ValueError("seen"), SystemExit("seen"), KeyboardInterrupt()])
def test_an_error_is_logged_and_is_the_last_item_of_the_outbox(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    inbox: Box[int] = Box()
    outbox: Box[int | ThreadDied] = Box()

    def run() -> None:
        while (item := inbox.take_one()) is not None:
            if item == 2:
                raise error
            outbox.put(item)

    worker = Worker("pdconn-one", run, inbox, outbox)
    worker.start_thread()
    inbox.put_all([1, 2, 3])
    seen = [outbox.take_one(PATIENCE_S), outbox.take_one(PATIENCE_S)]
    text = f"{type(error).__name__}: {error}"
    assert seen == [1, ThreadDied("pdconn-one", text)]
    assert worker.end_thread(PATIENCE_S)
    assert inbox.take_all() == [3], "what was not taken is there"
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.CRITICAL, "pdconn: the one thread stopped",
    )  # fmt: skip
    assert record.exc_info is not None


def test_an_owner_that_sleeps_for_its_outbox_is_woken_by_a_death() -> None:
    outbox: Box[ThreadDied] = Box()
    go = threading.Event()

    def run() -> None:
        assert go.wait(PATIENCE_S)
        raise ValueError

    Worker("w", run, Box(), outbox).start_thread()
    threading.Timer(0.05, go.set).start()
    assert outbox.wait_for_item(PATIENCE_S)


def test_a_thread_that_is_asked_to_end_dies_not() -> None:
    inbox: Box[int] = Box()
    outbox: Box[ThreadDied] = Box()
    worker = Worker("w", lambda: inbox.take_one() and None, inbox, outbox)
    worker.start_thread()
    assert worker.end_thread(PATIENCE_S)
    assert worker.end_thread(PATIENCE_S), "a second time"
    assert not outbox.items


def test_the_end_of_a_thread_that_hangs_is_waited_for_as_long_as_is_said() -> None:
    go = threading.Event()
    worker = Worker("w", lambda: go.wait(PATIENCE_S) and None, Box(), Box())
    worker.start_thread()
    began = time.monotonic()
    assert not worker.end_thread(0.05)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert worker.is_alive
    go.set()
    assert worker.end_thread(PATIENCE_S)


def test_one_that_was_never_started_has_ended() -> None:
    assert Worker("w", lambda: None, Box(), Box()).end_thread(0.0)
