"""The order of the parts of a step's scheduling, on which a connector's view of it depends.

A connector builds its metadata before the step's tokens count as computed, and can read the blocks
of each request meanwhile::

    schedule ─► _build_kv_connector_meta      tokens computed before the step, blocks with it
             ─► kv_connector_block_state = None
             ─► _update_after_schedule        now the step's tokens are in flight

The store saves rows by that (:meth:`pdconn.vllm.store.engine.EngineStore.scheduled`): asked later,
it would save blocks that the step has not written.

Nothing is replaced.  The live scheduler does not schedule a step for the check, since all
connectors would be called; its code is checked instead.  Checked at the start by
:func:`check_step_order`.  Tested by ``tests/vllm/patches/test_self_test.py``.
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
    """Check that connectors are called before the step's tokens count as computed.

    Raises:
        ConfigError: they are called at another time.
    """
    used = _names(type(live.scheduler), "schedule")
    if [name for name in used if name in _ORDER] != list(_ORDER):
        raise changed("schedule", ", ".join(_ORDER), "another order")


def _names(owner: Any, method: str) -> tuple[str, ...]:
    """Names that a method uses, in order, followed by those of the methods that it overrides."""
    defined = [vars(base)[method] for base in owner.__mro__ if method in vars(base)]
    written = [inspect.unwrap(one) for one in defined if inspect.isfunction(one)]
    return tuple(name for one in written for name in one.__code__.co_names)
