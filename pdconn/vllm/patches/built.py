"""vLLM's scheduler, which hands itself to no hook of a connector.

It binds its block manager to connectors in its own constructor, and is found there, up the stack::

    Scheduler.__init__ ─► bind_kv_cache_manager(manager) ─► ours

Source: ``Scheduler.__init__`` in vLLM's ``v1/core/sched/scheduler.py``, 0.32 and 0.33.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


def scheduler_being_built() -> Any:
    """The scheduler whose constructor has called us; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and isinstance(found, Scheduler):
            return found
        frame = frame.f_back
    return None


def unused_name(made: type, uses: tuple[tuple[str, str], ...]) -> str | None:
    """The first of methods and names in ``uses`` of which a class's method does not use its name.

    With methods that another stands before, and below what wraps one.
    """
    for method, name in uses:
        defined = [vars(base)[method] for base in made.__mro__ if method in vars(base)]
        if not any(name in inspect.unwrap(one).__code__.co_names for one in defined):
            return f"{made.__name__}.{method} does not use {name}"
    return None
