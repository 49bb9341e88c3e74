"""The parts of the UCX backend that need no UCX: frames, pieces, copies, the lender's bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import PeerLost
from transport.regions import Regions
from transport.types import Memory, Spans
from transport.ucx.frames import (
    MAX_FRAME_BYTES,
    MAX_RUNS,
    BadFrame,
    Frame,
    PieceRefused,
    PieceRequest,
    ReaderHello,
    SessionId,
    decode,
    encode,
)
from transport.ucx.gather import Bytes, bytes_at, gather, scatter
from transport.ucx.lender import LenderLimits, UcxLender, lendable
from transport.ucx.library import FIXED, context_options
from transport.ucx.pieces import (
    DIRECT_BYTES,
    MAX_PIECE_BYTES,
    STAGED_BYTES,
    PieceCutter,
    Runs,
)

SECRET = b"s" * 32
SESSION = SessionId(b"0123456789abcdef")
LIMITS = LenderLimits()


def u64(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def request(
    number: int = 1, addresses: object = (4096,), nbytes: object = (64,), tag: int = 9
) -> PieceRequest:
    return PieceRequest(
        SESSION, number, tag, np.array(addresses, np.uint64), np.array(nbytes, np.uint64)
    )


FRAMES: list[Frame] = [
    ReaderHello(SESSION, b"worker"),
    request(),
    request(addresses=range(1, MAX_RUNS + 1), nbytes=[7] * MAX_RUNS),
    PieceRefused(SESSION, 5, True, "outside"),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_frames_arrive_as_they_were(frame: Frame) -> None:
    data = encode(frame, SECRET)
    assert len(data) <= MAX_FRAME_BYTES
    back = decode(data, SECRET)
    assert type(back) is type(frame)
    assert encode(back, SECRET) == data


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_that_was_changed_or_signed_with_another_secret_is_refused(frame: Frame) -> None:
    data = encode(frame, SECRET)
    with pytest.raises(BadFrame, match="not authenticated by our secret"):
        decode(data, b"t" * 32)
    for at in range(0, len(data), max(1, len(data) // 97)):
        with pytest.raises(BadFrame):
            decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], SECRET)
        with pytest.raises(BadFrame):
            decode(data[:at], SECRET)
    decode(data, SECRET)  # what was refused is refused for the change


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: request(addresses=[], nbytes=[]), "0 runs"),
        (lambda: request(addresses=[1] * 600, nbytes=[1] * 600), "600 runs"),
        (lambda: request(nbytes=[0]), "run 0 has 0 bytes"),
        (lambda: request(addresses=[2**63 - 8], nbytes=[64]), "beyond 63 bits"),
        (lambda: request(addresses=[2**64 - 8], nbytes=[64]), "beyond 63 bits"),
        (lambda: ReaderHello(SESSION, b""), "hello states 0 bytes"),
        (lambda: ReaderHello(SESSION, b"x" * 6500), "hello states 6500 bytes"),
    ],
)
def test_a_holder_of_the_secret_is_held_to_the_bounds(make: Callable[[], Frame], text: str) -> None:
    with pytest.raises(BadFrame, match=text):
        decode(encode(make(), SECRET), SECRET)


def test_a_frame_is_never_longer_than_a_packet() -> None:
    with pytest.raises(BadFrame, match=f"at most {MAX_FRAME_BYTES}"):
        encode(ReaderHello(SESSION, b"x" * 8000), SECRET)
    with pytest.raises(BadFrame, match=f"to {MAX_FRAME_BYTES}"):
        decode(bytes(1 << 20), SECRET)


@given(st.binary(max_size=300))
def test_no_bytes_make_the_parser_fail_otherwise(data: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(data, SECRET)


SIZES = st.one_of(
    st.integers(1, 5000),
    st.sampled_from([DIRECT_BYTES - 1, DIRECT_BYTES, MAX_PIECE_BYTES, 2 * MAX_PIECE_BYTES + 3]),
)


@given(st.lists(st.tuples(SIZES, st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=60))
def test_pieces_hold_every_byte_once_and_keep_their_bounds(
    runs: list[tuple[int, int, int]],
) -> None:
    nbytes = u64(*(size for size, _, _ in runs))
    gaps = np.array([[a, b] for _, a, b in runs], dtype=np.uint64)
    starts = np.cumsum(nbytes[:, None] + gaps, axis=0) - nbytes[:, None] + np.uint64(4096)
    spans = Spans(starts[:, 0].copy(), starts[:, 1].copy(), nbytes)
    cutter, local, remote = PieceCutter(spans), [], []
    while not cutter.exhausted:
        piece = cutter.next()
        staged = len(piece.local.nbytes) > 1 or len(piece.remote.nbytes) > 1
        assert 0 < piece.nbytes <= (STAGED_BYTES if staged else MAX_PIECE_BYTES)
        assert len(piece.remote.nbytes) <= MAX_RUNS
        assert piece.local.total_bytes == piece.remote.total_bytes == piece.nbytes
        local.append(piece.local)
        remote.append(piece.remote)
    for pieces, column in ((local, spans.local), (remote, spans.remote)):
        together = Runs(
            np.concatenate([p.addresses for p in pieces]),
            np.concatenate([p.nbytes for p in pieces]),
        ).merged()
        expected = Runs(column, nbytes).merged()
        assert (together.addresses == expected.addresses).all()
        assert (together.nbytes == expected.nbytes).all()


@pytest.mark.parametrize("unit", [1, 3, 16, 64, 4096])
@pytest.mark.parametrize("even", [True, False])
def test_copies_equal_a_loop_and_touch_nothing_else(unit: int, even: bool) -> None:
    rng = np.random.default_rng(unit)
    memory = rng.integers(0, 255, 64 * 8 * unit, dtype=np.uint8)
    slots = rng.permutation(64)[:40]
    counts = np.full(40, 3) if even else rng.integers(1, 8, 40)
    offsets, nbytes = slots * 8 * unit, counts * unit
    runs = Runs((offsets + memory.ctypes.data).astype(np.uint64), nbytes.astype(np.uint64))
    expected = np.concatenate([memory[o : o + n] for o, n in zip(offsets, nbytes, strict=True)])
    got = np.zeros(len(expected), dtype=np.uint8)
    gather(runs, got)
    assert (got == expected).all()
    blank = np.full_like(memory, 255)
    there = Runs((offsets + blank.ctypes.data).astype(np.uint64), nbytes.astype(np.uint64))
    scatter(got, there)
    written = np.zeros(len(blank), dtype=bool)
    for offset, length in zip(offsets, nbytes, strict=True):
        written[offset : offset + length] = True
    assert (blank[written] == memory[written]).all()
    assert (blank[~written] == 255).all()


def test_bytes_at_are_the_memory_itself() -> None:
    held = np.zeros(16, dtype=np.uint8)
    bytes_at(held.ctypes.data + 4, 8)[:] = 7
    assert held.tolist() == [0] * 4 + [7] * 8 + [0] * 4


def test_a_run_may_cross_between_lent_memories_that_touch_and_no_others() -> None:
    touching = lendable(Regions([Memory(4096, 4096), Memory(8192, 100), Memory(9000, 100)]))
    device = next(iter(touching)).device
    assert touching.outside("remote", u64(8000), u64(292), device) is None
    assert touching.outside("remote", u64(8000), u64(293), device) is not None
    assert touching.outside("remote", u64(8290), u64(800), device) is not None


def test_options_are_the_users_over_ours_but_for_what_safety_rests_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert context_options({"UCX_TLS": "tcp"})["TLS"] == "tcp"
    assert "posix" in context_options(None)["TLS"]
    monkeypatch.setenv("UCX_TLS", "rc")
    assert "TLS" not in context_options({"TLS": "tcp"})  # UCX takes it from the environment
    for key, value in FIXED.items():
        with pytest.raises(ValueError, match=f"{key}: must be"):
            context_options({key: "inf"})
        monkeypatch.setenv(f"UCX_{key}", "inf")
        assert context_options(None)[key] == value


class FakeRequest:
    def __init__(self) -> None:
        self.done = False


class FakeEndpoint:
    """A connection whose messages never leave; it remembers what was sent."""

    def __init__(self) -> None:
        self.alive = True
        self.sent: list[tuple[int, int, FakeRequest]] = []

    def send(self, array: Bytes, tag: int) -> FakeRequest:
        if not self.alive:
            raise PeerLost("gone")
        self.sent.append((tag, len(array), FakeRequest()))
        return self.sent[-1][2]

    def close(self) -> None:
        self.alive = False
        for _, _, request in self.sent:
            request.done = True


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
        self.lender.handle(encode(ReaderHello(SessionId(session), b"w"), SECRET))
        return self.endpoints[-1]

    def ask(self, session: bytes, number: int, *, runs: int = 2) -> None:
        frame = request(number, [self.base + 128 * i for i in range(runs)], [64] * runs)
        self.lender.handle(encode(replace(frame, session=SessionId(session)), SECRET))

    def settle(self) -> None:
        while self.lender.step():
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
    rig.lender.step()
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


def test_a_stalled_reader_gives_up_its_buffers_when_others_wait() -> None:
    rig = LenderRig(replace(LIMITS, buffers=1))
    stalled, other = rig.hello(A), rig.hello(B)
    rig.ask(A, 1)
    rig.settle()
    rig.ask(B, 1)
    rig.now = LIMITS.stall_s / 2
    rig.settle()
    assert stalled.alive  # it may just be slow
    assert not other.sent
    rig.now = LIMITS.stall_s
    rig.settle()
    assert not stalled.alive
    assert len(other.sent) == 1


def test_a_stalled_reader_is_left_alone_while_no_other_waits() -> None:
    rig = LenderRig()
    stalled = rig.hello(A)
    rig.ask(A, 1)
    rig.settle()
    rig.now = 100 * LIMITS.stall_s
    rig.settle()
    assert stalled.alive


def test_a_piece_that_is_too_large_to_stage_is_refused() -> None:
    rig = LenderRig()
    huge = np.zeros(3 * STAGED_BYTES, dtype=np.uint8)
    rig.lender.lent = Regions([Memory(huge.ctypes.data, huge.nbytes)])
    endpoint = rig.hello(A)
    base = huge.ctypes.data
    frame = request(1, [base, base + 2 * STAGED_BYTES], [STAGED_BYTES, 64])
    rig.lender.handle(encode(replace(frame, session=SessionId(A)), SECRET))
    rig.settle()
    assert [size for tag, size, _ in endpoint.sent if tag == 9] == [STAGED_BYTES + 64 + 1]
    assert len(endpoint.sent) == 2  # the reason, and nothing
