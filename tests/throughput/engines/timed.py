"""A timed ``PdconnConnector``: time of vLLM's own thread in each of its hooks.

Named by an engine's ``kv_connector_module_path``.  ``TimedConnector`` times every public
method that vLLM calls, inherited and empty ones too, as wall time and as the thread's
processor time; of a hook that calls another only the outer one counts.
``SteppedConnector`` only records when steps end, which takes a few microseconds.  A *step* ends
with ``take_events``, the scheduler's last call in it.  With the worker inside the engine
core's process, both halves record into one list, written at the process's end to the file
that ``PDCONN_TIMED_FILE`` names.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from pdconn.vllm.connector import PdconnConnector

FILE = "PDCONN_TIMED_FILE"
INSTANT = "instant"


@dataclass(slots=True)
class Step:
    """One step of the engine; times in seconds, ``ended`` as ``time.monotonic`` tells.

    Attributes:
        late: how long the thread has waited for its core, since it began; None where the
            kernel does not say.
        scheduled: requests that computed something.
        in_flight: requests whose ticket decode tracks, and prompts that prefill lends.
        hooks: by hook: calls, seconds on the wall, seconds of the thread's processor time.
    """

    ended: float = 0.0
    late: float | None = None
    scheduled: int = 0
    in_flight: int = 0
    hooks: dict[str, list[float]] = field(default_factory=dict)


class Log:
    """Steps of this process."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.now = Step()
        self.is_inside = False
        self.instant: set[str] = set()
        self._schedstat: int | None = None
        atexit.register(self.write)

    def note(self, hook: str, wall_s: float, cpu_s: float) -> None:
        """A hook was called."""
        of = self.now.hooks.setdefault(hook, [0, 0.0, 0.0])
        of[0] += 1
        of[1] += wall_s
        of[2] += cpu_s

    def end_step(self) -> None:
        """The scheduler is done with a step."""
        self.now.ended = time.monotonic()
        self.now.late = self._late()
        self.steps.append(self.now)
        self.now = Step()

    def _late(self) -> float | None:
        if self._schedstat is None:
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._schedstat = os.open(path, os.O_RDONLY) if os.path.exists(path) else -1
        if self._schedstat < 0:
            return None
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    def write(self) -> None:
        """To the file.  Other processes of the engine load this too, and have no steps."""
        if self.steps:
            path = Path(os.environ[FILE])
            path.write_text(json.dumps([asdict(step) for step in self.steps]), encoding="utf-8")


LOG = Log()


class _Stepping:
    """Notes when each step ended, outside of any stopwatch."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        LOG.now.scheduled = len(scheduler_output.num_scheduled_tokens)
        parts = self._scheduler.parts  # type: ignore[attr-defined]
        if parts.pulling is not None:
            LOG.now.in_flight = len(parts.pulling)
        if parts.lending is not None:
            LOG.now.in_flight += len(parts.lending.pins)
        return super().build_connector_meta(scheduler_output)  # type: ignore[misc]

    def take_events(self) -> Any:
        events = super().take_events()  # type: ignore[misc]
        LOG.end_step()
        return events

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        LOG.write()


class _Timed(PdconnConnector):
    """Times every hook."""


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def timed(self: _Timed, *args: Any, **kwargs: Any) -> Any:
        if LOG.is_inside:
            return hook(self, *args, **kwargs)
        LOG.is_inside = True
        cpu, began = time.thread_time(), time.perf_counter()
        try:
            return hook(self, *args, **kwargs)
        finally:
            wall = time.perf_counter() - began
            cpu = time.thread_time() - cpu
            LOG.is_inside = False
            LOG.note(name, wall, cpu)

    return timed


for _name in dir(PdconnConnector):
    # Class methods are called once, at the start; properties hold nothing of ours.
    if not _name.startswith("_") and _name != "shutdown":
        _member = inspect.getattr_static(PdconnConnector, _name)
        if inspect.isfunction(_member):
            setattr(_Timed, _name, _timed(_name, _member))


class SteppedConnector(_Stepping, PdconnConnector):
    """Only knows when steps end, and may make believe that KV was pulled.

    A request whose parameters say ``INSTANT`` gets blocks and waits as for a pull, which is
    over at once: whatever vLLM does for a request with external KV is done, and nothing of
    what pdconn does for it.
    """

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not _is_instant(request):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        missing = request.num_prompt_tokens - 1 - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if not _is_instant(request):
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        elif num_external_tokens > 0:
            request.kv_transfer_params = None
            LOG.instant.add(request.request_id)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if LOG.instant:
            results.finished_recving |= LOG.instant
            LOG.instant.clear()
        return results


def _is_instant(request: Request) -> bool:
    return INSTANT in (request.kv_transfer_params or ())


class TimedConnector(_Stepping, _Timed):
    """Knows what every hook took, too."""
