"""Laws of the handshake and of seals: only frames made with the secret pass, once, in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.protocol.auth import TAG_NBYTES, AuthError, LenderAuth, ReaderAuth, Secret

SECRET = b"correct horse battery"
OTHER = b"another horse battery"
R, L = bytes(range(32)), bytes(range(32, 64))
Flip = Callable[[int, bytes], bytes]


def sides(
    ours: bytes = SECRET, theirs: bytes = SECRET, r: bytes = R, lent: bytes = L
) -> tuple[ReaderAuth, LenderAuth]:
    return ReaderAuth(Secret(ours), r), LenderAuth(Secret(theirs), lent)


def shake(
    reader: ReaderAuth, lender: LenderAuth, change: Flip = lambda _, body: body
) -> list[bytes]:
    """Pass handshake frames until neither side has more; ``change`` sits between."""
    seen: list[bytes] = []
    here, there = reader.opening_frames(), lender.opening_frames()
    while here or there:
        to_lender = [change(len(seen) + i, body) for i, body in enumerate(here)]
        seen += here
        here = []
        for body in to_lender:
            there += lender.feed_frame(body)[1]
        to_reader = [change(len(seen) + i, body) for i, body in enumerate(there)]
        seen += there
        there = []
        for body in to_reader:
            here += reader.feed_frame(body)[1]
    return seen


def flip(body: bytes, bit: int) -> bytes:
    changed = bytearray(body)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_equal_secrets_make_both_ready_and_messages_pass_both_ways() -> None:
    reader, lender = sides()
    assert not reader.is_ready
    assert not lender.is_ready
    frames = shake(reader, lender)
    assert len(frames) == 4
    assert all(len(frame) < 64 for frame in frames)
    assert reader.is_ready
    assert lender.is_ready
    for message in (b"", b"x", bytes(1 << 20)):
        assert lender.feed_frame(reader.seal(message)) == ([message], [])
        assert reader.feed_frame(lender.seal(message)) == ([message], [])


def test_another_secret_is_refused_by_the_lender_before_it_proved_itself() -> None:
    reader, lender = sides(OTHER)
    [hello] = reader.opening_frames()
    [challenge] = lender.feed_frame(hello)[1]
    [proof] = reader.feed_frame(challenge)[1]
    with pytest.raises(AuthError, match="reader's proof: expected one made with our secret"):
        lender.feed_frame(proof)
    assert not lender.is_ready
    assert not reader.is_ready


def test_a_lender_that_cannot_prove_itself_hears_no_message() -> None:
    """It skips the check of the reader's proof, and still has no proof of its own."""
    reader, _ = sides()
    _, honest = sides()
    [hello] = reader.opening_frames()
    [proof] = reader.feed_frame(honest.feed_frame(hello)[1][0])[1]
    false_proof = proof[:12] + b"\x04" + proof[13:]  # the reader's own, labelled as the lender's
    with pytest.raises(AuthError, match="lender's proof"):
        reader.feed_frame(false_proof)
    with pytest.raises(AuthError, match="none before the peer is authenticated"):
        reader.seal(b"claim")


def test_nothing_is_sealed_before_the_peer_is_authenticated() -> None:
    reader, lender = sides()
    for side in (reader, lender):
        with pytest.raises(AuthError, match="none before the peer is authenticated"):
            side.seal(b"x")
    shake(reader, lender)
    assert reader.seal(b"x")[TAG_NBYTES:] == b"x"


@pytest.mark.parametrize("which", range(4))
def test_any_altered_bit_of_the_handshake_ends_it(which: int) -> None:
    shake(*sides())  # the control: unaltered, it completes
    for bit in range(45 * 8):

        def change(at: int, body: bytes, bit: int = bit) -> bytes:
            return flip(body, bit) if at == which else body

        with pytest.raises(AuthError):
            shake(*sides(), change)


@given(st.binary(max_size=64), st.data())
def test_any_altered_bit_of_a_message_is_noticed(message: bytes, data: st.DataObject) -> None:
    for toward_lender in (True, False):
        reader, lender = sides()
        shake(reader, lender)
        sender, receiver = (reader, lender) if toward_lender else (lender, reader)
        sealed = sender.seal(message)
        bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
        with pytest.raises(AuthError, match="altered, replayed or misplaced"):
            receiver.feed_frame(flip(sealed, bit))
        with pytest.raises(AuthError, match="none after a failure"):
            receiver.feed_frame(sealed)


def test_every_bit_of_one_message() -> None:
    for bit in range((TAG_NBYTES + 3) * 8):
        reader, lender = sides()
        shake(reader, lender)
        with pytest.raises(AuthError):
            lender.feed_frame(flip(reader.seal(b"abc"), bit))


@given(st.lists(st.sampled_from(range(4)), min_size=1, max_size=6))
def test_only_the_order_in_which_frames_were_sealed_is_accepted(order: list[int]) -> None:
    reader, lender = sides()
    shake(reader, lender)
    sealed = [reader.seal(b"same") for _ in range(4)]
    accepted = 0
    for at in order:
        try:
            lender.feed_frame(sealed[at])
        except AuthError:
            break
        accepted += 1
    expected = next((i for i, at in enumerate(order) if at != i), len(order))
    assert accepted == expected


def test_a_shortened_frame_and_a_frame_of_the_other_direction_are_noticed() -> None:
    for length in range(TAG_NBYTES + 3):
        reader, lender = sides()
        shake(reader, lender)
        with pytest.raises(AuthError):
            lender.feed_frame(reader.seal(b"abc")[:length])
    reader, lender = sides()
    shake(reader, lender)
    with pytest.raises(AuthError):
        reader.feed_frame(reader.seal(b"abc"))


