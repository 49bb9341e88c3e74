"""Laws of an authenticated connection, over real sockets: without proof, no message passes."""

from __future__ import annotations

import logging
import re
import ssl
import time
from collections.abc import Callable

import pytest

from pdconn.protocol.auth import ReaderAuth, Secret
from pdconn.protocol.messages import Frames, frame
from pdconn.sidechannel.connection import ReaderAuthPolicy, SideChannelLost, Unauthenticated
from pdconn.sidechannel.security import Security
from tests.fakes.credentials import FOREIGN, OPEN, OTHER, SECRET, SHARED, between, ends
from tests.sidechannel.raw_ends import HELLO, PATIENCE_S, WELCOME, RawClient, arrived, relayed
from tests.sidechannel.worlds import Worlds


@pytest.mark.parametrize(
    ("reader", "lender", "of_reader", "of_lender"),
    [
        ("secret", "other", "saw our proof: the secrets probably differ", "made with our secret"),
        ("secret", "plain", "pdconn's challenge", ""),
        (
            "plain",
            "secret",
            "require a secret or TLS that we do not",
            "peer have a secret",
        ),
        ("tls", "plain", "does it speak TLS|does not speak TLS", "speaks TLS and we do not"),
        ("plain", "tls", "require a secret or TLS that we do not", "does not speak TLS"),
        ("tls", "secret", "does it speak TLS", "speaks TLS and we do not"),
        ("secret", "tls", "we use a secret and no TLS", "does not speak TLS"),
        ("tls", "both", "require a secret or another certificate", "peer have a secret"),
        ("both", "tls", "pdconn's challenge", ""),
        ("both", "both other", "the secrets probably differ", "made with our secret"),
        ("no certificate", "tls", "requires a client certificate", "no client certificate"),
        (
            "foreign",
            "tls",
            "certificate: self-signed certificate in cert",
            "not know the CA",
        ),
        ("of foreign", "tls", "does not know the CA", "certificate: unable to get local issuer"),
        ("tls", "elsewhere", "[Hh]ostname mismatch.*'localhost'", "not accept our certificate"),
        ("tls", "expired", "certificate has expired", "says that our certificate has expired"),
        ("expired", "tls", "says that our certificate has expired", "certificate has expired"),
    ],
)
def test_with_unequal_credentials_no_message_passes_and_both_sides_know_why(
    worlds: Worlds, reader: str, lender: str, of_reader: str, of_lender: str
) -> None:
    ours, theirs = worlds.by_name[reader], worlds.by_name[lender]
    dialling = ours.for_reader("localhost")
    if reader == "no certificate":
        dialling = ReaderAuthPolicy(None, without_certificate(worlds.ours.file), "localhost")
    with between(dialling, theirs.for_lender()) as both:
        both.reader.send_frames([HELLO])
        if theirs.authenticates:
            both.lender.send_frames([WELCOME])
        seen_by_reader, seen_by_lender = both.until_lost(answer=theirs.secret is None)
        assert both.received["reader"] == []
        assert re.search(of_reader, seen_by_reader)
        assert re.search(of_lender, seen_by_lender)
        assert isinstance(both.lost["reader"], Unauthenticated)
        assert isinstance(both.lost["lender"], Unauthenticated) == bool(of_lender)


