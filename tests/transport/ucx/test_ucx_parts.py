"""The parts of the UCX backend that need no UCX: frames, pieces, addresses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.address import Envelope
from transport.errors import BadAddress
from transport.regions import Regions
from transport.types import Memory, Spans
from transport.ucx.control import (
    MAC_BYTES,
    MAX_FRAME_BYTES,
    MAX_RUNS,
    PROTOCOL,
    BadFrame,
    Frame,
    OtherProtocol,
    PieceRefused,
    PieceRequest,
    ReaderHello,
    SessionId,
    decode,
    encode,
)
from transport.ucx.lender_side import UcxLender, lendable
from transport.ucx.library import FIXED, context_options
from transport.ucx.pieces import MAX_PIECE_BYTES, PieceCutter, Runs
from transport.ucx.run_messages import iov
from transport.ucx.transport import _remote_lender

SECRET = b"s" * 32
SESSION = SessionId(b"0123456789abcdef")


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
    st.sampled_from([MAX_PIECE_BYTES - 1, MAX_PIECE_BYTES, 2 * MAX_PIECE_BYTES + 3]),
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
        piece = cutter.next_piece()
        assert 0 < piece.nbytes <= MAX_PIECE_BYTES
        assert max(len(piece.remote.nbytes), len(piece.local.nbytes)) <= MAX_RUNS
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


def test_a_piece_has_as_many_runs_as_fit_and_no_more() -> None:
    count = 2 * MAX_RUNS + 1
    at = np.arange(count, dtype=np.uint64) * np.uint64(128) + np.uint64(4096)
    cutter = PieceCutter(Spans(at, at[::-1].copy(), np.full(count, 64, dtype=np.uint64)))
    pieces = []
    while not cutter.exhausted:
        pieces.append(cutter.next_piece())
    assert [len(piece.local.nbytes) for piece in pieces] == [MAX_RUNS, MAX_RUNS, 1]


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, MAX_RUNS])
def test_a_list_for_ucx_holds_the_runs_and_then_empty_ones(count: int) -> None:
    runs = Runs(u64(*range(4096, 4096 + 8 * count, 8)), u64(*range(1, count + 1)))
    array = iov(runs)
    assert len(array) & (len(array) - 1) == 0
    assert count <= len(array) < 2 * count
    assert (array[:count] == np.stack([runs.addresses, runs.nbytes], axis=1)).all()
    assert not array[count:, 1].any()
    assert set(array[count:, 0]) <= {runs.addresses[-1]}, "an address that is registered"
    # Two words each, as struct ucp_dt_iov { void *buffer; size_t length; } has them.
    assert array.flags.c_contiguous
    assert array.nbytes == 16 * len(array)


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


def test_a_reader_of_another_protocol_gets_a_typed_error_that_says_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    older = bytearray(encode(request(), SECRET)[:-MAC_BYTES])
    assert older[:4] == PROTOCOL.encode()
    older[:4] = b"pdU1"
    frame = bytes(older) + hashlib.blake2b(older, key=SECRET, digest_size=MAC_BYTES).digest()
    with pytest.raises(OtherProtocol, match=r"pdU1.*expected.*pdU2.*same pdconn"):
        decode(frame, SECRET)
    with pytest.raises(BadFrame, match="not authenticated"):  # as for any stranger
        decode(frame, b"t" * 32)
    lender = UcxLender(None, SECRET, lambda: 0.0)  # type: ignore[arg-type]
    lender.handle_frame(frame)
    assert lender.refused_frames == 1
    assert "same pdconn" in caplog.text


def _address(payload: list[object]) -> Envelope:
    return Envelope("ucx", 1, "lender-1", msgspec.msgpack.encode(payload), 0)


def test_an_address_of_another_protocol_is_refused_and_the_text_names_both() -> None:
    with pytest.raises(BadAddress, match=r"theirs .*pdU1.*ours .*pdU2.*same pdconn"):
        _remote_lender(_address([SECRET, b"worker"]))  # as pdU1 wrote it
    with pytest.raises(BadAddress, match=r"theirs .*pdU3"):
        _remote_lender(_address([SECRET, b"worker", "pdU3"]))
    assert _remote_lender(_address([SECRET, b"worker", PROTOCOL])).secret == SECRET


def test_a_pdu1_reader_refuses_our_address() -> None:
    class Older(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
        secret: bytes
        worker_address: bytes

    payload = msgspec.msgpack.encode([SECRET, b"worker", PROTOCOL])
    with pytest.raises(msgspec.DecodeError):  # its BadAddress
        msgspec.msgpack.decode(payload, type=Older)
    msgspec.msgpack.decode(msgspec.msgpack.encode([SECRET, b"worker"]), type=Older)
