"""A stop that vLLM is asked for is noticed, and vLLM's own handler is called all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.vllm.patches.stop_signal import ShutdownSignal, drain_s


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """Numbers of signals that reach the handler in place, as vLLM's engine process has one."""
    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        del frame
        seen.append(number)

    handler.__module__ = "vllm.v1.engine.core"
    before = signal.signal(signal.SIGTERM, handler)
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_a_stop_is_noticed_and_handed_on(calls: list[int]) -> None:
    times = iter([7.0, 9.0])
    watching = ShutdownSignal(lambda: next(times))
    watching.install_handlers()
    assert watching.requested_at is None
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        assert watching.requested_at == 7.0, "the first one counts"
    assert calls == [signal.SIGTERM] * 2


def test_handlers_of_other_programs_are_left_alone() -> None:
    def theirs(number: int, frame: Any) -> None:
        del number, frame

    before = signal.signal(signal.SIGTERM, theirs)
    try:
        ShutdownSignal().install_handlers()
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("timeout", "expected"), [(0, 0.0), (1, 0.0), (10, 9.0)])
def test_leases_get_what_the_shutdown_timeout_leaves(timeout: int, expected: float) -> None:
    assert drain_s(SimpleNamespace(shutdown_timeout=timeout)) == expected
