"""NIXL's progress thread: at rest between events, or driven at full speed while reads need it.

Over TCP a read moves only while threads work on both sides, and a thread that sleeps between
events loses most of the time to waking up: on virtual machines the reader gets half of what
one that spins gets.  One that always spins takes a core for nothing, and over shared memory
it is slower as well, since ``post`` copies there.  NIXL fixes the thread's pace when the agent
is made.  What can be changed is what it waits for: it polls the event descriptor of UCX's
worker, an epoll set, to which UCX lets a user add descriptors of its own (the documentation of
``ucp_worker_get_efd`` and of ``UCP_WORKER_PARAM_FIELD_EVENT_FD``).  An eventfd in that set
keeps the thread awake for as long as it is readable; neither Python's interpreter lock nor
any thread of ours takes part.

NIXL does not name the descriptor.  It is the one epoll set that starting the backend left
behind in which UCX keeps no data beside the descriptors, as ``/proc/self/fdinfo`` shows; that
the right one was found is seen from the thread, which must then use its core.  Where any of
this fails the thread rests, as NIXL has it.

Only a thread of the *reader* is driven.  The lender's is kept busy by what it sends: on two cores
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
most, and where another process computes on that core, say the lender, the thread is in its way
before that can be seen: on two cores hand-overs of 30 ms took 85."""

DRIVE_S = 0.5
"""How long the thread is driven after a read was posted or has ended.  A peer that hangs, or a
link so slow that nothing ends for so long, takes no core for longer."""

POLL_PAUSE_S = 0.001
"""Between polls while the thread is driven: a poll holds UCX's lock, which the thread needs."""

_TRIAL_S = 0.02
_AWAKE = 0.25
"""The least share of the trial in which a thread that does not sleep ran, or waited for a core."""

_LOOK_S = 0.01
_WEIGHT = 0.25
_CROWDED = 0.3
"""A thread that is driven and waits for a core for so much of the time, on average over the last
looks, is in somebody's way, a model's or the lender's.  Alone on two cores it waits for 0.01 of the
median look and 0.5 of one in ten; beside a model and a lender on one of them, for 0.5 of most."""

BACK_OFF_S = 1.0
_MOST_BACK_OFF_S = 16.0
"""How long it rests then; longer each time that it was in the way again."""

_CALM = 5
"""Looks in a row, at the end of reads, after which it was in nobody's way."""

_PROC = Path("/proc/self")


class Drivable(Protocol):
    """A progress thread that can be kept awake."""

    def drive(self) -> None: ...

    def rest(self) -> None: ...

    def waited_s(self) -> float: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Threads and epoll sets of this process, to tell which ones a backend has made."""

    threads: frozenset[int]
    epoll_sets: frozenset[int]

    @classmethod
    def now(cls, proc: Path = _PROC) -> ProcessState:
        """As ``/proc`` has it; empty where there is none."""
        return cls(frozenset(_numbers(proc / "task")), frozenset(_epoll_sets(proc)))


@dataclass(frozen=True, slots=True)
class WorkerEvents:
    """What a UCX backend left in this process: its worker's event descriptor, and its threads."""

    descriptors: tuple[int, ...]
    threads: tuple[int, ...]

    @classmethod
    def made_since(cls, before: ProcessState, proc: Path = _PROC) -> WorkerEvents:
        """Find them, right after the backend was started; all descriptors that could be it."""
        made = [number for number in _epoll_sets(proc) if number not in before.epoll_sets]
        found = tuple(number for number in made if _is_without_data(number, proc))
        return cls(found, tuple(set(_numbers(proc / "task")) - before.threads))


