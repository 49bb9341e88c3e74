"""NIXL's progress thread: sleeps between events, or spins while reads need it.

Over TCP a read moves only while threads work on both sides, and a thread that sleeps between events
loses most of the time to waking up: on virtual machines the reader gets half of the throughput of a
thread that spins.  A thread that always spins wastes a core, and is slower over shared memory.

NIXL fixes the delay of the thread when it creates the agent.  But the thread polls the event
descriptor of UCX's worker, an epoll set to which users may add descriptors (the documentation of
``ucp_worker_get_efd`` and of ``UCP_WORKER_PARAM_FIELD_EVENT_FD``).  An eventfd in that set keeps
the thread awake as long as it is readable, without the interpreter lock or a thread of ours.

Only the thread of the *reader* is driven.  The lender's is busy with what it sends: on two cores
driving it as well was slower more often than faster (``docs/benchmarks.md``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

_log = logging.getLogger(__name__)

DRIVE_AFTER_S = 0.01
"""How long reads are in flight before the thread is driven.  Shorter ones gain two milliseconds at
most, and where another process, such as the lender, computes on that core, the thread delays it
before that can be measured: on two cores hand-overs of 30 ms took 85."""

DRIVE_S = 0.5
"""How long the thread is driven after a read was posted or has ended.  A peer that hangs, or a very
slow link, occupies no core for longer."""

POLL_PAUSE_S = 0.001
"""Between polls while the thread is driven: a poll holds UCX's lock, which the thread needs."""

_TRIAL_S = 0.02
_AWAKE = 0.25
"""The least share of the trial in which a thread that does not sleep ran, or waited for a core."""

_LOOK_S = 0.01
_WEIGHT = 0.25
_CROWDED = 0.3
"""A driven thread that waits for a core for this share of the time, on average over the last looks,
delays another one, of a model or of the lender.  Alone on two cores it waits for 0.01 of the median
look and 0.5 of one in ten; beside a model and a lender on one core, for 0.5 of most."""

BACK_OFF_S = 1.0
_MOST_BACK_OFF_S = 16.0
"""How long it is not driven then; longer each time that it delays another thread again."""

_CALM = 5
"""Looks without delaying another thread after which the back-off starts again."""

_PROC = Path("/proc/self")


class Drivable(Protocol):
    """A progress thread that can be kept awake (:class:`ProgressThread`)."""

    def drive(self) -> None: ...

    def stop_driving(self) -> None: ...

    def core_wait_s(self) -> float: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Threads and epoll sets of this process, to find those that a backend creates."""

    threads: frozenset[int]
    epoll_sets: frozenset[int]

    @classmethod
    def now(cls, proc: Path = _PROC) -> ProcessState:
        """The present state, from ``/proc``; empty where there is none."""
        return cls(frozenset(_numbers(proc / "task")), frozenset(_epoll_sets(proc)))


@dataclass(frozen=True, slots=True)
class WorkerEvents:
    """What a UCX backend has created: its worker's event descriptor, and its threads."""

    descriptors: tuple[int, ...]
    threads: tuple[int, ...]

    @classmethod
    def made_since(cls, before: ProcessState, proc: Path = _PROC) -> WorkerEvents:
        """Find them, right after the backend was started; descriptors: all that may be it."""
        # NIXL does not name the descriptor.  It is the new epoll set in which UCX keeps no data
        # beside the descriptors.
        made = [number for number in _epoll_sets(proc) if number not in before.epoll_sets]
        found = tuple(number for number in made if _is_without_data(number, proc))
        return cls(found, tuple(set(_numbers(proc / "task")) - before.threads))


