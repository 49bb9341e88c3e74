"""Host memory of a rank, its reports, and its threads."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from pdconn.store.commands import SaveResult
from pdconn.store.rank import staging
from pdconn.store.rank.reports import StoreReports
from pdconn.store.rank.staging import HostArea
from pdconn.store.rank.task_threads import TaskThreads

PATIENCE_S = 30.0


def test_an_area_is_of_whole_pages_and_writable_at_its_address() -> None:
    area = HostArea(5000)
    assert (area.nbytes, area.address % 4096) == (8192, 0)
    area.view(4096, 1)[0] = 9
    raw = np.frombuffer(area.view(0, 8192), np.uint8)
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
    monkeypatch.setattr(staging, "_cuda_runtime", lambda: runtime)
    area = HostArea(8192)
    assert area.pin()
    assert runtime.registered == [area.address]
    area.unpin()
    area.unpin()
    assert runtime.registered == []


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no GPU")

    for runtime in (lambda: CudaRuntime(code=2), fail):
        monkeypatch.setattr(staging, "_cuda_runtime", runtime)
        area = HostArea(8192)
        assert not area.pin()
        area.unpin()
        area.view(0, 1)[0] = 1
    assert "error=2" in caplog.text
    assert "error=no GPU" in caplog.text


def test_reports_are_taken_once_in_order_and_wake_each_time() -> None:
    woken: list[int] = []
    reports = StoreReports(lambda: woken.append(1))
    assert not reports.has_any
    reports.answer(SaveResult(1))
    reports.answer(SaveResult(2))
    reports.loaded("a")
    reports.load_failed("b")
    assert len(woken) == 4
    assert reports.has_any
    assert reports.take_results() == [SaveResult(1), SaveResult(2)]
    assert (reports.take_loaded(), reports.take_failed()) == (["a"], ["b"])
    assert not reports.has_any
    reports.count(rows=2)
    reports.count(rows=3, bytes=1)
    assert reports.take_counts() == {"rows": 5, "bytes": 1}
    assert reports.take_counts() == {}


def test_a_warning_of_one_kind_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    reports = StoreReports(lambda: None, lambda: now[0])
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


def test_tasks_put_first_come_before_all_others_in_order() -> None:
    go, over = threading.Event(), threading.Event()
    done: list[int] = []

    def work(task: int) -> None:
        assert go.wait(PATIENCE_S)
        done.append(task)
        if task == 4:
            over.set()

    threads = TaskThreads("t", 1, lambda: (work, lambda: None), done.append)
    threads.start()
    threads.put(0)
    threads.put(4)
    threads.put_first([1, 2, 3])
    go.set()
    assert over.wait(PATIENCE_S)
    threads.stop()
    assert threads.join(time.monotonic() + PATIENCE_S)
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert done.index(1) < done.index(2) < done.index(3) < done.index(4)


def test_a_refusal_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()

    def refuse(task: int) -> None:
        if task == 9:
            over.set()
        raise ZeroDivisionError

    def begin() -> tuple[object, object]:
        raise ValueError

    threads = TaskThreads("t", 1, begin, refuse)  # type: ignore[arg-type]
    threads.start()
    for task in range(10):
        threads.put(task)
    assert over.wait(PATIENCE_S)
    threads.stop()
    assert threads.join(time.monotonic() + PATIENCE_S)
    assert "a task was not refused" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR
