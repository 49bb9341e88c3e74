"""Host memory of a rank, its reports, and its threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pdconn.store.rank import copies
from pdconn.store.rank.copies import HostArea
from pdconn.store.rank.tasks import SwitchedOff, TaskLoop, TaskReport, TaskReports
from pdconn.store.rank_commands import SaveResult
from pdconn.threads import Box, Worker

PATIENCE_S = 30.0


def test_an_area_is_of_whole_pages_and_writable_at_its_address() -> None:
    area = HostArea(5000)
    assert (area.nbytes, area.address % 4096) == (8192, 0)
    area.bytes_at(4096, 1)[0] = 9
    raw = np.frombuffer(area.bytes_at(0, 8192), np.uint8)
    assert raw.ctypes.data == area.address
    assert raw[4096] == 9
    assert raw.sum() == 9


@pytest.mark.parametrize(
    ("offset", "nbytes", "fits"),
    [(0, 8192, True), (4096, 4096, True), (4096, 4097, False), (-4096, 1, False), (1, 1, False)],
)
def test_an_area_holds_what_begins_at_a_page_and_ends_in_it(
    offset: int, nbytes: int, fits: bool
) -> None:
    assert HostArea(8192).holds(offset, nbytes) == fits


@dataclass
class CudaRuntime:
    """Answers with ``code``; remembers what is registered."""

    code: int = 0
    registered: list[int] = field(default_factory=list)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert (nbytes, flags) == (8192, 0)
        self.registered.append(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        self.registered.remove(address)


def test_pinned_memory_is_unpinned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CudaRuntime()
    monkeypatch.setattr(copies, "_cuda_runtime", lambda: runtime)
    area = HostArea(8192)
    assert area.pin_pages()
    assert runtime.registered == [area.address]
    area.unpin_pages()
    area.unpin_pages()
    assert runtime.registered == []


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no GPU")

    for runtime in (lambda: CudaRuntime(code=2), fail):
        monkeypatch.setattr(copies, "_cuda_runtime", runtime)
        area = HostArea(8192)
        assert not area.pin_pages()
        area.unpin_pages()
        area.bytes_at(0, 1)[0] = 1
    assert "error=2" in caplog.text
    assert "error=no GPU" in caplog.text


def test_a_report_carries_what_was_counted_before_it() -> None:
    outbox: Box[TaskReport] = Box()
    reports = TaskReports(outbox)
    reports.add_counts(rows=2)
    reports.add_counts(rows=3, bytes=1)
    reports.answer(SaveResult(1))
    reports.answer(SaveResult(2))
    reports.report_counts()
    reports.add_counts(rows=1)
    reports.report_counts()
    assert outbox.take_all() == [
        TaskReport(SaveResult(1), {"rows": 5, "bytes": 1}),
        TaskReport(SaveResult(2), {}),
        TaskReport(None, {"rows": 1}),
    ]


@pytest.mark.parametrize("quietly", [True, False])
def test_an_answer_that_others_follow_wakes_nobody(quietly: bool) -> None:
    outbox: Box[TaskReport] = Box()
    sleeper = threading.Thread(target=outbox.wait_for_item, args=(5.0,))
    sleeper.start()
    while not outbox._sleepers:
        pass
    TaskReports(outbox).answer(SaveResult(1), quietly=quietly)
    sleeper.join(0.2 if quietly else PATIENCE_S)
    assert sleeper.is_alive() == quietly
    outbox.wake()
    sleeper.join()


def test_a_warning_of_one_kind_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    reports = TaskReports(Box(), lambda: now[0])
    for row in range(5):
        reports.warn("a damaged row: row=%d", row)
    reports.warn("another: %d", 7)
    now[0] = 11.0
    reports.warn("a damaged row: row=%d", 5)
    assert [record.getMessage() for record in caplog.records] == [
        "pdconn: store: a damaged row: row=0",
        "pdconn: store: another: 7",
        "pdconn: store: a damaged row: row=5 (4 similar warnings suppressed)",
    ]


def worked(
    tasks: list[int], begin: Callable[[], Any], refuse: Callable[[int], None]
) -> tuple[Box[int], Box[TaskReport]]:
    """The boxes after a thread has worked all of ``tasks`` off, and has ended."""
    inbox: Box[int] = Box()
    outbox: Box[TaskReport] = Box()
    loop = TaskLoop("t", inbox, TaskReports(outbox), begin=begin, refuse=refuse)
    worker = Worker("t", loop.run_tasks, inbox, outbox)
    inbox.put_all(tasks)
    worker.start_thread()
    until = time.monotonic() + PATIENCE_S
    while inbox.items:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert worker.end_thread(PATIENCE_S)
    return inbox, outbox


@pytest.mark.parametrize(
    ("errors", "refused"),
    [
        ({1: ValueError()}, [1]),
        ({1: ValueError(), 2: ValueError()}, [1, 2]),
        ({1: ValueError(), 2: ValueError(), 3: ValueError()}, [1, 2, 3, 4, 5]),
        ({1: SystemExit()}, [1, 2, 3, 4, 5]),
    ],
)
def test_a_third_unexpected_error_switches_a_thread_off(
    errors: dict[int, BaseException], refused: list[int]
) -> None:
    seen: list[int] = []

    def work(task: int) -> None:
        if task in errors:
            raise errors[task]

    _, outbox = worked([0, 1, 2, 3, 4, 5], lambda: (work, lambda: None), seen.append)
    assert seen == refused
    is_off = TaskReport(SwitchedOff("t"), {}) in outbox.take_all()
    assert is_off == (len(refused) > 3)


def test_a_refusal_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def refuse(task: int) -> None:
        seen.append(task)
        raise ZeroDivisionError

    def begin() -> tuple[object, object]:
        raise ValueError

    _, outbox = worked(list(range(10)), begin, refuse)
    assert seen == list(range(10))
    assert outbox.take_all() == [TaskReport(SwitchedOff("t"), {})]
    assert "a task was not refused" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR
