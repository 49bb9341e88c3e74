"""The thread of a UCX transport: its errors are shown, and it ends with the transport."""

from __future__ import annotations

import importlib.util
import threading

import pytest

from tests.transport.ucx.pairs import MIB, PATIENCE_S, UcxPair, finish, until
from tests.transport.ucx.ucx_process import TCP
from transport.errors import BackendFailure
from transport.ucx import ucx_thread
from transport.ucx.transport import UcxTransport

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ucx, pytest.mark.usefixtures("only_one_ucx")]


def test_an_error_of_the_thread_fails_reads_and_is_not_hidden(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with UcxTransport("lender", **TCP) as lender:
        reader = UcxTransport("reader", close_wait_s=0.1, **TCP)
        two = UcxPair(lender, reader, MIB)
        reader.check()

        def broken() -> None:
            raise RuntimeError("broken")

        gate = threading.Event()
        reader._thread.run_soon(lambda: gate.wait(PATIENCE_S) and None)
        pending = two.start(4096)
        reader._thread.run_soon(broken)  # in the same round: before the lender can have answered
        gate.set()
        assert until(lambda: reader._thread._failure is not None)
        with pytest.raises(BackendFailure, match="broken"):
            reader.check()
        lender.check()
        assert reader.poll(pending) is None  # whether it can still write is unknown
        settled = finish(reader, two.start(4096))
        assert isinstance(settled.error, BackendFailure)
        assert "broken" in str(settled.error)
        with pytest.raises(BackendFailure):
            reader.close()
    assert "ucx thread ended" in caplog.text
    assert reader._thread in ucx_thread._failed, "collected, it would let UCX write again"


def test_the_thread_ends_with_the_transport() -> None:
    reader = UcxTransport("reader", **TCP)
    thread = reader._thread._thread
    assert thread.is_alive()
    reader.close()
    assert not thread.is_alive()
    assert ucx_thread._MAX_WAIT_S <= 1.0
