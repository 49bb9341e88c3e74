"""Threads of ours keep off the core that a model computes on.

vLLM's CPU backend binds a worker's main thread to the cores of its model, and every
thread started there inherits that.  A puller that shares a single core with the model
waits for each step of it, and each step waits for the puller.  The process above was
not bound, so its cores are the ones that the user meant for the engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def wider_cores(own: set[int], above: set[int]) -> set[int]:
    """Where a thread may run, given where it and the parent process may.

    >>> wider_cores({1}, {0, 1})
    {0, 1}
    >>> wider_cores({2, 3}, {0, 1, 2, 3})
    {2, 3}
    """
    return own | above if len(own) == 1 else own


@contextlib.contextmanager
def off_the_models_core() -> Iterator[None]:
    """Start threads in here, natives too: they get the wider choice of cores."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, wider_cores(own, os.sched_getaffinity(os.getppid())))
    except OSError:
        yield  # a parent that is gone, or a kernel that says no: nothing is lost
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