def without_certificate(ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    return context


def test_the_host_name_may_go_unchecked_where_the_settings_say_so(worlds: Worlds) -> None:
    lax = Security(tls=worlds.engine, check_hostname=False)
    with ends(lax, worlds.by_name["elsewhere"]) as both:
        both.reader.send_frames([HELLO])
        both.until(lender=1)


def test_an_address_is_checked_as_a_host_name_is(worlds: Worlds) -> None:
    with ends(worlds.tls, worlds.tls, host="127.0.0.1") as both:
        both.reader.send_frames([HELLO])
        both.until(lender=1)
    with ends(worlds.tls, worlds.tls, host="127.0.0.2") as both:
        assert "IP address mismatch" in both.until_lost()[0]


def test_a_lender_sends_no_byte_of_a_message_before_the_reader_has_proven_itself() -> None:
    with RawClient(SHARED) as client:
        client.lender.send_frames([WELCOME])
        reader = ReaderAuth(SHARED.secret or Secret(b""), bytes(32))
        client.send(frame(reader.opening_frames()[0]))
        [challenge] = Frames(1 << 20).feed_bytes(client.seen or client.receive())
        assert len(client.seen) < 64
        assert WELCOME not in client.seen
        assert client.lender.is_midway
        [proof] = reader.feed_frame(challenge)[1]
        with pytest.raises(Unauthenticated):
            client.send(frame(flipped(proof, 200)))
        time.sleep(0.05)
        assert WELCOME not in client.seen + arrived(client.socket)


def test_the_welcome_is_seen_once_the_reader_has_proven_itself_or_none_need_to() -> None:
    """The control of the test above: the same eyes do see it."""
    with RawClient(SHARED) as client:
        client.lender.send_frames([WELCOME])
        reader = ReaderAuth(SHARED.secret or Secret(b""), bytes(32))
        client.send(frame(reader.opening_frames()[0]))
        [challenge] = Frames(1 << 20).feed_bytes(client.seen or client.receive())
        client.send(frame(reader.feed_frame(challenge)[1][0]))
        give_up = time.monotonic() + PATIENCE_S
        while WELCOME not in client.seen and time.monotonic() < give_up:
            client.receive()
        assert WELCOME in client.seen
    with RawClient(OPEN) as client:
        client.lender.send_frames([WELCOME])
        client.send(b"")
        assert WELCOME in client.seen or WELCOME in client.receive()


def test_tls_hides_what_a_secret_alone_does_not(worlds: Worlds) -> None:
    assert HELLO in sent_bytes(SHARED)  # the control
    assert HELLO not in sent_bytes(worlds.tls)
    assert HELLO not in sent_bytes(worlds.both)


def sent_bytes(security: Security) -> bytes:
    """Every byte that a reader sends to say HELLO."""
    with relayed(security) as relay:
        relay.reader.send_frames([HELLO])
        relay.until_received(1)
        return bytes(relay.passed["there"])


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def forged(data: bytes) -> bytes:
    """One bit of the last body is another; frames are whole again, as an attacker makes them."""
    if data[:2] == b"\x17\x03":  # a TLS record
        return flipped(data, len(data) * 8 - 3)
    *bodies, last = Frames(1 << 20).feed_bytes(data)
    return b"".join(map(frame, [*bodies, flipped(last, len(last) * 8 - 3)]))


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "one bit": forged,
    "sent twice": lambda data: data + data,
    "left out": lambda data: data[:0],
    "swapped": lambda data: data[len(data) // 2 :] + data[: len(data) // 2],
}


@pytest.mark.parametrize("how", CHANGES)
def test_nothing_changed_on_the_way_is_ever_received(secured: Security, how: str) -> None:
    with relayed(secured) as relay:
        relay.reader.send_frames([HELLO])
        relay.until_received(1)
        relay.change = CHANGES[how]
        relay.reader.send_frames([b"one"])
        relay.reader.send_frames([b"two"])
        if how == "left out":
            relay.turn_once_sent()
            relay.change = None
            relay.reader.send_frames([b"six"])
        with pytest.raises(Unauthenticated, match="altered, replayed or misplaced"):
            relay.until_received(9)
        assert relay.received in ([HELLO], [HELLO, b"one", b"two"][: len(relay.received)])


def test_a_bit_that_flips_by_accident_is_noticed_in_any_case(security: Security) -> None:
    with relayed(security) as relay:
        relay.reader.send_frames([HELLO])
        relay.until_received(1)
        relay.change = lambda data: flipped(data, len(data) * 8 - 3)
        relay.reader.send_frames([b"one"])
        with pytest.raises(SideChannelLost):
            relay.until_received(2)


def test_without_a_policy_changed_bytes_are_received() -> None:
    """The control of the test above: the same relay does change what passes."""
    with relayed(OPEN) as relay:
        relay.reader.send_frames([HELLO])
        relay.until_received(1)
        relay.change = CHANGES["one bit"]
        relay.reader.send_frames([b"one"])
        relay.until_received(2)
        assert relay.received[1] == flipped(b"one", 21)


def test_a_session_recorded_whole_means_nothing_to_another_lender(secured: Security) -> None:
    with relayed(secured) as relay:
        relay.reader.send_frames([HELLO])
        relay.until_received(1)
        recorded = bytes(relay.passed["there"])
    with RawClient(secured) as client, pytest.raises(Unauthenticated):
        client.send(recorded)


def test_a_plain_session_recorded_whole_is_believed_by_another_lender() -> None:
    """The control of the test above."""
    with RawClient(OPEN) as client:
        assert client.send(sent_bytes(OPEN)) == [HELLO]


@pytest.mark.parametrize("length", [1025, 1 << 20])
def test_a_client_may_send_no_frame_over_one_kibibyte(length: int) -> None:
    prefix = frame(bytes(length))[:4]
    with RawClient(SHARED) as client, pytest.raises(Unauthenticated, match="frame length"):
        client.send(prefix)
    with RawClient(OPEN) as client:  # the control
        assert client.send(prefix) == []


def test_no_reason_and_no_log_line_shows_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), ends(FOREIGN, SHARED) as both:
        both.reader.send_frames([HELLO])
        texts = [*both.until_lost(), repr(both.lost), caplog.text, repr(both)]
        policies = (SHARED.for_lender(), SHARED.for_reader("localhost"), SHARED, FOREIGN)
    for text in (*texts, *map(repr, policies)):
        assert SECRET.decode() not in text
        assert OTHER.decode() not in text
