"""Sealed frames open in their order, and only for a peer that is authenticated."""

from __future__ import annotations

import pytest

from pdconn.protocol.auth import AuthError, LenderAuth, ReaderAuth, Secret


def sealed() -> tuple[ReaderAuth, LenderAuth]:
    """Both sides of a connection, authenticated."""
    secret = Secret(b"0123456789abcdef")
    reader, lender = ReaderAuth(secret, b"r" * 32), LenderAuth(secret, b"l" * 32)
    frames, to_lender = reader.opening_frames(), True
    while frames:
        side = lender if to_lender else reader
        frames = [reply for each in frames for reply in side.feed_frame(each)[1]]
        to_lender = not to_lender
    return reader, lender


def test_sealed_frames_open_in_their_order_only() -> None:
    reader, lender = sealed()
    one, two = reader.seal(b"one"), reader.seal(b"two")
    assert lender.opened([one, two]) == [b"one", b"two"]
    for arrived in ([one], [two], [b"x" * 19]):
        with pytest.raises(AuthError):
            lender.opened(arrived)


def test_nothing_opens_after_a_frame_that_did_not() -> None:
    reader, lender = sealed()
    good = reader.seal(b"good")
    with pytest.raises(AuthError):
        lender.opened([good[:-1] + b"?"])
    with pytest.raises(AuthError):
        lender.opened([reader.seal(b"later")])
    assert not lender.is_ready


def test_nothing_opens_before_the_peer_is_authenticated() -> None:
    lender = LenderAuth(Secret(b"0123456789abcdef"), b"l" * 32)
    with pytest.raises(AuthError):
        lender.opened([])
