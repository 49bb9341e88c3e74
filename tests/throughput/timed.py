"""``PdConnector`` with a stopwatch: what vLLM's own thread spends in each of its hooks.

Named by an engine's ``kv_connector_module_path``.  ``TimedConnector`` times every public
method that vLLM calls, inherited ones and those that do nothing too, by the clock on the
wall and by the thread's own; of a hook that calls another only the outer counts.
``SteppedConnector`` only notes when steps end, which takes a microsecond.  A *step* ends
with ``take_events``, the scheduler's last question in it.  With the worker inside the
engine core's process, both halves note into one list, written at the process's end to
the file that ``PDCONN_TIMED_FILE`` names.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from pdconn.vllm.connector import PdConnector

FILE = "PDCONN_TIMED_FILE"


@dataclass(slots=True)
class Step:
    """One step of the engine; times in seconds, ``ended`` as ``time.monotonic`` tells.

    Attributes:
        scheduled: requests that computed something.
        in_flight: requests whose ticket decode tracks, and prompts that prefill lends.
        hooks: by hook: calls, seconds on the wall, seconds of the thread's processor time.
    """

    ended: float = 0.0
    scheduled: int = 0
    in_flight: int = 0
    hooks: dict[str, list[float]] = field(default_factory=dict)


class Log:
    """Steps of this process."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.now = Step()
        self.is_inside = False
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
        self.steps.append(self.now)
        self.now = Step()

    def write(self) -> None:
        """To the file.  Other processes of the engine load this too, and have no steps."""
        if self.steps:
            path = Path(os.environ[FILE])
            path.write_text(json.dumps([asdict(step) for step in self.steps]))


LOG = Log()


class _Stepping:
    """Notes when each step ended, outside of any stopwatch."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        LOG.now.scheduled = len(scheduler_output.num_scheduled_tokens)
        if self._borrowing is not None:  # type: ignore[attr-defined]
            LOG.now.in_flight = len(self._borrowing)  # type: ignore[attr-defined]
        if self._lending is not None:  # type: ignore[attr-defined]
            LOG.now.in_flight += len(self._lending._pinned)  # type: ignore[attr-defined]
        return super().build_connector_meta(scheduler_output)  # type: ignore[misc]

    def take_events(self) -> Any:
        events = super().take_events()  # type: ignore[misc]
        LOG.end_step()
        return events

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        LOG.write()


class _Timed(PdConnector):
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


for _name in dir(PdConnector):
    # Class methods are called once, at the start; properties hold nothing of ours.
    if not _name.startswith("_") and _name != "shutdown":
        _member = inspect.getattr_static(PdConnector, _name)
        if inspect.isfunction(_member):
            setattr(_Timed, _name, _timed(_name, _member))


class SteppedConnector(_Stepping, PdConnector):
    """Only knows when steps end."""


class TimedConnector(_Stepping, _Timed):
    """Knows what every hook took, too."""
