"""Finds the scheduler that binds our connector, and checks what its methods use.

vLLM passes its scheduler to no hook of a connector.  But the scheduler binds its block manager to
connectors in its constructor, where it is found on the stack::

    Scheduler.__init__ ─► bind_kv_cache_manager(manager) ─► ours

Nothing is replaced.  Checked at the start: a scheduler that does not bind us there is refused
(:mod:`pdconn.vllm.patches.self_test`).
Tested by ``tests/vllm/patches/test_deferred_frees.py``.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

SOURCES = {
    "vllm.v1.core.sched.scheduler:Scheduler.__init__": (85, 87),
}


def scheduler_being_built() -> Any:
    """The scheduler whose constructor is calling us; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and isinstance(found, Scheduler):
            return found
        frame = frame.f_back
    return None


def unused_name(made: type, uses: tuple[tuple[str, str], ...]) -> str | None:
    """The first pair of a method and a name in ``uses`` of which the method does not use the name.

    An override that calls its base class's method also uses the names of that one.
    """
    for method, name in uses:
        if not _is_used(made, method, name):
            return f"{made.__name__}.{method} does not use {name}"
    return None


def _is_used(made: type, method: str, name: str) -> bool:
    for one in [vars(base)[method] for base in made.__mro__ if method in vars(base)]:
        names = inspect.unwrap(one).__code__.co_names
        if name in names:
            return True
        if method not in names:  # it does not call the one that it overrides
            return False
    return False
