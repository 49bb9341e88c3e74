"""Tests assumptions about vLLM's internals on the live engine, at its start.

If the meaning of an internal changed, but not its name, answers would silently be wrong.  So before
an engine serves its first request, each file of this folder tests its assumptions on the engine's
own block manager, block pool and scheduler, with dummy requests of a few blocks
(:mod:`pdconn.vllm.patches.live`)::

    Scheduler.__init__ ─► bind_kv_cache_manager     our parts wrap methods of the manager
    workers are registered ─► SelfTest.run_once     each check_… runs, milliseconds in all
                              ├─ passes             everything is restored
                              └─ fails              the engine stops, with a line that names it

It runs with any version of vLLM, and cannot be disabled.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pdconn.vllm.config import ConfigError
from pdconn.vllm.patches.built import scheduler_being_built
from pdconn.vllm.patches.cache_resets import check_resets, unwatched
from pdconn.vllm.patches.deferred_frees import check_frees
from pdconn.vllm.patches.failed_loads import check_failed_loads
from pdconn.vllm.patches.live import Live, changed
from pdconn.vllm.patches.pool.admitted_blocks import check_admission
from pdconn.vllm.patches.pool.answer_windows import AnswerWindows, check_answers
from pdconn.vllm.patches.pool.kept_windows import check_windows
from pdconn.vllm.patches.pool.local_hits import check_hits
from pdconn.vllm.patches.pool.pinned_blocks import check_pins
from pdconn.vllm.patches.pool.state_blocks import check_states
from pdconn.vllm.patches.pool.uncached_blocks import check_uncached
from pdconn.vllm.patches.request_writes import check_requests
from pdconn.vllm.patches.step_order import check_step_order

log = logging.getLogger(__name__)

_Made = TypeVar("_Made")

_CHECKS: tuple[Callable[[Live], None], ...] = (
    check_step_order,
    check_requests,
    check_pins,
    check_resets,
    check_admission,
    check_windows,
    check_uncached,
    check_hits,
    check_answers,
    check_states,
    check_frees,
    check_failed_loads,
)


class SelfTest:
    """Runs the checks, once.

    Created while the scheduler binds its block manager, to find the scheduler on the stack.

    Args:
        manager: vLLM's ``KVCacheManager``; None before it is bound.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._scheduler = None if manager is None else scheduler_being_built()
        self._is_over = False

    def run_once(self, answers: AnswerWindows | None) -> None:
        """Run every check, before the engine's first request.  Idempotent.

        Args:
            answers: caches windows of finished requests.

        Raises:
            ConfigError: naming the internal that works differently.
        """
        if self._is_over:
            return
        if self._manager is None or self._scheduler is None:
            seen = "none" if self._manager is None else "a manager, by no scheduler's constructor"
            raise changed("bind_kv_cache_manager", "a block manager before workers register", seen)
        began = time.perf_counter()
        live = tried("KVCacheManager", lambda: Live(self._manager, self._scheduler, answers))
        with unwatched(live.pool):
            tried("BlockPool", lambda: _check_all(live))
        self._is_over = True
        log.info(
            "pdconn: vLLM's block manager and scheduler work as expected: segments=%d tokens=%d "
            "seconds=%.4f",
            live.num_segments,
            live.tokens,
            time.perf_counter() - began,
        )


def _check_all(live: Live) -> None:
    with live.lent():
        for check in _CHECKS:
            tried("block manager, block pool or scheduler", partial(check, live))
            live.forget_cached()


def tried(name: str, call: Callable[[], _Made]) -> _Made:
    """The result of ``call``, which uses vLLM's internals.

    Raises:
        ConfigError: from ``call``, or in place of any other exception, with its place.
    """
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1].name
        seen = f"{type(error).__name__} in {place}: {error}"
        raise changed(f"internals ({name})", "those that were tested", seen[:300]) from error
