"""When memory of a read is in use, and that requests of UCX are freed once: no UCX needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transport.errors import BackendFailure, OutOfBounds, PeerLost
from transport.types import Memory, PeerId, ReadId, Settled, Spans
from transport.ucx.control import PieceRefused, PieceRequest, SessionId, decode, encode
from transport.ucx.pieces import MAX_PIECE_BYTES, Runs
from transport.ucx.reader_side import WINDOW, RemoteLender, UcxReader
from transport.ucx.run_messages import RunsMessages

SECRET = b"s" * 32
SESSION = SessionId(b"0123456789abcdef")
IN_PROGRESS, TRUNCATED, CANCELED, RESET = 1, -9, -16, -25
RUNS = Runs(np.array([4096], np.uint64), np.array([64], np.uint64))


class FakeUcp:
    """UCX's functions: ``statuses`` by request, ``answer`` what posting returns."""

    param = 0

    def __init__(self) -> None:
        self.answer: int | None = 1000
        self.statuses: dict[int, int] = {}
        self.freed: list[int] = []
        self.canceled: list[int] = []
        self.iov = lambda runs: np.zeros((len(runs.nbytes), 2), dtype=np.uint64)

    def send(self, *arguments: Any) -> int | None:
        return self.answer

    receive = send

    def status(self, request: int) -> int:
        assert request not in self.freed, "looked at after it was freed"
        return self.statuses.get(request, IN_PROGRESS)

    def free(self, request: int) -> None:
        assert request not in self.freed, "freed twice"
        self.freed.append(request)

    def cancel(self, worker: int, request: int) -> None:
        assert request not in self.freed, "cancelled after it was freed"
        self.canceled.append(request)

    def failure(self, status: int, doing: str) -> Exception:
        return (PeerLost if status == RESET else BackendFailure)(f"{doing}: {status}")


def test_a_request_is_done_when_ucx_says_so_and_freed_once() -> None:
    ucp = FakeUcp()
    request = RunsMessages(ucp, 7).send_runs(8, RUNS, 9)  # type: ignore[arg-type]
    assert not request.done
    assert not ucp.freed
    ucp.statuses[1000] = 0
    assert request.done
    assert request.done
    request.cancel()
    request.raise_failure("send")
    assert ucp.freed == [1000]
    assert not ucp.canceled


def test_a_cancelled_receive_that_was_matched_is_not_done() -> None:
    ucp = FakeUcp()
    receive = RunsMessages(ucp, 7).receive_runs(RUNS, 9)  # type: ignore[arg-type]
    receive.cancel()
    assert ucp.canceled == [1000]
    assert not receive.done  # UCX has not said so, and may still write
    ucp.statuses[1000] = CANCELED
    assert receive.done
    with pytest.raises(BackendFailure, match="receive: -16"):
        receive.raise_failure("receive")
    assert ucp.freed == [1000]


@pytest.mark.parametrize("status", [-1, RESET, -80, -99])
def test_what_fails_at_once_is_an_error_and_no_request(status: int) -> None:
    ucp = FakeUcp()
    ucp.answer = (1 << 64) + status
    messages = RunsMessages(ucp, 7)  # type: ignore[arg-type]
    with pytest.raises(PeerLost if status == RESET else BackendFailure, match=f"send: {status}"):
        messages.send_runs(8, RUNS, 9)
    with pytest.raises((PeerLost, BackendFailure), match=f"receive: {status}"):
        messages.receive_runs(RUNS, 9)
    ucp.answer = (1 << 64) - 4096  # an address, high as it is
    assert not messages.send_runs(8, RUNS, 9).done


def test_what_was_sent_at_once_is_done_and_has_no_request_to_free() -> None:
    ucp = FakeUcp()
    ucp.answer = None
    request = RunsMessages(ucp, 7).send_runs(8, RUNS, 9)  # type: ignore[arg-type]
    request.cancel()
    assert request.done
    request.raise_failure("send")
    assert not ucp.freed
    assert not ucp.canceled


