"""CPU affinity: our threads stay off the core that a model computes on.

vLLM's CPU backend binds a worker's main thread to the cores of its model, and threads started there
inherit that.  A puller that shares a single core with the model waits for each model step, and each
step waits for the puller.  The parent process is not bound: its cores are those that the user gave
to the engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def wider_cores(own: set[int], parent: set[int]) -> set[int]:
    """Cores for a thread, from its own affinity and that of the parent process.

    >>> wider_cores({1}, {0, 1})
    {0, 1}
    >>> wider_cores({2, 3}, {0, 1, 2, 3})
    {2, 3}
    """
    return own | parent if len(own) == 1 else own


def spare_cores(
    own: set[int], parent: set[int], model: set[int] | None, threads: int
) -> frozenset[int] | None:
    """Cores that a thread of ours may keep busy while a model runs.

    Args:
        own: the affinity of the thread that computes the model.
        parent: that of the parent process: what the user gave to the engine.
        model: the cores of all ranks of the model; None where the model is not bound to any.
        threads: that all ranks compute with, where it is not.

    Returns:
        The cores; empty for none; None for any of ``own``, as there are more than threads.

    >>> spare_cores({1}, {0, 1}, {1}, 1)
    frozenset({0})
    >>> spare_cores({0, 1}, {0, 1}, None, 2)
    frozenset()
    """
    if model is not None:
        return frozenset(parent - model)
    return None if len(own) > threads else frozenset()


@contextlib.contextmanager
def wider_affinity() -> Iterator[None]:
    """Threads started inside, native ones too, get the cores of :func:`wider_cores`."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, wider_cores(own, os.sched_getaffinity(os.getppid())))
    except OSError:
        yield  # the parent has exited, or the kernel refuses: keep the inherited cores
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
