"""Our place in vLLM's processes: the plugin entry point, the log, and the signal to stop.

The entry point registers the connector's names, and changes what machines without a GPU need.

vLLM's engine process notes SIGTERM in a handler of its own, finishes its requests for up to
``--shutdown-timeout`` seconds, and exits.  Leases are not requests, and no hook tells a connector
of the signal, so we stand in front of that handler::

    SIGTERM ──► ShutdownSignal ──► vLLM's handler
                     │
    engine loop: any work left? ──► has_pending_push_work() ──► leases, if a stop was requested
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from pdconn.sidechannel.clock import steady
from pdconn.vllm.nixl.registry import register_names

CPU_LAYOUTS = ("LBHNC", "BLHNC", "BHLNC")
"""Layouts that vLLM's CPU kernels run with, since they honour strides."""

_LOGGERS = ("pdconn", "transport", "registration")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_TEARDOWN_S = 1.0
"""Left of the shutdown time-out for closing the engine, before vLLM kills the process."""

_NAP_S = 0.0002
_LOOK_MS = 50


def register() -> None:
    """Called once in every vLLM process, before workers name their layouts."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register_names(KVConnectorFactory, as_nixl=os.environ.get("PDCONN_AS_NIXL") == "1")
    if os.environ.get("PDCONN_CPU_LAYOUTS") == "1":
        allow_cpu_layouts()
    if os.environ.get("PDCONN_CPU_STATES") == "1":
        split_prefills_for_states()
    if os.environ.get("PDCONN_PATIENT_READERS") == "1":
        let_readers_sleep()
    if os.environ.get("PDCONN_FORK_ENGINES") == "1":
        fork_engines()


def join_vllm_log() -> None:
    """Let our loggers write where vLLM's does, unless the user gave them handlers."""
    theirs = logging.getLogger("vllm")
    for name in _LOGGERS:
        ours = logging.getLogger(name)
        if not ours.handlers and theirs.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level)
            ours.propagate = False


def let_readers_sleep() -> None:
    """Let the readers of vLLM's shared-memory queues sleep between their looks.

    Readers are here the processes of one engine that wait for a message of each other (its
    engine core and its workers), not the decode engines that read lent blocks.

    A worker and its engine call ``sched_yield`` in a loop for a second after every
    message.  With more such processes than cores that starves everything else: on two
    cores and Linux 6.18, two engines of two ranks stopped each other's threads, and the
    kernel's, for seconds at a time.  A nap of 0.2 ms costs less than a step.
    """
    import time

    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    sleeping = SpinCondition.wait

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        if time.monotonic() <= self.last_read + self.busy_loop_s:
            time.sleep(_NAP_S)
        else:  # a notice of something written can be lost, so look now and then
            sleeping(self, _LOOK_MS if timeout_ms is None else min(timeout_ms, _LOOK_MS))

    SpinCondition.wait = wait


def allow_cpu_layouts() -> None:
    """Let the CPU backend use block-outermost layouts (``VLLM_KV_CACHE_LAYOUT``).

    It declares layer-outermost only, but its kernels take every stride from the
    tensors; the three layouts give identical tokens and log-probabilities.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = tuple(KVCacheLayout[name] for name in CPU_LAYOUTS)

    def supported_kv_cache_layouts(cls: type) -> tuple[KVCacheLayout, ...]:
        return layouts

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(supported_kv_cache_layouts)


def split_prefills_for_states() -> None:
    """Let vLLM keep the states of Mamba2 layers for its prefix cache on a CPU.

    On a GPU a pass over a prompt exports the state at a block's end from within.  The CPU's
    scan has no such states, and the engine ends with an IndexError; without the export vLLM
    ends the pass there, as it does for other layers.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    exporting = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self: MambaMixer2, vllm_config: Any) -> Any:
        spec = exporting(self, vllm_config)
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec


def fork_engines() -> None:
    """Let vLLM fork its engine core and workers on a CPU, where it spawns them.

    A spawned process imports torch and vLLM anew, ten seconds of a core for each; a forked one
    has them::

        API server ──fork──► engine core ──fork──► worker 0, worker 1, …

    Only for one thread per rank (``OMP_NUM_THREADS=1``): OpenMP's thread pool does not
    survive a fork, and with one thread there is none.  With more, vLLM spawns as before.
    A library reads the cores for its threads from the environment as it is loaded, which
    is before the fork; so a worker is forked by a thread that is bound to the worker's cores.

    And let it look at a model's class within the API server.  vLLM starts a process for that the
    first time, lest CUDA begins in the server; it imports vLLM anew, too, and what the server
    imports of a model its forks have as well.
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
    """This thread, and processes forked by it, run on ``cores``; none given: where they did."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores) or own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def leave_to_parent() -> None:
    """In a forked process: let go of signals and listening sockets that are the parent's.

    A signal to us would otherwise be told to the parent's event loop, which would take it
    for its own.  And a port on which the parent no longer listens would stay open in us:
    clients would connect and wait instead of being refused.
    """
    signal.set_wakeup_fd(-1)
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if _awaits_connections(int(name)):
            os.dup2(nowhere, int(name), inheritable=False)  # the number stays taken
    os.close(nowhere)


def _awaits_connections(file: int) -> bool:
    """Whether it is a TCP socket that is bound or listening, and connected to nobody."""
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


def drain_s(config: Any) -> float:
    """Seconds that leases may hold up an engine that was asked to stop.

    Args:
        config: vLLM's configuration; without ``--shutdown-timeout`` nothing is waited for.
    """
    return max(0.0, config.shutdown_timeout - _TEARDOWN_S)


class ShutdownSignal:
    """Notes that vLLM's engine process was asked to stop.

    Attributes:
        requested_at: when the first signal since :meth:`watch` came, by ``clock``; None before.
    """

    def __init__(self, clock: Callable[[], float] = steady) -> None:
        self._clock = clock
        self.requested_at: float | None = None

    def watch(self) -> None:
        """Stand in front of vLLM's handlers; handlers of other programs are left alone."""
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may, and vLLM's engine process builds us there
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and getattr(handler, "__module__", "").startswith("vllm."):
                signal.signal(number, self._noting(handler))

    def _noting(self, handler: Any) -> Any:
        def note(number: int, frame: FrameType | None) -> Any:
            if self.requested_at is None:
                self.requested_at = self._clock()
            return handler(number, frame)

        return note
