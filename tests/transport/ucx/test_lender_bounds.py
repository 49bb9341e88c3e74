"""What readers can make a lender over UCX hold is bounded: no UCX needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from transport.errors import PeerLost
from transport.regions import Regions
from transport.types import Memory
from transport.ucx.control import (
    PieceRequest,
    ReaderHello,
    SessionId,
    encode,
)
from transport.ucx.lender_side import LenderLimits, UcxLender
from transport.ucx.pieces import MAX_PIECE_BYTES, Runs
from transport.ucx.ucx_worker import Bytes

SECRET = b"s" * 32
SESSION = SessionId(b"0123456789abcdef")
LIMITS = LenderLimits()


def request(
    number: int = 1, addresses: object = (4096,), nbytes: object = (64,), tag: int = 9
) -> PieceRequest:
    return PieceRequest(
        SESSION, number, tag, np.array(addresses, np.uint64), np.array(nbytes, np.uint64)
    )


class FakeRequest:
    def __init__(self) -> None:
        self.done = False


class FakeEndpoint:
    """A connection whose messages never leave; it remembers what was sent.

    ``releases``: closing ends them, as UCX does soon, though not always at once.
    """

    def __init__(self) -> None:
        self.alive = True
        self.releases = True
        self.sent: list[tuple[int, int, FakeRequest]] = []

    def send_array(self, array: Bytes, tag: int) -> FakeRequest:
        return self._sent(tag, len(array))

    def send_runs(self, runs: Runs, tag: int) -> FakeRequest:
        return self._sent(tag, runs.total_bytes)

    def _sent(self, tag: int, nbytes: int) -> FakeRequest:
        if not self.alive:
            raise PeerLost("gone")
        self.sent.append((tag, nbytes, FakeRequest()))
        return self.sent[-1][2]

    def close(self) -> None:
        self.alive = False
        for _, _, request in self.sent:
            request.done = request.done or self.releases


class LenderRig:
    """A lender with fake endpoints, 1 MiB of memory at ``base`` to lend, and a clock of its own."""

    def __init__(self, limits: LenderLimits = LIMITS) -> None:
        self.now = 0.0
        self.endpoints: list[FakeEndpoint] = []
        self.lender = UcxLender(self, SECRET, lambda: self.now, limits)  # type: ignore[arg-type]
        self.held = np.zeros(1 << 20, dtype=np.uint8)
        self.base = self.held.ctypes.data
        self.lender.lent = Regions([Memory(self.base, 1 << 20)])

    def connect(self, worker_address: bytes) -> FakeEndpoint:
        self.endpoints.append(FakeEndpoint())
        return self.endpoints[-1]

    def cancel_lost(self) -> None:
        pass

    def hello(self, session: bytes) -> FakeEndpoint:
        self.lender.handle_frame(encode(ReaderHello(SessionId(session), b"w"), SECRET))
        return self.endpoints[-1]

    def ask(self, session: bytes, number: int, *, runs: int = 2) -> None:
        frame = request(number, [self.base + 128 * i for i in range(runs)], [64] * runs)
        self.lender.handle_frame(encode(replace(frame, session=SessionId(session)), SECRET))

    def settle(self) -> None:
        while self.lender.serve_readers():
            pass


A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_a_reader_never_has_more_on_its_way_than_its_share() -> None:
    rig = LenderRig()
    endpoint = rig.hello(A)
    for number in range(1, LIMITS.queued + 1):
        rig.ask(A, number)
    rig.settle()
    assert len(endpoint.sent) == LIMITS.sending == rig.lender.num_sending
    for _, _, request in endpoint.sent[:2]:
        request.done = True
    rig.settle()
    assert len(endpoint.sent) == LIMITS.sending + 2
    assert rig.lender.num_sending == LIMITS.sending


def test_a_reader_that_queues_more_than_it_may_loses_its_session_and_no_other() -> None:
    rig = LenderRig()
    greedy, modest = rig.hello(A), rig.hello(B)
    for number in range(1, LIMITS.queued + 2):
        rig.ask(A, number)
    rig.ask(B, 1)
    rig.settle()
    assert not greedy.alive
    assert modest.alive
    assert len(modest.sent) == 1
    assert rig.lender.num_readers == 1


def test_readers_are_served_in_turn() -> None:
    rig = LenderRig()
    endpoints = [rig.hello(A), rig.hello(B)]
    for number in range(1, 4):
        rig.ask(A, number)
    rig.ask(B, 1)
    rig.lender.serve_readers()
    assert [len(endpoint.sent) for endpoint in endpoints] == [1, 1]


def test_a_frame_is_not_accepted_twice() -> None:
    rig = LenderRig()
    endpoint = rig.hello(A)
    rig.ask(A, 1)
    rig.ask(A, 1)
    rig.settle()
    assert len(endpoint.sent) == 1
    rig.hello(A)
    assert len(rig.endpoints) == 1
    endpoint.alive = False
    rig.now += 10.0
    rig.settle()
    assert rig.lender.num_readers == 0
    rig.hello(A)  # nor after the session ended
    rig.ask(A, 2)
    assert rig.lender.num_readers == 0
    assert rig.lender.refused_frames == 4


def test_the_table_of_readers_is_bounded_and_gives_up_idle_ones() -> None:
    rig = LenderRig(replace(LIMITS, readers=2))
    busy, idle = rig.hello(A), rig.hello(B)
    rig.ask(A, 1)
    rig.hello(C)
    assert (busy.alive, idle.alive) == (True, False)
    assert rig.lender.num_readers == 2


def test_all_readers_together_have_no_more_in_flight_than_the_limit() -> None:
    rig = LenderRig(replace(LIMITS, in_flight=5))
    endpoints = [rig.hello(session) for session in (A, B, C)]
    for session in (A, B, C):
        for number in range(1, 4):
            rig.ask(session, number)
    rig.settle()
    assert sum(len(endpoint.sent) for endpoint in endpoints) == 5 == rig.lender.num_sending
    assert all(endpoint.sent for endpoint in endpoints)
    endpoints[0].sent[0][2].done = True
    rig.settle()
    assert sum(len(endpoint.sent) for endpoint in endpoints) == 6
    assert rig.lender.num_sending == 5


@pytest.mark.parametrize("releases", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_stalled_reader_is_dropped_when_others_wait_to_send(
    is_first: bool, releases: bool
) -> None:
    """Whichever comes first in a turn, and whether or not UCX is done with its message at once."""
    rig = LenderRig(replace(LIMITS, in_flight=1))
    first, second = rig.hello(A), rig.hello(B)
    (stalled, stalled_is), (other, other_is) = (
        ((first, A), (second, B)) if is_first else ((second, B), (first, A))
    )
    stalled.releases = releases
    rig.ask(stalled_is, 1)
    rig.settle()
    rig.ask(other_is, 1)
    rig.now = LIMITS.stall_s / 2
    rig.settle()
    assert stalled.alive  # it may just be slow
    assert not other.sent
    rig.now = LIMITS.stall_s
    rig.settle()
    assert not stalled.alive
    assert rig.lender.num_sending == 1
    stalled.sent[0][2].done = True
    rig.settle()
    assert len(other.sent) == 1
    assert rig.lender.num_sending == 1
    assert rig.lender.num_ending == 0


def test_messages_of_a_reader_that_was_dropped_count_until_ucx_is_done_with_them() -> None:
    rig = LenderRig(replace(LIMITS, in_flight=1))
    dropped, other = rig.hello(A), rig.hello(B)
    dropped.releases = False
    rig.ask(A, 1)
    rig.settle()
    dropped.alive = False
    rig.now = 2.0
    rig.ask(B, 1)
    rig.settle()
    assert rig.lender.num_readers == 1
    assert rig.lender.num_sending == rig.lender.num_ending == 1
    assert not other.sent
    dropped.sent[0][2].done = True
    rig.settle()
    assert len(other.sent) == 1
    assert rig.lender.num_ending == 0


def test_a_stalled_reader_is_left_alone_while_no_other_waits() -> None:
    rig = LenderRig()
    stalled = rig.hello(A)
    rig.ask(A, 1)
    rig.settle()
    rig.now = 100 * LIMITS.stall_s
    rig.settle()
    assert stalled.alive


@pytest.mark.parametrize("excess", [0, 1])
def test_a_piece_that_is_too_large_is_refused(excess: int) -> None:
    rig = LenderRig()
    huge = np.zeros(3 * MAX_PIECE_BYTES, dtype=np.uint8)
    rig.lender.lent = Regions([Memory(huge.ctypes.data, huge.nbytes)])
    endpoint = rig.hello(A)
    base = huge.ctypes.data
    runs = [base, base + 2 * MAX_PIECE_BYTES], [MAX_PIECE_BYTES - 64, 64 + excess]
    rig.lender.handle_frame(encode(replace(request(1, *runs), session=SessionId(A)), SECRET))
    rig.settle()
    # The reason, and a message that is longer than any piece; or the piece.
    assert len(endpoint.sent) == 1 + excess
    assert [size for tag, size, _ in endpoint.sent if tag == 9] == [MAX_PIECE_BYTES + excess]
