"""Laws of the relay: between real sockets, what arrives passes, and what ends is forgotten."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, closing, suppress
from random import Random

import pytest

from pdconn.faults.frame_faults import FrameFaults, MessageFaults
from pdconn.faults.pipe import Pipe
from pdconn.faults.relay import Relay, Relays
from pdconn.protocol.messages import frame
from pdconn.tools.lab.ports import free_ports
from tests.faults.on_demand.relay_ends import (
    BODIES,
    SECONDS,
    ends,
    everything,
    framed,
    passed,
    send_all,
    until,
)


def test_without_faults_a_thousand_frames_pass_as_they_are_both_ways() -> None:
    data = framed(BODIES)
    with ends() as two:
        answering = send_all(two.target, data[::-1])
        assert passed(two.client, two.target, data) == data
        assert everything(two.client) == data[::-1]
        answering.join()
        assert two.relay.counts["connections"] == 1
        assert set(two.relay.counts) == {"connections", "frames"}


def test_frames_of_four_mebibytes_pass() -> None:
    data = framed([Random(n).randbytes(4 << 20) for n in range(3)])
    with ends() as two:
        assert passed(two.client, two.target, data) == data
        two.counts(connections=1, frames=3)


def test_what_is_not_framed_passes_in_chunks() -> None:
    hello = b"\x16\x03\x01\x02\x00" + Random(7).randbytes(300_000)  # as TLS begins
    with ends() as two:
        assert passed(two.client, two.target, hello) == hello
        assert passed(two.target, two.client, b"\x16\x03") == b"\x16\x03"


def test_a_stream_that_ends_within_a_frame_passes_whole() -> None:
    with ends() as two:
        assert passed(two.client, two.target, frame(b"one") + b"\0\0\0\x09two") == (
            frame(b"one") + b"\0\0\0\x09two"
        )


def test_a_frame_passes_as_soon_as_it_is_whole() -> None:
    with ends() as two:
        two.client.sendall(frame(b"one") + frame(b"two")[:2])
        assert two.target.recv(100) == frame(b"one")
        two.client.sendall(frame(b"two")[2:])
        assert two.target.recv(100) == frame(b"two")


def test_a_target_that_is_down_hangs_up() -> None:
    [port] = free_ports(1)
    with closing(Relay("127.0.0.1", port, MessageFaults(), 7)) as relay:
        for number in (1, 2):
            with socket.create_connection((relay.host, relay.port), SECONDS) as client:
                assert hung_up(client)
            until(lambda number=number: relay.counts["unreachable"] == number, relay.counts)
    with closing(Relay("no host\udc80", 1, MessageFaults(), 7)) as relay:
        with socket.create_connection((relay.host, relay.port), SECONDS) as client:
            assert hung_up(client)
        assert relay.counts == {"connections": 1, "unreachable": 1}


def hung_up(client: socket.socket) -> bool:
    try:
        client.sendall(frame(b"hello"))
        return client.recv(100) == b""
    except ConnectionError:
        return True


def test_an_end_that_is_reset_resets_the_other() -> None:
    with ends() as two:
        two.client.sendall(frame(b"one"))
        assert two.target.recv(100) == frame(b"one")
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        two.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        two.client.close()
        assert hung_up(two.target)


def test_a_source_is_not_read_while_a_mebibyte_waits() -> None:
    (sender, source), (sink, receiver) = socket.socketpair(), socket.socketpair()
    with sender, source, sink, receiver:
        for sock in (sender, source, sink, receiver):
            sock.setblocking(False)
        pipe = Pipe(source, sink, FrameFaults(MessageFaults(), Random(7)), max_waiting=1 << 16)
        data = framed([bytes(8000)] * 1000)
        sent = received = 0
        for turn in range(100_000):
            with suppress(BlockingIOError):
                sent += sender.send(data[sent : sent + 8000])
            if pipe.wants_to_read:
                pipe.read_source(0.0)
            pipe.send_due(0.0)
            if turn == 1000:
                assert not pipe.wants_to_read
                assert pipe.wants_to_write
                assert sent < len(data) // 2
            with suppress(BlockingIOError):
                received += len(receiver.recv(1 << 20)) if turn > 1000 else 0
            if received == len(data):
                break
        assert received == len(data)
        assert pipe.wants_to_read


def test_closing_leaves_nothing() -> None:
    before = set(threading.enumerate())
    with ends() as two:
        assert [t.name for t in set(threading.enumerate()) - before] == ["pdconn-relay"]
        two.client.sendall(frame(b"one"))
        assert two.target.recv(100) == frame(b"one")
        two.relay.close()
        two.relay.close()
        assert hung_up(two.client)
        assert hung_up(two.target)
        assert not set(threading.enumerate()) - before
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((two.relay.host, two.relay.port), SECONDS)


def test_links_are_forgotten_when_both_ends_have_ended() -> None:
    with ends() as two:
        for _ in range(20):
            client, target = two.connect()
            assert passed(client, target, frame(b"one")) == frame(b"one")
            assert passed(target, client, frame(b"two")) == frame(b"two")
        until(lambda: len(two.relay._links) == 1 and len(two.relay._selector.get_map()) == 4)


def test_there_is_one_relay_per_lender() -> None:
    data = framed([b"%4d" % number for number in range(100)])
    before = set(threading.enumerate())

    def started() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - before]

    with ExitStack() as stack:
        relays = stack.enter_context(closing(Relays(MessageFaults(drop=0.5), 7)))
        received = []
        for _ in range(2):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            host, port = listener.getsockname()
            through = relays.through(host, port)
            assert relays.through(host, port) == through != (host, port)
            client = stack.enter_context(socket.create_connection(through, SECONDS))
            target = stack.enter_context(listener.accept()[0])
            received.append(passed(client, target, data))
        assert received[0] != received[1]
        assert relays.counts()["connections"] == 2
        assert started() == ["pdconn-relay"] * 2
        relays.close()
        relays.close()
        assert not started()
