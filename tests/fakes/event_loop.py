"""Asynchronous tests in an event loop of their own, that leave no task and no socket behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

PATIENCE_S = 20.0
"""For what happens soon, unless the machine has much else to do."""


async def until(true: Callable[[], object]) -> None:
    """Wait for something that happens soon."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.005)


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test, and fail it if it leaves a task or a socket behind."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        sockets = open_sockets()
        asyncio.run(_leaving_nothing(test(*args, **kwargs)))
        give_up_s = time.monotonic() + PATIENCE_S
        while left := open_sockets() - sockets:  # threads of ZeroMQ's close some of them
            assert time.monotonic() < give_up_s, f"sockets left open: {left}"
            time.sleep(0.005)

    return run


async def _leaving_nothing(test: Awaitable[None]) -> None:
    await test
    for _ in range(50):  # turns, as they take long where the machine has much else to do
        await asyncio.sleep(0.01)  # connections that were just closed say so
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if not left:
            return
    raise AssertionError(f"tasks left behind: {left}")


def open_sockets() -> set[str]:
    """The sockets that this process holds, each by a name no other will have."""
    targets = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {target for target in targets if target.startswith("socket:")}
