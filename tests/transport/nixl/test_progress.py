"""NIXL's thread is driven while reads need it: not for longer, not on a guess, not for RDMA."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from transport.nixl.progress import (
    DRIVE_AFTER_S,
    DRIVE_S,
    POLL_PAUSE_S,
    AdaptiveProgress,
    ProcessState,
    ProgressThread,
    WorkerEvents,
    adaptive_progress,
    reads_need_progress,
)
from transport.testing.inprocess.faults import ManualClock


class FakeProgressThread:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.waited = 50.0

    def core_wait_s(self) -> float:
        return self.waited

    def drive(self) -> None:
        self.log.append("drive")

    def stop_driving(self) -> None:
        self.log.append("rest")

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def thread() -> FakeProgressThread:
    return FakeProgressThread()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def progress(thread: FakeProgressThread, clock: ManualClock) -> AdaptiveProgress:
    return AdaptiveProgress(thread, "under test", clock)


def begin(progress: AdaptiveProgress, clock: ManualClock) -> None:
    """Reads are in flight for as long as it takes until the thread is driven for them."""
    progress.moved()
    progress.update(1)
    clock.advance(DRIVE_AFTER_S * 1.01)
    progress.update(1)


def test_it_is_driven_while_reads_are_in_flight_for_long(
    progress: AdaptiveProgress, thread: FakeProgressThread, clock: ManualClock
) -> None:
    progress.update(0)
    assert (thread.log, progress.poll_pause_s) == ([], 0.0)
    begin(progress, clock)
    for in_flight in (2, 1):
        progress.update(in_flight)
    assert (thread.log, progress.poll_pause_s) == (["drive"], POLL_PAUSE_S)
    progress.moved()
    progress.update(0)
    assert (thread.log, progress.poll_pause_s) == (["drive", "rest"], 0.0)


def test_short_reads_one_after_another_drive_nothing(
    progress: AdaptiveProgress, thread: FakeProgressThread, clock: ManualClock
) -> None:
    for _ in range(20):
        progress.moved()
        progress.update(1)
        clock.advance(DRIVE_AFTER_S * 0.9)
        progress.update(1)
        progress.update(0)
    assert thread.log == []
    begin(progress, clock)
    progress.update(0)  # rests, and the next read counts from its own beginning
    progress.moved()
    progress.update(1)
    assert thread.log == ["drive", "rest"]


def test_a_read_that_hangs_takes_no_core_for_long(
    progress: AdaptiveProgress, thread: FakeProgressThread, clock: ManualClock
) -> None:
    begin(progress, clock)
    clock.advance(DRIVE_S * 0.9)
    progress.update(1)
    assert thread.log == ["drive"]
    clock.advance(DRIVE_S)
    progress.update(1)
    assert thread.log == ["drive", "rest"]
    progress.moved()  # another one ended: bytes move again
    progress.update(1)
    assert thread.log == ["drive", "rest", "drive"]


def _driven(
    progress: AdaptiveProgress, thread: FakeProgressThread, clock: ManualClock, *shares: float
) -> None:
    """One look after the other, at which it had waited for its core for ``shares`` of the time."""
    begin(progress, clock)
    for share in shares:
        clock.advance(0.01)
        thread.waited += share * 0.01
        progress.moved()
        progress.update(1)


def test_a_thread_that_keeps_waiting_for_its_core_rests_longer_each_time(
    progress: AdaptiveProgress, thread: FakeProgressThread, clock: ManualClock
) -> None:
    for pause in (1.0, 2.0, 4.0):
        thread.log.clear()
        _driven(progress, thread, clock, *[0.5] * 8)
        assert thread.log == ["drive", "rest"]
        clock.advance(pause - 0.1)
        progress.moved()
        progress.update(1)
        assert thread.log == ["drive", "rest"]
        clock.advance(0.2)
    thread.log.clear()
    _driven(progress, thread, clock, *[0.0] * 5)
    progress.update(0)  # in nobody's way this time
    _driven(progress, thread, clock, *[0.5] * 8)
    clock.advance(1.1)
    _driven(progress, thread, clock, 0.0)
    assert thread.log == ["drive", "rest", "drive", "rest", "drive"]


def test_a_thread_that_waits_for_a_moment_goes_on(
    progress: AdaptiveProgress, thread: FakeProgressThread, clock: ManualClock
) -> None:
    _driven(progress, thread, clock, *[0.0, 0.01, 0.6, 0.02] * 20)
    assert thread.log == ["drive"]


def test_short_reads_in_nobodys_way_do_not_end_the_back_off(
    progress: AdaptiveProgress, thread: FakeProgressThread, clock: ManualClock
) -> None:
    for pause in (1.0, 2.0):
        _driven(progress, thread, clock, *[0.5] * 8)
        assert thread.log == ["drive", "rest"]
        progress.update(0)
        clock.advance(pause - 0.1)
        begin(progress, clock)
        progress.update(0)
        assert thread.log == ["drive", "rest"]
        clock.advance(0.2)
        _driven(progress, thread, clock, 0.0, 0.0)
        progress.update(0)
        assert thread.log == ["drive", "rest", "drive", "rest"]
        thread.log.clear()


def test_after_close_nothing_is_driven(
    progress: AdaptiveProgress, thread: FakeProgressThread, clock: ManualClock
) -> None:
    begin(progress, clock)
    progress.close()
    begin(progress, clock)
    progress.close()
    assert thread.log == ["drive", "close"]
    assert progress.poll_pause_s == 0.0


@pytest.mark.parametrize(
    ("possible", "needed"),
    [
        (["posix/memory", "cma/memory", "tcp/eth0"], True),
        (["tcp/eth0", "cuda_copy/cuda", "cuda_ipc/cuda"], True),
        (["rc_mlx5/mlx5_0:1", "tcp/eth0"], False),
        (["srd/rdmap0s1:1", "tcp/eth0"], False),
        (["posix/memory", "cma/memory"], False),
        ([], None),
    ],
)
def test_only_reads_over_tcp_need_it(possible: list[str], needed: bool | None) -> None:
    assert reads_need_progress(possible) is needed


@pytest.mark.parametrize(
    ("here", "possible", "cores", "why"),
    [
        ({0, 1}, [], None, "cannot be asked"),
        ({0, 1}, ["cma/memory"], None, "without it"),
        ({0, 1}, ["tcp/lo"], frozenset(), "no core is left"),
        ({0, 1}, ["tcp/lo"], None, "expected one, found 2"),
        ({1}, ["tcp/lo"], None, "a single core"),
    ],
)
def test_without_need_core_or_certainty_it_rests(
    monkeypatch: pytest.MonkeyPatch,
    here: set[int],
    possible: list[str],
    cores: frozenset[int] | None,
    why: str,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: here)
    progress = adaptive_progress(WorkerEvents((3, 4), ()), possible, cores)
    assert progress.thread is None
    assert progress.why.startswith("rests: ")
    assert why in progress.why
    progress.moved()
    progress.update(1)
    assert progress.poll_pause_s == 0.0


class FakeProc:
    """A folder like ``/proc/self``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("fd", "fdinfo", "task"):
            (folder / name).mkdir()

    def add(self, number: int, *data: str, kind: str = "anon_inode:[eventpoll]") -> None:
        (self.folder / "fd" / str(number)).symlink_to(kind)
        lines = [f"tfd: {9 + at} events: 19 data: {one}  pos:0" for at, one in enumerate(data)]
        (self.folder / "fdinfo" / str(number)).write_text(
            "\n".join(["pos:\t0", *lines]), encoding="utf-8"
        )


