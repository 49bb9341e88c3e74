"""Laws of a connection, over real sockets: messages pass whole, and what waits is bounded."""

from __future__ import annotations

import select
import selectors
import socket
import time

import pytest

from pdconn.protocol.messages import frame
from pdconn.sidechannel.connection import Connection, SideChannelLost, Unauthenticated
from pdconn.sidechannel.security import Security
from tests.fakes.credentials import OPEN, ends, sockets
from tests.sidechannel.raw_ends import (
    HELLO,
    PATIENCE_S,
    WELCOME,
    RawClient,
    arrived,
    await_bytes,
    relayed,
)


def test_messages_pass_both_ways_in_order_small_and_large(security: Security) -> None:
    large = bytes(range(256)) * (1 << 14)
    with ends(security, security) as both:
        for body in (HELLO, b"", large):
            both.reader.send_frames([body])
            both.lender.send_frames([body])
        both.until(reader=3, lender=3)
        assert both.received == {"reader": [HELLO, b"", large], "lender": [HELLO, b"", large]}
        assert both.reader.is_trusted
        assert both.lender.is_trusted
        assert not both.reader.is_midway
        assert not both.lender.is_midway


def test_a_frame_of_the_longest_length_passes_and_one_longer_does_not(security: Security) -> None:
    with ends(security, security, max_frame=2000) as both:
        both.reader.send_frames([bytes(2000)])
        both.until(lender=1)
        both.reader.send_frames([bytes(2001)])
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
        reader.send_frames([HELLO])
        received: list[bytes] = []
        give_up = time.monotonic() + PATIENCE_S
        while not received:
            assert time.monotonic() < give_up
            reader.flush_unsent()
            for source, sink, end in ((relay_a, relay_b, lender), (relay_b, relay_a, reader)):
                for byte in arrived(source):
                    assert not received
                    sink.send(bytes([byte]))
                    received += end.receive_frames()
                    assert lender.is_trusted or lender.is_midway
                received += end.receive_frames()
        assert received == [HELLO]
        assert not lender.is_midway


def await_end(source: socket.socket) -> None:
    """Until the end of the stream is there, behind what may not be read yet."""
    poll = select.poll()
    poll.register(source, select.POLLRDHUP)
    assert poll.poll(PATIENCE_S * 1000), "the stream does not end"


def test_what_waits_for_the_handshake_is_bounded(secured: Security) -> None:
    dialled, accepted = sockets()
    with dialled, accepted:
        lender = Connection(accepted, 1 << 20, max_unsent=4096, policy=secured.for_lender())
        lender.send_frames([bytes(2000)])
        with pytest.raises(SideChannelLost, match="wait for a peer that does not authenticate"):
            lender.send_frames([bytes(3000)])


def test_what_waits_for_a_peer_that_does_not_read_is_bounded() -> None:
    dialled, accepted = sockets()
    with dialled, accepted:
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        lender = Connection(accepted, 1 << 20, max_unsent=1024)
        lender.send_frames([bytes(2000)])  # longer than may wait, and taken whole
        assert not lender.has_unsent
        with pytest.raises(SideChannelLost, match="wait for a peer that does not read"):
            lender.send_frames([bytes(1 << 22)])


def test_a_frame_of_which_the_last_byte_is_missing_is_midway(security: Security) -> None:
    with relayed(security) as relay:
        relay.reader.send_frames([HELLO])
        relay.until_received(1)
        assert not relay.lender.is_midway
        relay.change = lambda data: data[:-1]
        relay.reader.send_frames([b"one"])
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
        reader.send_frames([HELLO])
        accepted.recv(100)
        accepted.close()
        await_end(dialled)
        with pytest.raises(Unauthenticated, match="does it require a secret or TLS"):
            reader.receive_frames()


def test_a_plain_peer_that_closes_after_a_message_is_only_lost() -> None:
    dialled, accepted = sockets()
    with dialled:
        reader = Connection(dialled, 1 << 20)
        reader.send_frames([HELLO])
        accepted.recv(100)
        accepted.sendall(frame(WELCOME))
        accepted.close()
        await_end(dialled)
        assert reader.receive_frames() == [WELCOME]
        with pytest.raises(SideChannelLost, match=r"^closed by the peer$") as lost:
            reader.receive_frames()
        assert not isinstance(lost.value, Unauthenticated)


def test_a_last_message_is_received_though_what_we_have_unsent_cannot_be_sent_any_more() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        reader = Connection(ours, 1 << 20)
        reader.send_frames([bytes(1 << 22)])
        assert reader.has_unsent
        theirs.sendall(frame(WELCOME))
        theirs.close()
        assert reader.receive_frames() == [WELCOME]
        with pytest.raises(SideChannelLost):
            reader.flush_unsent()


def test_a_watched_connection_selects_for_what_it_wants() -> None:
    """For reading unless paused, and for writing while connecting or unsent."""
    dialled, accepted = sockets()
    read, write = selectors.EVENT_READ, selectors.EVENT_WRITE
    with dialled, selectors.DefaultSelector() as selector:
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        lender = Connection(accepted, 1 << 20)
        lender.watch_socket(selector, "session", connecting=True)
        assert selector.get_key(accepted)[2:] == (read | write, "session")
        lender.send_frames([])
        assert selector.get_key(accepted).events == read
        lender.send_frames([bytes(1 << 22)])
        assert lender.has_unsent
        assert selector.get_key(accepted).events == read | write
        lender.read_on(False)
        assert selector.get_key(accepted).events == write
        while lender.has_unsent:
            await_bytes(dialled)
            dialled.recv(1 << 20)
            lender.flush_unsent()
        lender.read_on(True)
        assert selector.get_key(accepted).events == read
        lender.close()
        lender.close()
        assert not selector.get_map()