class ProgressThread:
    """The progress thread of a UCX backend, which is driven once for ``_TRIAL_S`` as a test.

    Args:
        cores: that the thread may run on while it is driven; empty: as at rest.

    Raises:
        OSError: its descriptor is unknown, or it cannot be kept awake.
    """

    def __init__(self, worker: WorkerEvents, cores: Iterable[int] = ()) -> None:
        if len(worker.descriptors) != 1:
            seen = len(worker.descriptors)
            raise OSError(f"event descriptors of UCX: expected one, found {seen}")
        self._is_driven = False
        self._cores: tuple[set[int], set[int]] | None = None
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._events = select.epoll.fromfd(os.dup(worker.descriptors[0]))  # closes its argument
        except OSError:
            os.close(self._awake)
            raise
        self._events.register(self._awake, select.EPOLLIN)
        try:
            self._thread = self._try(worker.threads)
            if cores:
                at_rest = os.sched_getaffinity(self._thread)
                os.sched_setaffinity(self._thread, set(cores))  # raises if none of them exists
                os.sched_setaffinity(self._thread, at_rest)
                self._cores = at_rest, set(cores)
        except OSError:
            self.close()
            raise

    def drive(self) -> None:
        """Make the thread spin.  Idempotent."""
        if not self._is_driven:
            self._is_driven = True
            self._bind()
            os.eventfd_write(self._awake, 1)

    def stop_driving(self) -> None:
        """Let the thread sleep between events again.  Idempotent."""
        if self._is_driven:
            self._is_driven = False
            os.eventfd_read(self._awake)
            self._bind()

    def _bind(self) -> None:
        """Keep a spinning thread off the model's cores; at rest it may wake up on any."""
        if self._cores is not None:
            with contextlib.suppress(OSError):  # cores were taken offline
                os.sched_setaffinity(self._thread, self._cores[self._is_driven])

    def core_wait_s(self) -> float:
        """Seconds that the thread has waited for a core since it started."""
        return _ran_and_waited(self._thread)[1]

    def close(self) -> None:
        """Leave the thread at rest.  It must not have ended, or its descriptor may be another's."""
        self.stop_driving()
        with contextlib.suppress(OSError):
            self._events.unregister(self._awake)
        self._events.close()
        os.close(self._awake)

    def _try(self, threads: Iterable[int]) -> int:
        """Drive the thread for ``_TRIAL_S``; returns the thread that was awake."""
        # This proves that the descriptor is the right one.
        before = {thread: sum(_ran_and_waited(thread)) for thread in threads}
        self.drive()
        time.sleep(_TRIAL_S)
        self.stop_driving()
        awake = {thread: sum(_ran_and_waited(thread)) - before[thread] for thread in threads}
        thread = max(awake, key=awake.__getitem__, default=0)
        if not thread or awake[thread] < _AWAKE * _TRIAL_S:
            seen = {thread: round(seconds, 4) for thread, seconds in awake.items()}
            raise OSError(f"no thread stayed awake for {_TRIAL_S} s, they were for {seen}")
        return thread


@dataclass(slots=True)
class AdaptiveProgress:
    """Drives ``thread`` while reads need it; used by one thread at a time.

    Args:
        thread: None: it is never driven.
        why: for logs.
    """

    thread: Drivable | None
    why: str
    clock: Callable[[], float] = time.monotonic
    _until: float = field(default=0.0, init=False)
    _not_before: float = field(default=0.0, init=False)
    _back_off_s: float = field(default=BACK_OFF_S, init=False)
    _looked: tuple[float, float] = field(default=(0.0, 0.0), init=False)
    _waiting: float = field(default=0.0, init=False)
    _looks: int = field(default=0, init=False)
    _busy_since: float | None = field(default=None, init=False)
    _drives: bool = field(default=False, init=False)

    @property
    def poll_pause_s(self) -> float:
        """The least pause between polls that does not slow the thread down."""
        return POLL_PAUSE_S if self._drives else 0.0

    def moved(self) -> None:
        """Record that a read was posted and is in flight, or that one has ended."""
        if self.thread is not None:
            self._until = self.clock() + DRIVE_S

    def update(self, in_flight: int) -> None:
        """Drive the thread or let it sleep, as ``in_flight`` reads need it and cores allow it."""
        if not in_flight:
            self._busy_since = None
        if self.thread is None or not (in_flight or self._drives):
            return
        now = self.clock()
        if self._drives and now - self._looked[0] >= _LOOK_S:
            self._look_for_others(now)
        wanted = in_flight > 0 and self._may_drive(now)
        if wanted != self._drives:
            self._drives = wanted
            if wanted:
                self._looked, self._looks = (now, self.thread.core_wait_s()), 0
                self.thread.drive()
            else:
                self.thread.stop_driving()
                if now >= self._not_before and self._looks >= _CALM:
                    self._back_off_s = BACK_OFF_S

    def _may_drive(self, now: float) -> bool:
        """Whether reads have been in flight for long, still move, and no back-off is in force."""
        if self._busy_since is None:
            self._busy_since = now
        begin = max(self._not_before, self._busy_since + DRIVE_AFTER_S)
        return begin <= now < self._until

    def _look_for_others(self, now: float) -> None:
        """Back off if the thread keeps waiting for its core."""
        assert self.thread is not None
        (since, before), waited = self._looked, self.thread.core_wait_s()
        share = (waited - before) / (now - since)
        self._waiting += _WEIGHT * (share - self._waiting)
        self._looked = now, waited
        self._looks += 1
        if self._waiting > _CROWDED:
            self._not_before = now + self._back_off_s
            self._back_off_s = min(2 * self._back_off_s, _MOST_BACK_OFF_S)
            self._waiting = 0.0

    def close(self) -> None:
        """Leave the thread at rest.  Call it before the agent is closed."""
        if self.thread is not None:
            self.thread.close()
            self.thread, self._drives = None, False


