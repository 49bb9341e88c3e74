"""Forks vLLM's processes on a CPU, and releases inherited signals and sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
from collections.abc import Iterable, Iterator
from typing import Any


def fork_engines() -> None:
    """Make vLLM fork its engine core and workers on a CPU instead of spawning them.

    A spawned process imports torch and vLLM again, which takes ten seconds of CPU time each; a
    forked one has them loaded::

        API server ──fork──► engine core ──fork──► worker 0, worker 1, …

    Only for one thread per rank (``OMP_NUM_THREADS=1``): OpenMP's thread pool does not survive a
    fork, and with one thread there is no pool.  With more, vLLM spawns as before.  Libraries choose
    the cores of their threads when they are loaded, before the fork; so a worker is forked by a
    thread that is bound to the worker's cores.

    Also inspects a model's class within the API server.  vLLM starts a process for that the first
    time, to keep CUDA from initializing in the server; that process imports vLLM again too, while
    forks share what the server has imported.
    """
    import torch
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    spawning = CpuPlatform.check_and_update_config.__func__
    with_variables = OMPProcessManager.configure_omp_envs

    def check_and_update_config(cls: type[CpuPlatform], vllm_config: Any) -> None:
        spawning(cls, vllm_config)
        if torch.get_num_threads() == 1:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    @contextlib.contextmanager
    def configure_omp_envs(self: OMPProcessManager, rank: int, local_rank: int) -> Iterator[None]:
        cores = () if self.skip_setup else self.cpu_lists[local_rank]
        with with_variables(self, rank, local_rank), _bound_to(cores):
            yield

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    OMPProcessManager.configure_omp_envs = configure_omp_envs
    registry._run_in_subprocess = lambda look: look()
    os.register_at_fork(after_in_child=leave_to_parent)


@contextlib.contextmanager
def _bound_to(cores: Iterable[int]) -> Iterator[None]:
    """Run this thread, and processes that it forks, on ``cores``; empty changes nothing."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores) or own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def leave_to_parent() -> None:
    """In a forked process, release the parent's signal handlers and listening sockets.

    A signal to this process would otherwise reach the parent's event loop.  And a port on which the
    parent no longer listens would stay open here: clients would connect and wait instead of being
    refused.
    """
    signal.set_wakeup_fd(-1)
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if _awaits_connections(int(name)):
            os.dup2(nowhere, int(name), inheritable=False)  # keeps the number taken
    os.close(nowhere)


def _awaits_connections(file: int) -> bool:
    """Whether it is a TCP socket that is bound or listening, and not connected."""
    try:
        if not stat.S_ISSOCK(os.fstat(file).st_mode):
            return False
        with socket.socket(fileno=os.dup(file)) as found:
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if found.type != socket.SOCK_STREAM or found.getsockname()[1] == 0:
                return False
            found.getpeername()
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False