def test_the_worker_is_the_new_epoll_set_without_data(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.add(3, "0", "0")  # of another worker, made before
    (tmp_path / "task" / "70").mkdir()
    before = ProcessState.now(tmp_path)
    proc.add(4, "f", "6")  # of UCX's own thread
    proc.add(5, "0", "0", "0")
    proc.add(6)  # of an interface without a connection
    proc.add(7, "55d8a76fb2d0")
    proc.add(8, "0", kind="socket:[1]")
    (tmp_path / "task" / "71").mkdir()
    assert WorkerEvents.made_since(before, tmp_path) == WorkerEvents((5,), (71,))


def test_where_two_could_be_it_both_are_named(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    before = ProcessState.now(tmp_path)
    proc.add(5, "0")
    proc.add(6, "0")
    assert WorkerEvents.made_since(before, tmp_path).descriptors == (5, 6)


class Sleeper:
    """A thread that waits for an epoll set, as NIXL's does; a deaf one sleeps and hears nothing."""

    def __init__(self, *, deaf: bool) -> None:
        self.before = ProcessState.now()
        self.events = select.epoll()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ended.wait if deaf else self._run)
        self._thread.start()
        if deaf:
            self._until_asleep()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self.events, select.POLLIN)
        while not self._ended.is_set():
            poll.poll(5)

    def _until_asleep(self) -> None:
        """It started, and then neither ran nor waited for a core for a while."""
        [thread] = self.found.threads
        seen, now = None, _times(thread)
        while now != seen or now[0] == 0 or _state(thread) != "S":
            time.sleep(0.05)
            seen, now = now, _times(thread)

    @property
    def found(self) -> WorkerEvents:
        threads = ProcessState.now().threads - self.before.threads
        return WorkerEvents((self.events.fileno(),), tuple(threads))

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.events.close()