def test_a_handshake_thrown_back_is_refused() -> None:
    """A mirror, and a mirror that relabels what it throws back."""
    reader, _ = sides()
    [hello] = reader.opening_frames()
    with pytest.raises(AuthError, match="handshake frame"):
        reader.feed_frame(hello)
    reader, _ = sides()
    with pytest.raises(AuthError, match="lender's nonce: expected one of its own"):
        reader.feed_frame(hello[:12] + b"\x02" + hello[13:])


def test_a_recorded_session_means_nothing_to_a_new_lender() -> None:
    reader, lender = sides()
    recorded = shake(reader, lender)
    recorded += [reader.seal(b"claim")]
    again = LenderAuth(Secret(SECRET), L)
    again.feed_frame(recorded[0])
    again.feed_frame(recorded[2])
    assert again.feed_frame(recorded[4]) == (
        [b"claim"],
        [],
    )  # the control: an equal nonce is needed
    fresh = LenderAuth(Secret(SECRET), bytes(32))
    fresh.feed_frame(recorded[0])
    with pytest.raises(AuthError, match="reader's proof"):
        fresh.feed_frame(recorded[2])


def test_a_session_recorded_from_a_lender_means_nothing_to_a_new_reader() -> None:
    recorded = shake(*sides())
    fresh = ReaderAuth(Secret(SECRET), bytes(32))
    fresh.opening_frames()
    fresh.feed_frame(recorded[1])
    with pytest.raises(AuthError, match="lender's proof"):
        fresh.feed_frame(recorded[3])


def test_a_failed_proof_cannot_be_tried_again() -> None:
    reader, lender = sides()
    wrong, _ = sides(OTHER)
    challenge = lender.feed_frame(reader.opening_frames()[0])[1][0]
    with pytest.raises(AuthError):
        lender.feed_frame(wrong.feed_frame(challenge)[1][0])
    with pytest.raises(AuthError, match="none after a failure"):
        lender.feed_frame(reader.feed_frame(challenge)[1][0])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "does the peer have a secret"),
        (b"\x91\x85\xa4type\xa5hello", "does the peer have a secret"),
        (b"pdconn-auth\x09\x01" + bytes(32), "handshake version: expected 2, got 9"),
        (b"pdconn-auth\x01\x01" + bytes(32), "handshake version: expected 2, got 1"),
        (b"pdconn-auth\x02\x03" + bytes(32), r"expected 1 \(hello\), got 3"),
        (b"pdconn-auth\x02\x01" + bytes(31), "hello, bytes: expected 45, got 44"),
        (b"pdconn-auth\x02\x01" + bytes(900), "hello, bytes: expected 45, got 913"),
    ],
)
def test_what_is_no_hello_is_named(body: bytes, text: str) -> None:
    with pytest.raises(AuthError, match=text):
        sides()[1].feed_frame(body)


def test_a_reader_names_the_version_of_an_older_lender() -> None:
    reader, _ = sides()
    with pytest.raises(AuthError, match="handshake version: expected 2, got 1"):
        reader.feed_frame(b"pdconn-auth\x01\x02" + L)


def test_proofs_and_tags_are_those_that_openssl_computes() -> None:
    """``openssl dgst -sha256 -mac HMAC`` and ``openssl mac -macopt size:16 BLAKE2BMAC``."""
    endpoint = "lender.example:7777"
    reader = ReaderAuth(Secret(SECRET), R, endpoint)
    lender = LenderAuth(Secret(SECRET), L, (endpoint,))
    proofs = [frame[13:].hex() for frame in shake(reader, lender)[2:]]
    assert proofs == [
        "bd4082c68f4687a86a7af2bc60d42aa73cdce5a19e34054d7d15d5e08b7721c8",
        "c98bc9c4d1f06b97905eb6bb958fd8a4e9b23b2badf0304a8d1a106288cac161",
    ]
    tags = [side.seal(b"claim")[:TAG_NBYTES].hex() for side in (reader, reader, lender, lender)]
    assert tags == [
        "121001ce1c0a48bcf3fe023a644d927a",
        "aa8d8bde5bc257b5adbd3944d972b95f",
        "82ae3970be668ee944c68be50083a296",
        "4a70aa3c5e1c8a3a64b61104aaf5f9ca",
    ]


def test_a_secret_is_the_same_with_one_newline_and_has_16_bytes() -> None:
    for written in (SECRET, SECRET + b"\n", SECRET + b"\r\n"):
        shake(*sides(written))
    for other in (SECRET + b"\n\n", SECRET + b" ", SECRET + b"\0", SECRET + b"\r"):
        with pytest.raises(AuthError):
            shake(*sides(other))
    for short in (b"", b"\n", bytes(15), bytes(15) + b"\n"):
        with pytest.raises(AuthError, match="secret: expected at least 16 bytes, got"):
            Secret(short)


def test_nonces_are_32_bytes() -> None:
    with pytest.raises(AuthError, match="our nonce: expected 32 bytes"):
        ReaderAuth(Secret(SECRET), bytes(31))


def test_no_text_shows_the_secret_or_what_comes_of_it() -> None:
    secret = Secret(SECRET)
    reader, lender = sides(OTHER)
    texts = [repr(secret), str(secret), f"{secret}", repr(reader), repr(lender)]
    with pytest.raises(AuthError) as failed:
        shake(reader, lender)
    texts += [str(failed.value), repr(failed.value), repr(failed.value.args)]
    for known in (SECRET, OTHER, secret.session(R, L, "")):
        for text in texts:
            assert known.decode("latin1") not in text
            assert known.hex() not in text
            assert repr(known)[2:-1] not in text
    assert SECRET.decode() in repr(secret._value)  # the control: it is there to be shown