class ProgressThread:
    """The progress thread of a UCX backend, tried for a moment.

    Args:
        cores: that the thread may run on while it is driven; empty leaves it where it is.

    Raises:
        OSError: its descriptor is not known, or it cannot be kept awake.
    """

    def __init__(self, worker: WorkerEvents, cores: Iterable[int] = ()) -> None:
        if len(worker.descriptors) != 1:
            seen = len(worker.descriptors)
            raise OSError(f"event descriptors of UCX: expected one, found {seen}")
        self._is_driven = False
        self._cores: tuple[set[int], set[int]] | None = None
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._events = select.epoll.fromfd(os.dup(worker.descriptors[0]))  # closes what it gets
        except OSError:
            os.close(self._awake)
            raise
        self._events.register(self._awake, select.EPOLLIN)
        try:
            self._thread = self._try(worker.threads)
            if cores:
                at_rest = os.sched_getaffinity(self._thread)
                os.sched_setaffinity(self._thread, set(cores))  # raises if there are none of these
                os.sched_setaffinity(self._thread, at_rest)
                self._cores = at_rest, set(cores)
        except OSError:
            self.close()
            raise

    def drive(self) -> None:
        """Let the thread spin; harmless while it does."""
        if not self._is_driven:
            self._is_driven = True
            self._bind()
            os.eventfd_write(self._awake, 1)

    def rest(self) -> None:
        """Let the thread sleep between events; harmless while it does."""
        if self._is_driven:
            self._is_driven = False
            os.eventfd_read(self._awake)
            self._bind()

    def _bind(self) -> None:
        """Keep a thread that spins off the model's cores; one that rests may wake up on any."""
        if self._cores is not None:
            with contextlib.suppress(OSError):  # the machine's cores have changed
                os.sched_setaffinity(self._thread, self._cores[self._is_driven])

    def waited_s(self) -> float:
        """Seconds that the thread was able to run and had no core, since it began."""
        return _ran_and_waited(self._thread)[1]

    def close(self) -> None:
        """Leave the thread at rest; it must not have ended yet, or another descriptor is meant."""
        self.rest()
        with contextlib.suppress(OSError):
            self._events.unregister(self._awake)
        self._events.close()
        os.close(self._awake)

    def _try(self, threads: Iterable[int]) -> int:
        """Drive it for a moment; returns the thread that was awake."""
        before = {thread: sum(_ran_and_waited(thread)) for thread in threads}
        self.drive()
        time.sleep(_TRIAL_S)
        self.rest()
        awake = {thread: sum(_ran_and_waited(thread)) - before[thread] for thread in threads}
        thread = max(awake, key=awake.__getitem__, default=0)
        if not thread or awake[thread] < _AWAKE * _TRIAL_S:
            seen = {thread: round(seconds, 4) for thread, seconds in awake.items()}
            raise OSError(f"no thread stayed awake for {_TRIAL_S} s, they were for {seen}")
        return thread


@dataclass(slots=True)
class AdaptiveProgress:
    """Drives ``thread`` while reads need it, and for no longer; used by one thread at a time.

    Args:
        thread: None rests always.
        why: what is said of it in logs.
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
        """A read was posted and is in flight, or one has ended."""
        if self.thread is not None:
            self._until = self.clock() + DRIVE_S

    def update(self, in_flight: int) -> None:
        """Drive or rest, as ``in_flight`` reads need it and cores allow it now."""
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
                self._looked, self._looks = (now, self.thread.waited_s()), 0
                self.thread.drive()
            else:
                self.thread.rest()
                if now >= self._not_before and self._looks >= _CALM:
                    self._back_off_s = BACK_OFF_S

    def _may_drive(self, now: float) -> bool:
        """Whether reads have been in flight for long, still move, and crowd nobody."""
        if self._busy_since is None:
            self._busy_since = now
        begin = max(self._not_before, self._busy_since + DRIVE_AFTER_S)
        return begin <= now < self._until

    def _look_for_others(self, now: float) -> None:
        """Back off if the thread keeps waiting for its core."""
        assert self.thread is not None
        (since, before), waited = self._looked, self.thread.waited_s()
        share = (waited - before) / (now - since)
        self._waiting += _WEIGHT * (share - self._waiting)
        self._looked = now, waited
        self._looks += 1
        if self._waiting > _CROWDED:
            self._not_before = now + self._back_off_s
            self._back_off_s = min(2 * self._back_off_s, _MOST_BACK_OFF_S)
            self._waiting = 0.0

    def close(self) -> None:
        """Let the thread go, at rest; must precede the end of the agent."""
        if self.thread is not None:
            self.thread.close()
            self.thread, self._drives = None, False


def adaptive_progress(
    worker: WorkerEvents, possible: Iterable[str], drive_on: Collection[int] | None
) -> AdaptiveProgress:
    """Drive the thread where reads need it and a core is left for it.

    Args:
        possible: UCX's transports and devices, like ``tcp/eth0``; empty where unknown.
        drive_on: cores for the thread; empty for none, None for any, if there are two.
    """
    needed = reads_need_progress(possible)
    if needed is None:
        return AdaptiveProgress(None, "rests: UCX cannot be asked for its transports")
    if not needed:
        return AdaptiveProgress(None, "rests: UCX reads without it (no TCP, or RDMA beside it)")
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
    """Whether a read that is in flight needs threads to move: over TCP, but not over RDMA.

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
    """Whether it watches something, and keeps the same empty data with all of it.

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
    """Seconds that a thread of this process ran, and that it waited for a core.

    Both are 0 for one that has ended.  See ``schedstat`` in proc(5).
    """
    try:
        ran, waited, _ = (
            (_PROC / "task" / str(thread) / "schedstat").read_text(encoding="utf-8").split()
        )
    except OSError:
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9