def _times(thread: int) -> tuple[int, int]:
    """Nanoseconds that it ran, and that it waited for a core."""
    ran, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="utf-8").split()
    return int(ran), int(waited)


def _state(thread: int) -> str:
    return (
        Path(f"/proc/self/task/{thread}/stat")
        .read_text(encoding="utf-8")
        .rpartition(")")[2]
        .split()[0]
    )


def _used_by(threads: tuple[int, ...], seconds: float) -> float:
    def used() -> int:
        return sum(_times(one)[0] for one in threads)

    before = used()
    time.sleep(seconds)
    return (used() - before) / 1e9 / seconds


def test_a_thread_is_kept_awake_and_let_go() -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    with closing(Sleeper(deaf=False)) as sleeper:
        worker = sleeper.found
        thread = ProgressThread(worker, os.sched_getaffinity(0))
        resting = _used_by(worker.threads, 0.1)
        thread.drive()
        thread.drive()
        # A busy machine may give it no core for a while.
        driven = max(_used_by(worker.threads, 0.1) for _ in range(5))
        thread.close()
        assert driven > 3 * max(resting, _used_by(worker.threads, 0.1))
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_a_thread_is_bound_to_its_cores_only_while_it_is_driven() -> None:
    """At rest it may wake up anywhere: on few cores, one that is bound waits behind a model."""
    every = os.sched_getaffinity(0)
    with closing(Sleeper(deaf=False)) as sleeper:
        [number] = sleeper.found.threads
        thread = ProgressThread(sleeper.found, {min(every)})
        seen = [os.sched_getaffinity(number)]
        for change in (thread.drive, thread.stop_driving, thread.drive, thread.close):
            change()
            seen.append(os.sched_getaffinity(number))
    assert seen == [every, {min(every)}, every, {min(every)}, every]


def test_cores_that_this_machine_has_not_are_refused() -> None:
    with closing(Sleeper(deaf=False)) as sleeper, pytest.raises(OSError, match="Invalid argument"):
        ProgressThread(sleeper.found, {max(os.sched_getaffinity(0)) + 4096})


def test_a_thread_that_sleeps_nevertheless_is_refused_and_nothing_is_left_behind() -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    with closing(Sleeper(deaf=True)) as sleeper, pytest.raises(OSError, match="stayed awake"):
        ProgressThread(sleeper.found)
    assert set(os.listdir("/proc/self/fd")) == descriptors
