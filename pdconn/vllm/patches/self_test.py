"""Whether what is believed of vLLM's insides still holds, tried on the live engine at its start.

Much of what pdconn leans on would go on being there if its meaning changed, and answers would be
wrong without a word.  So before an engine serves its first request, each part of this room tries
what it believes on the engine's own block manager, block pool and scheduler, with dummy requests
of a few blocks (:mod:`pdconn.vllm.patches.live`)::

    Scheduler.__init__ ─► bind_kv_cache_manager     our parts are put into the manager
    workers are registered ─► SelfTest.run_once     each check_… is run, milliseconds in all
                              ├─ holds              everything is put back as it was
                              └─ does not           the engine stops, with a line that names what

It runs under any version of vLLM, and no key leaves it out.
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
    """Tries what is believed of vLLM, once.

    Built while the scheduler binds its block manager, which is how the scheduler is found.

    Args:
        manager: vLLM's ``KVCacheManager``; None before it is bound.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._scheduler = None if manager is None else scheduler_being_built()
        self._is_over = False

    def run_once(self, answers: AnswerWindows | None) -> None:
        """Run every check, before the engine's first request; a second call has no effect.

        Args:
            answers: what caches windows of requests that end.

        Raises:
            ConfigError: naming what works in another way.
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
            "pdconn: vLLM's block manager and scheduler work as believed: segments=%d tokens=%d "
            "seconds=%.4f",
            live.num_segments,
            live.tokens,
            time.perf_counter() - began,
        )


def _check_all(live: Live) -> None:
    with live.lent():
        for check in _CHECKS:
            tried("block manager, block pool or scheduler", partial(check, live))
            live.forget()


def tried(name: str, call: Callable[[], _Made]) -> _Made:
    """What ``call`` returns, which uses vLLM's insides.

    Raises:
        ConfigError: of ``call``, or instead of whatever the changed vLLM raises, with its place.
    """
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1].name
        seen = f"{type(error).__name__} in {place}: {error}"
        raise changed(f"insides ({name})", "those that were tested", seen[:300]) from error
