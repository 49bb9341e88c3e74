"""Ctrl-C is raised between the steps of a benchmark, and is never lost."""

from __future__ import annotations

import signal
import sys
import threading
import time

import pytest

from pdconn.tools.bench.interrupts import held_interrupts, interruptible, raise_noted


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def end_now() -> None:
    raise AssertionError("one Ctrl-C does not end the process by force")


@pytest.fixture(autouse=True)
def _default_handler():
    """As a command has it; pytest's own handler is back afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class InterruptedWhenFreed:
    """Python prints what a finalizer raises, and goes on."""

    def __del__(self) -> None:
        interrupt()


def test_without_holding_it_a_finalizer_loses_ctrl_c(monkeypatch):
    """The control: this is what the module is for."""
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: lost.append(seen.exc_type))
    InterruptedWhenFreed()
    assert lost == [KeyboardInterrupt]


def test_ctrl_c_in_a_finalizer_is_raised_at_the_next_point():
    steps = []

    def measured() -> None:
        with held_interrupts(end_now):
            InterruptedWhenFreed()
            steps.append("goes on")
            raise_noted()
            steps.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        measured()
    assert steps == ["goes on"]


def test_it_is_raised_at_once_where_it_may_be():
    main = threading.main_thread().ident
    assert main is not None
    pressed = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))

    def waits() -> None:
        with held_interrupts(end_now), interruptible():
            pressed.start()
            time.sleep(60)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        waits()
    assert time.monotonic() - began < 30


def test_it_is_raised_before_the_next_wait_begins():
    with held_interrupts(end_now):
        interrupt()
        with pytest.raises(KeyboardInterrupt), interruptible():
            pytest.fail("waited although Ctrl-C had been pressed")


def test_the_second_ends_the_process_wherever_it_arrives():
    ended = []

    def pressed_twice() -> None:
        with held_interrupts(lambda: ended.append("now")):
            InterruptedWhenFreed()
            assert ended == []
            InterruptedWhenFreed()
            assert ended == ["now"]
            raise_noted()

    with pytest.raises(KeyboardInterrupt):
        pressed_twice()


def test_while_it_ends_another_one_ends_the_process():
    """What is closed after the first may hang."""
    ended = []

    def closing() -> None:
        with held_interrupts(lambda: ended.append("now")):
            try:
                with interruptible():
                    interrupt()
            finally:
                interrupt()

    with pytest.raises(KeyboardInterrupt):
        closing()
    assert ended == ["now"]


def test_one_that_comes_with_the_last_step_is_not_lost():
    with pytest.raises(KeyboardInterrupt), held_interrupts(end_now):
        interrupt()


def test_an_error_of_what_was_cut_off_is_not_reported():
    def fails(arrives: bool) -> None:
        with held_interrupts(end_now):
            if arrives:
                interrupt()
            raise ValueError("the other side is gone")

    with pytest.raises(KeyboardInterrupt) as raised:
        fails(arrives=True)
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="gone"):
        fails(arrives=False)


def test_afterwards_everything_is_as_before():
    with held_interrupts(end_now):
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with interruptible():
        raise_noted()
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_ignored_signal_stays_ignored():
    """Children of a shell's background job ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupts(end_now):
        interrupt()
        raise_noted()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_than_the_main_one_is_let_through():
    done = []

    def run() -> None:
        with held_interrupts(end_now), interruptible():
            raise_noted()
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]
