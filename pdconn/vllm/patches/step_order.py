"""The order in which a step is scheduled, which decides what a connector sees of it.

A connector is asked what the workers are to do before the step's tokens count as computed, and is
shown the blocks of each request as long as it is asked::

    schedule ─► _build_kv_connector_meta      tokens computed before the step, blocks with it
             ─► kv_connector_block_state = None
             ─► _update_after_schedule        now the step's tokens are in flight

The store saves rows by that (:meth:`pdconn.vllm.store.engine.EngineStore.scheduled`): asked later,
it would save blocks that the step has not written.

Nothing is replaced.  The live scheduler is not made to schedule, since all connectors would see
it, so this alone is read off its code.
Checked at the start by :func:`check_step_order`.
Tested by ``tests/vllm/patches/test_self_test.py``.
"""

from __future__ import annotations

import inspect
from typing import Any

from pdconn.vllm.patches.live import Live, changed

SOURCES = {
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": (591, 699),
}

_ORDER = ("_build_kv_connector_meta", "kv_connector_block_state", "_update_after_schedule")


def check_step_order(live: Live) -> None:
    """Whether connectors are asked before the step's tokens count as computed.

    Raises:
        ConfigError: they are asked at another time.
    """
    used = _names(type(live.scheduler), "schedule")
    if [name for name in used if name in _ORDER] != list(_ORDER):
        raise changed("schedule", ", ".join(_ORDER), "another order")


def _names(owner: Any, method: str) -> tuple[str, ...]:
    """Names that a method uses, in order; with those of the methods that it stands before."""
    defined = [vars(base)[method] for base in owner.__mro__ if method in vars(base)]
    written = [inspect.unwrap(one) for one in defined if inspect.isfunction(one)]
    return tuple(name for one in written for name in one.__code__.co_names)