class FakeReceive:
    """A receive; ``matched``: cancelling it changes nothing."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self.done, self.matched, self.canceled = runs, False, False, 0
        self.error: Exception | None = None

    def cancel(self) -> None:
        self.canceled += 1
        if not self.matched and not self.done:
            self.done, self.error = True, PeerLost("canceled")

    def raise_failure(self, doing: str) -> None:
        if self.error is not None:
            raise self.error


class FakeSend:
    done = True


class FakeLenderEndpoint:
    """A connection to a lender; it remembers what was requested."""

    def __init__(self) -> None:
        self.alive = True
        self.requests: list[PieceRequest] = []

    def send_array(self, array: Any, tag: int) -> FakeSend:
        frame = decode(array.tobytes(), SECRET)
        if isinstance(frame, PieceRequest):
            self.requests.append(frame)
        return FakeSend()

    def close(self) -> None:
        self.alive = False


class ReaderRig:
    """A reader on a worker without UCX, with one lender; it is its own worker."""

    address = b"us"

    def __init__(self) -> None:
        self.settled: dict[ReadId, Settled] = {}
        self.receives: list[FakeReceive] = []
        self.endpoint = FakeLenderEndpoint()
        tags = iter(range(1, 1000))
        self.reader = UcxReader(
            self,  # type: ignore[arg-type]
            self.settled.__setitem__,
            lambda: 0.0,
            lambda below: next(tags),
        )
        self.lender = RemoteLender(PeerId("p-1"), b"", SECRET, b"them", SESSION)

    def connect(self, worker_address: bytes) -> FakeLenderEndpoint:
        return self.endpoint

    def receive_runs(self, runs: Runs, tag: int) -> FakeReceive:
        self.receives.append(FakeReceive(runs))
        return self.receives[-1]

    def cancel_lost(self) -> None:
        pass

    def start(self, read: int, runs: int, nbytes: int = MAX_PIECE_BYTES) -> None:
        at = np.arange(runs, dtype=np.uint64) * np.uint64(2 * nbytes) + np.uint64(4096)
        spans = Spans(at, at.copy(), np.full(runs, nbytes, dtype=np.uint64))
        self.reader.start_read(self.lender, ReadId(read), spans, 0.0)

    def refuse(self, number: int) -> None:
        frame = PieceRefused(SESSION, self.endpoint.requests[number].tag, True, "no")
        self.reader.handle_frame(encode(frame, SECRET))

    def settle(self) -> None:
        while self.reader.advance_reads():
            pass


def test_no_more_than_the_window_is_outstanding() -> None:
    rig = ReaderRig()
    rig.start(1, 3 * WINDOW)
    rig.settle()
    assert len(rig.receives) == WINDOW == rig.reader.num_outstanding
    rig.receives[3].done = True
    rig.settle()
    assert len(rig.receives) == WINDOW + 1
    assert rig.reader.num_outstanding == WINDOW


def test_a_refused_piece_has_its_receive_cancelled_and_its_read_fails() -> None:
    rig = ReaderRig()
    rig.start(1, 2)
    rig.refuse(0)
    assert [receive.canceled for receive in rig.receives] == [1, 0]
    rig.settle()
    assert not rig.settled  # the other piece can still be written
    rig.receives[1].done = True
    rig.settle()
    assert isinstance(rig.settled[ReadId(1)].error, OutOfBounds)


@pytest.mark.parametrize("how", ["refused", "disconnected", "lost"])
def test_a_read_is_not_settled_while_a_matched_receive_can_be_written(how: str) -> None:
    rig = ReaderRig()
    rig.start(1, 1)
    rig.receives[0].matched = True
    if how == "refused":
        rig.refuse(0)
    elif how == "disconnected":
        rig.reader.disconnect_lender(rig.lender)
    else:
        rig.endpoint.alive = False
    rig.settle()
    assert rig.receives[0].canceled == 1
    assert not rig.settled
    assert rig.reader.num_outstanding == 1
    rig.receives[0].done = True
    rig.settle()
    kind = OutOfBounds if how == "refused" else PeerLost
    assert isinstance(rig.settled[ReadId(1)].error, kind)
    assert rig.reader.num_outstanding == 0


def test_a_lost_lender_ends_all_that_was_not_matched_at_once() -> None:
    rig = ReaderRig()
    rig.start(1, 3 * WINDOW)
    rig.endpoint.alive = False
    rig.settle()
    assert isinstance(rig.settled[ReadId(1)].error, PeerLost)
    assert rig.reader.num_outstanding == rig.reader.num_ending == 0


def test_what_is_received_are_the_runs_of_the_read_itself() -> None:
    rig = ReaderRig()
    rig.start(1, 5, nbytes=64)
    (receive,) = rig.receives
    assert Memory(int(receive.runs.addresses[4]), 64).base == 4096 + 4 * 128
    assert (receive.runs.nbytes == 64).all()