def adaptive_progress(
    worker: WorkerEvents, possible: Iterable[str], drive_on: Collection[int] | None
) -> AdaptiveProgress:
    """Drives the thread where reads need it and a core is left for it.

    Args:
        possible: UCX's transports and devices, like ``tcp/eth0``; empty where unknown.
        drive_on: cores for the thread; empty: none; None: any, if there are two.
    """
    needed = reads_need_progress(possible)
    if needed is None:
        return AdaptiveProgress(None, "rests: UCX cannot be asked for its transports")
    if not needed:
        return AdaptiveProgress(None, "rests: UCX reads without it (no TCP, or RDMA besides)")
    if drive_on is None and len(os.sched_getaffinity(0)) < 2:
        return AdaptiveProgress(None, "rests: this process has a single core")
    if drive_on is not None and not drive_on:
        return AdaptiveProgress(None, "rests: no core is left for it (progress_cores)")
    try:
        thread = ProgressThread(worker, drive_on or ())
    except OSError as error:
        return AdaptiveProgress(None, f"rests: {error}")
    on = ",".join(map(str, sorted(drive_on))) if drive_on else "any"
    return AdaptiveProgress(thread, f"spins while reads over TCP are in flight: cores={on}")


def reads_need_progress(possible: Iterable[str]) -> bool | None:
    """Whether a read in flight needs threads to move: over TCP, but not over RDMA.

    Args:
        possible: UCX's transports and devices, like ``tcp/eth0``; empty where unknown.

    Returns:
        None where it is not known.

    >>> reads_need_progress(["posix/memory", "tcp/eth0", "cma/memory"])
    True
    >>> reads_need_progress(["tcp/eth0", "rc_mlx5/mlx5_0:1"])
    False
    """
    names = {one.partition("/")[0] for one in possible}
    if not names:
        return None
    return "tcp" in names and not any(name.startswith(_RDMA) for name in names)


_RDMA = ("rc", "dc", "ud", "srd", "gga", "efa")


def _is_without_data(epoll_set: int, proc: Path) -> bool:
    """Whether an epoll set has descriptors, all of them with empty data.

    A line of ``fdinfo`` reads ``tfd: 11 events: 19 data: 0 pos:0 …`` (proc(5)).
    """
    text = (proc / "fdinfo" / str(epoll_set)).read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if line.startswith("tfd:")]
    return bool(lines) and all(words[4:6] == ["data:", "0"] for words in lines)


def _epoll_sets(proc: Path) -> list[int]:
    found = []
    for number in _numbers(proc / "fd"):
        with contextlib.suppress(OSError):
            if os.readlink(proc / "fd" / str(number)) == "anon_inode:[eventpoll]":
                found.append(number)
    return found


def _numbers(folder: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(folder))
    except OSError:
        return []


def _ran_and_waited(thread: int) -> tuple[float, float]:
    """Seconds that a thread of this process has run, and has waited for a core.

    Both are 0 for a thread that has ended (``schedstat`` in proc(5)).
    """
    try:
        ran, waited, _ = (
            (_PROC / "task" / str(thread) / "schedstat").read_text(encoding="utf-8").split()
        )
    except OSError:
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9
