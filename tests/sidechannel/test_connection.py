"""Laws of an authenticated connection, over real sockets: without proof, no message passes."""

from __future__ import annotations

import logging
import re
import select
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.protocol.auth import ReaderAuth, Secret
from pdconn.protocol.framing import Frames, frame
from pdconn.sidechannel.connection import Connection, SideChannelLost, Unauthenticated
from pdconn.sidechannel.security import Security
from pdconn.sidechannel.session import ReaderAuthPolicy
from tests.fakes.credentials import (
    FOREIGN,
    OPEN,
    OTHER,
    SECRET,
    SHARED,
    Authority,
    between,
    ends,
    sockets,
)

WELCOME = b"welcome: addresses and geometry"
HELLO = b"hello: engine and incarnation"
PATIENCE_S = 20.0


class Worlds:
    """Every way to secure a connection, with files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.ours = Authority(folder / "ours")
        self.foreign = Authority(folder / "foreign")
        self.engine = self.ours.sign("engine", "localhost", "127.0.0.1")
        self.tls = Security(tls=self.engine)
        self.both = Security(SHARED.secret, self.engine)
        stolen = replace(self.foreign.sign("engine", "localhost"), ca=self.ours.file)
        self.by_name = {
            "plain": OPEN,
            "secret": SHARED,
            "other": FOREIGN,
            "tls": self.tls,
            "both": self.both,
            "both other": Security(FOREIGN.secret, self.engine),
            "no certificate": self.tls,
            "foreign": Security(tls=self.foreign.sign("whole", "localhost")),
            "of foreign": Security(tls=stolen),
            "elsewhere": Security(tls=self.ours.sign("elsewhere", "elsewhere.example")),
            "expired": Security(tls=self.ours.sign("expired", "localhost", expired=True)),
        }


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "secret", "tls", "both"])
def security(request: pytest.FixtureRequest, worlds: Worlds) -> Security:
    return worlds.by_name[request.param]


@pytest.fixture(params=["secret", "tls", "both"])
def secured(request: pytest.FixtureRequest, worlds: Worlds) -> Security:
    return worlds.by_name[request.param]


def test_messages_pass_both_ways_in_order_small_and_large(security: Security) -> None:
    large = bytes(range(256)) * (1 << 14)
    with ends(security, security) as both:
        for body in (HELLO, b"", large):
            both.reader.send([body])
            both.lender.send([body])
        both.until(reader=3, lender=3)
        assert both.received == {"reader": [HELLO, b"", large], "lender": [HELLO, b"", large]}
        assert both.reader.is_trusted
        assert both.lender.is_trusted
        assert not both.reader.is_midway
        assert not both.lender.is_midway


def test_a_frame_of_the_longest_length_passes_and_one_longer_does_not(security: Security) -> None:
    with ends(security, security, max_frame=2000) as both:
        both.reader.send([bytes(2000)])
        both.until(lender=1)
        both.reader.send([bytes(2001)])
        assert "frame length" in both.until_lost()[1]


def test_the_first_flush_of_a_reader_begins_the_handshake(secured: Security) -> None:
    with ends(secured, secured) as both:
        assert both.reader.has_unsent
        assert not both.lender.has_unsent
        assert both.reader.is_midway
        assert both.lender.is_midway
        while not (both.reader.is_trusted and both.lender.is_trusted):
            both.turn()
            assert not both.lost
        assert not both.reader.has_unsent


def test_without_a_policy_a_connection_is_trusted_and_quiet_from_the_start() -> None:
    with ends(OPEN, OPEN) as both:
        assert both.lender.is_trusted
        assert not both.lender.is_midway
        assert not both.reader.has_unsent


def test_bytes_may_come_one_by_one(security: Security) -> None:
    """A relay between both hands on one byte at a time; half a frame is midway."""
    reader_end, relay_a = sockets()
    relay_b, lender_end = sockets()
    with reader_end, relay_a, relay_b, lender_end:
        relay_a.setblocking(False)
        relay_b.setblocking(False)
        reader = Connection(reader_end, 1 << 20, policy=security.for_reader("localhost"))
        lender = Connection(lender_end, 1 << 20, policy=security.for_lender())
        reader.send([HELLO])
        received: list[bytes] = []
        give_up = time.monotonic() + PATIENCE_S
        while not received:
            assert time.monotonic() < give_up
            reader.flush()
            for source, sink, end in ((relay_a, relay_b, lender), (relay_b, relay_a, reader)):
                for byte in arrived(source):
                    assert not received
                    sink.send(bytes([byte]))
                    received += end.receive()
                    assert lender.is_trusted or lender.is_midway
                received += end.receive()
        assert received == [HELLO]
        assert not lender.is_midway


def await_bytes(source: socket.socket) -> None:
    """What was sent over the loopback device is there soon, and not always at once."""
    assert select.select([source], [], [], PATIENCE_S)[0], "nothing arrives"


def await_end(source: socket.socket) -> None:
    """Until the end of the stream is there, behind what may not be read yet."""
    poll = select.poll()
    poll.register(source, select.POLLRDHUP)
    assert poll.poll(PATIENCE_S * 1000), "the stream does not end"


def arrived(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except BlockingIOError:
        return b""


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
        both.reader.send([HELLO])
        if theirs.authenticates:
            both.lender.send([WELCOME])
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
        both.reader.send([HELLO])
        both.until(lender=1)


def test_an_address_is_checked_as_a_host_name_is(worlds: Worlds) -> None:
    with ends(worlds.tls, worlds.tls, host="127.0.0.1") as both:
        both.reader.send([HELLO])
        both.until(lender=1)
    with ends(worlds.tls, worlds.tls, host="127.0.0.2") as both:
        assert "IP address mismatch" in both.until_lost()[0]


class RawClient:
    """A raw socket connected to a lender, that sees every byte the lender sends."""

    def __init__(self, security: Security) -> None:
        self.socket, self.accepted = sockets()
        self.socket.setblocking(False)
        self.lender = Connection(self.accepted, 1 << 20, policy=security.for_lender())
        self.seen = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.lender.close()

    def send(self, data: bytes) -> list[bytes]:
        """Send it and let the lender answer; return the messages that it received."""
        self.socket.sendall(data)
        self.lender.flush()
        if data:
            await_bytes(self.accepted)
        bodies = self.lender.receive()
        self.seen += arrived(self.socket)
        return bodies

    def receive(self) -> bytes:
        """All that the lender has sent, once there is more of it."""
        await_bytes(self.socket)
        self.seen += arrived(self.socket)
        return self.seen


def test_a_lender_sends_no_byte_of_a_message_before_the_reader_has_proven_itself() -> None:
    with RawClient(SHARED) as client:
        client.lender.send([WELCOME])
        reader = ReaderAuth(SHARED.secret or Secret(b""), bytes(32))
        client.send(frame(reader.start()[0]))
        [challenge] = Frames(1 << 20).feed(client.seen or client.receive())
        assert len(client.seen) < 64
        assert WELCOME not in client.seen
        assert client.lender.is_midway
        [proof] = reader.feed(challenge)[1]
        with pytest.raises(Unauthenticated):
            client.send(frame(flipped(proof, 200)))
        time.sleep(0.05)
        assert WELCOME not in client.seen + arrived(client.socket)


def test_the_welcome_is_seen_once_the_reader_has_proven_itself_or_none_need_to() -> None:
    """The control of the test above: the same eyes do see it."""
    with RawClient(SHARED) as client:
        client.lender.send([WELCOME])
        reader = ReaderAuth(SHARED.secret or Secret(b""), bytes(32))
        client.send(frame(reader.start()[0]))
        [challenge] = Frames(1 << 20).feed(client.seen or client.receive())
        client.send(frame(reader.feed(challenge)[1][0]))
        give_up = time.monotonic() + PATIENCE_S
        while WELCOME not in client.seen and time.monotonic() < give_up:
            client.receive()
        assert WELCOME in client.seen
    with RawClient(OPEN) as client:
        client.lender.send([WELCOME])
        client.send(b"")
        assert WELCOME in client.seen or WELCOME in client.receive()


def test_tls_hides_what_a_secret_alone_does_not(worlds: Worlds) -> None:
    assert HELLO in sent_bytes(SHARED)  # the control
    assert HELLO not in sent_bytes(worlds.tls)
    assert HELLO not in sent_bytes(worlds.both)


def sent_bytes(security: Security) -> bytes:
    """Every byte that a reader sends to say HELLO."""
    with relayed(security) as relay:
        relay.reader.send([HELLO])
        relay.until_received(1)
        return bytes(relay.passed["there"])


class Relay:
    """A reader and a lender with a relay between them that may change what passes."""

    def __init__(self, security: Security, change: Callable[[bytes], bytes] | None = None) -> None:
        self.sockets = (*sockets(), *sockets())
        reader, self._a, self._b, self._there = self.sockets
        for end in (self._a, self._b):
            end.setblocking(False)
        self.reader = Connection(reader, 1 << 20, policy=security.for_reader("localhost"))
        self.lender = Connection(self._there, 1 << 20, policy=security.for_lender())
        self.passed = {"there": bytearray(), "back": bytearray()}
        self.change = change
        self.received: list[bytes] = []

    def turn(self) -> None:
        self.reader.flush()
        data = arrived(self._a)
        self.passed["there"] += data
        changed = self.change(data) if self.change and data else data
        self._b.sendall(changed)
        if changed:
            await_bytes(self._there)
        self.received += self.lender.receive()
        self.lender.flush()
        back = arrived(self._b)
        self.passed["back"] += back
        self._a.sendall(back)
        self.reader.receive()

    def until_received(self, count: int) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while len(self.received) < count:
            assert time.monotonic() < give_up, f"received {self.received}"
            self.turn()

    def turn_once_sent(self) -> None:
        """A turn in which something that the reader has sent passes."""
        self.reader.flush()
        await_bytes(self._a)
        self.turn()


@contextmanager
def relayed(security: Security) -> Iterator[Relay]:
    relay = Relay(security)
    try:
        yield relay
    finally:
        for end in relay.sockets:
            end.close()


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def forged(data: bytes) -> bytes:
    """One bit of the last body is another; frames are whole again, as an attacker makes them."""
    if data[:2] == b"\x17\x03":  # a TLS record
        return flipped(data, len(data) * 8 - 3)
    *bodies, last = Frames(1 << 20).feed(data)
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
        relay.reader.send([HELLO])
        relay.until_received(1)
        relay.change = CHANGES[how]
        relay.reader.send([b"one"])
        relay.reader.send([b"two"])
        if how == "left out":
            relay.turn_once_sent()
            relay.change = None
            relay.reader.send([b"six"])
        with pytest.raises(Unauthenticated, match="altered, replayed or misplaced"):
            relay.until_received(9)
        assert relay.received in ([HELLO], [HELLO, b"one", b"two"][: len(relay.received)])


def test_a_bit_that_flips_by_accident_is_noticed_in_any_case(security: Security) -> None:
    with relayed(security) as relay:
        relay.reader.send([HELLO])
        relay.until_received(1)
        relay.change = lambda data: flipped(data, len(data) * 8 - 3)
        relay.reader.send([b"one"])
        with pytest.raises(SideChannelLost):
            relay.until_received(2)


def test_without_a_policy_changed_bytes_are_received() -> None:
    """The control of the test above: the same relay does change what passes."""
    with relayed(OPEN) as relay:
        relay.reader.send([HELLO])
        relay.until_received(1)
        relay.change = CHANGES["one bit"]
        relay.reader.send([b"one"])
        relay.until_received(2)
        assert relay.received[1] == flipped(b"one", 21)


def test_a_session_recorded_whole_means_nothing_to_another_lender(secured: Security) -> None:
    with relayed(secured) as relay:
        relay.reader.send([HELLO])
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


def test_what_waits_for_the_handshake_is_bounded(secured: Security) -> None:
    dialled, accepted = sockets()
    with dialled, accepted:
        lender = Connection(accepted, 1 << 20, max_unsent=4096, policy=secured.for_lender())
        lender.send([bytes(2000)])
        with pytest.raises(SideChannelLost, match="wait for a peer that does not authenticate"):
            lender.send([bytes(3000)])


def test_what_waits_for_a_peer_that_does_not_read_is_bounded() -> None:
    dialled, accepted = sockets()
    with dialled, accepted:
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        lender = Connection(accepted, 1 << 20, max_unsent=1024)
        lender.send([bytes(2000)])  # longer than may wait, and taken whole
        assert not lender.has_unsent
        with pytest.raises(SideChannelLost, match="wait for a peer that does not read"):
            lender.send([bytes(1 << 22)])


def test_a_frame_of_which_the_last_byte_is_missing_is_midway(security: Security) -> None:
    with relayed(security) as relay:
        relay.reader.send([HELLO])
        relay.until_received(1)
        assert not relay.lender.is_midway
        relay.change = lambda data: data[:-1]
        relay.reader.send([b"one"])
        relay.turn_once_sent()
        assert relay.received == [HELLO]
        assert relay.lender.is_midway


def test_half_a_frame_is_midway_and_a_whole_one_is_not() -> None:
    with RawClient(OPEN) as client:
        for piece in (frame(HELLO)[:2], frame(HELLO)[2:-1]):
            assert client.send(piece) == []
            assert client.lender.is_midway
        assert client.send(frame(HELLO)[-1:]) == [HELLO]
        assert not client.lender.is_midway


def test_a_lender_that_closes_before_it_answers_probably_requires_credentials() -> None:
    dialled, accepted = sockets()
    with dialled:
        reader = Connection(dialled, 1 << 20)
        reader.send([HELLO])
        accepted.recv(100)
        accepted.close()
        await_end(dialled)
        with pytest.raises(Unauthenticated, match="does it require a secret or TLS"):
            reader.receive()


def test_a_plain_peer_that_closes_after_a_message_is_only_lost() -> None:
    dialled, accepted = sockets()
    with dialled:
        reader = Connection(dialled, 1 << 20)
        reader.send([HELLO])
        accepted.recv(100)
        accepted.sendall(frame(WELCOME))
        accepted.close()
        await_end(dialled)
        assert reader.receive() == [WELCOME]
        with pytest.raises(SideChannelLost, match=r"^closed by the peer$") as lost:
            reader.receive()
        assert not isinstance(lost.value, Unauthenticated)


def test_a_last_message_is_received_though_what_we_have_unsent_cannot_be_sent_any_more() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        reader = Connection(ours, 1 << 20)
        reader.send([bytes(1 << 22)])
        assert reader.has_unsent
        theirs.sendall(frame(WELCOME))
        theirs.close()
        assert reader.receive() == [WELCOME]
        with pytest.raises(SideChannelLost):
            reader.flush()


def test_no_reason_and_no_log_line_shows_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), ends(FOREIGN, SHARED) as both:
        both.reader.send([HELLO])
        texts = [*both.until_lost(), repr(both.lost), caplog.text, repr(both)]
        policies = (SHARED.for_lender(), SHARED.for_reader("localhost"), SHARED, FOREIGN)
    for text in (*texts, *map(repr, policies)):
        assert SECRET.decode() not in text
        assert OTHER.decode() not in text


def test_a_watched_connection_selects_for_what_it_wants() -> None:
    """For reading unless paused, and for writing while connecting or unsent."""
    dialled, accepted = sockets()
    read, write = selectors.EVENT_READ, selectors.EVENT_WRITE
    with dialled, selectors.DefaultSelector() as selector:
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        lender = Connection(accepted, 1 << 20)
        lender.watch(selector, "session", connecting=True)
        assert selector.get_key(accepted)[2:] == (read | write, "session")
        lender.send([])
        assert selector.get_key(accepted).events == read
        lender.send([bytes(1 << 22)])
        assert lender.has_unsent
        assert selector.get_key(accepted).events == read | write
        lender.read_on(False)
        assert selector.get_key(accepted).events == write
        while lender.has_unsent:
            await_bytes(dialled)
            dialled.recv(1 << 20)
            lender.flush()
        lender.read_on(True)
        assert selector.get_key(accepted).events == read
        lender.close()
        lender.close()
        assert not selector.get_map()
