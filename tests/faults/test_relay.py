"""Laws of the relay: between real sockets, every fault does what it says and no more."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.faults.frames import (
    HOLD_S,
    DelayedFrame,
    FlowState,
    FrameCutter,
    FrameFaults,
    MessageFaults,
)
from pdconn.faults.pipe import Pipe
from pdconn.faults.relay import Relay, Relays
from pdconn.lab.ports import free_ports
from pdconn.protocol.framing import Frames, frame

SECONDS = 20.0
"""How long a socket of a test may wait."""

BODIES = [f"frame {number} ".encode() * (number % 7) for number in range(1000)]


class Ends:
    """A relay, and both ends of a connection through it."""

    def __init__(
        self, stack: ExitStack, faults: MessageFaults, seed: int = 7, hold_s: float = HOLD_S
    ) -> None:
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.listener.settimeout(SECONDS)
        self.relay = stack.enter_context(
            closing(Relay("127.0.0.1", self.listener.getsockname()[1], faults, seed, hold_s=hold_s))
        )
        self.stack = stack
        self.client, self.target = self.connect()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        address = (self.relay.host, self.relay.port)
        client = self.stack.enter_context(socket.create_connection(address, SECONDS))
        target = self.stack.enter_context(self.listener.accept()[0])
        target.settimeout(SECONDS)
        return client, target

    def counts(self, **expected: int) -> None:
        """Wait until the relay has counted as much."""
        until(lambda: dict(self.relay.counts) == expected, self.relay.counts)


@contextmanager
def ends(
    faults: MessageFaults | None = None, seed: int = 7, hold_s: float = HOLD_S
) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack, faults or MessageFaults(), seed, hold_s)


def until(true: Callable[[], bool], shown: object = "") -> None:
    give_up = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < give_up, f"waited {SECONDS} s: {shown}"
        time.sleep(0.002)


def everything(sock: socket.socket) -> bytes:
    """What arrives until the end of the stream."""
    data = bytearray()
    while chunk := sock.recv(1 << 20):
        data += chunk
    return bytes(data)


def send_all(sock: socket.socket, data: bytes) -> threading.Thread:
    """Send on another thread, then end the stream."""

    def run() -> None:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def passed(sender: socket.socket, receiver: socket.socket, data: bytes) -> bytes:
    """What becomes of ``data`` on its way."""
    thread = send_all(sender, data)
    received = everything(receiver)
    thread.join()
    return received


def bodies(data: bytes) -> list[bytes]:
    return Frames(1 << 28).feed(data)


def framed(some: list[bytes]) -> bytes:
    return b"".join(frame(body) for body in some)


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


def test_dropped_frames_never_arrive() -> None:
    with ends(MessageFaults(drop=1.0)) as two:
        assert passed(two.client, two.target, framed(BODIES[:50])) == b""
        two.counts(connections=1, frames=50, drop=50)


def test_some_dropped_frames_leave_the_others_in_order() -> None:
    some = [b"%d" % number for number in range(1000)]
    with ends(MessageFaults(drop=0.2)) as two:
        received = bodies(passed(two.client, two.target, framed(some)))
        dropped = two.relay.counts["drop"]
    assert 100 < dropped < 300
    assert len(received) == 1000 - dropped
    assert received == sorted(received, key=int)


def test_duplicates_arrive_twice_in_a_row() -> None:
    with ends(MessageFaults(duplicate=1.0)) as two:
        received = bodies(passed(two.client, two.target, framed([b"one", b"two"])))
        assert received == [b"one", b"one", b"two", b"two"]
        two.counts(connections=1, frames=2, duplicate=2)


def test_a_reordered_frame_changes_places_with_the_next() -> None:
    some = [b"1", b"2", b"3", b"4", b"last"]
    with ends(MessageFaults(reorder=1.0)) as two:
        received = bodies(passed(two.client, two.target, framed(some)))
        assert received == [b"2", b"1", b"4", b"3", b"last"]
        two.counts(connections=1, frames=5, reorder=2)


def test_a_frame_without_a_next_one_goes_out_alone() -> None:
    with ends(MessageFaults(reorder=1.0)) as two:
        began = time.monotonic()
        two.client.sendall(frame(b"one"))
        assert two.target.recv(100) == frame(b"one")
        assert time.monotonic() - began >= 0.9 * HOLD_S
        two.counts(connections=1, frames=1)


def test_late_frames_keep_their_order_and_hold_up_the_rest() -> None:
    some = [b"%d" % number for number in range(100)]
    with ends(MessageFaults(delay=0.1, delay_s=0.05)) as two:
        began = time.monotonic()
        assert bodies(passed(two.client, two.target, framed(some))) == some
        assert time.monotonic() - began >= 0.05
        assert 0 < two.relay.counts["delay"] < 100


def test_a_corrupt_frame_differs_in_one_bit() -> None:
    with ends(MessageFaults(corrupt=1.0)) as two:
        for number in range(20):
            sent = frame(b"%20d" % number)
            two.client.sendall(sent)
            received = two.target.recv(100)
            differing = int.from_bytes(sent, "big") ^ int.from_bytes(received, "big")
            assert len(received) == len(sent)
            assert differing.bit_count() == 1
        two.counts(connections=1, frames=20, corrupt=20)


def test_without_corruption_no_bit_differs() -> None:
    """Negative control."""
    with ends(MessageFaults(corrupt=0.0, duplicate=1.0)) as two:
        sent = frame(b"%20d" % 7)
        assert passed(two.client, two.target, sent) == sent + sent


def test_a_cut_closes_both_ends() -> None:
    with ends(MessageFaults(cut=1.0)) as two:
        two.client.sendall(frame(b"one"))
        assert two.target.recv(100) == b""
        assert two.client.recv(100) == b""
        two.counts(connections=1, frames=1, cut=1)
        again = two.connect()  # the next connection is another one
        again[1].sendall(frame(b"two"))
        assert again[0].recv(100) == b""


def test_without_a_cut_neither_end_is_closed() -> None:
    """Negative control."""
    with ends() as two:
        two.client.sendall(frame(b"one"))
        assert two.target.recv(100) == frame(b"one")
        two.client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            two.client.recv(100)


def test_a_stalled_direction_is_silent_and_the_other_is_not() -> None:
    with ends(MessageFaults(stall=1.0, skip=1)) as two:
        for number in range(5):
            two.client.sendall(frame(b"%d" % number))
        assert two.target.recv(100) == frame(b"0")
        two.counts(connections=1, frames=2, stall=1)
        two.target.settimeout(0.1)
        with pytest.raises(TimeoutError):
            two.target.recv(100)
        two.target.sendall(frame(b"answer"))
        assert two.client.recv(100) == frame(b"answer")


def test_a_stalled_direction_throws_away_without_bound_on_the_sender() -> None:
    with ends(MessageFaults(stall=1.0)) as two:
        for _ in range(64):
            two.client.sendall(frame(bytes(1 << 20)))
        two.counts(connections=1, frames=1, stall=1)


def test_a_stalled_connection_ends_with_the_end_that_was_stalled() -> None:
    with ends(MessageFaults(stall=1.0)) as two:
        two.client.sendall(frame(b"one"))
        two.counts(connections=1, frames=1, stall=1)
        two.client.close()
        assert two.target.recv(100) == b""
        until(lambda: not two.relay._links)


def test_the_first_frames_are_skipped_in_either_direction() -> None:
    with ends(MessageFaults(drop=1.0, skip=2)) as two:
        some = [b"1", b"2", b"3", b"4"]
        assert bodies(passed(two.client, two.target, framed(some))) == some[:2]
        assert bodies(passed(two.target, two.client, framed(some))) == some[:2]


MIXED = MessageFaults(drop=0.2, duplicate=0.2, reorder=0.2, corrupt=0.01, delay=0.05, delay_s=0.001)


def test_the_same_seed_does_the_same_whatever_the_timing() -> None:
    some = [b"%4d" % number for number in range(300)]
    received = []
    for seed, pauses in ((7, False), (7, True), (8, False)):
        with ends(MIXED, seed, hold_s=SECONDS) as two:
            if pauses:
                for body in some[:150]:
                    two.client.sendall(frame(body))
                    time.sleep(0.0002)
            data = framed(some[150:] if pauses else some)
            received.append((passed(two.client, two.target, data), dict(two.relay.counts)))
    assert received[0] == received[1]
    assert received[0] != received[2]


def test_connections_and_directions_do_not_fail_alike() -> None:
    data = framed([b"%4d" % number for number in range(100)])
    with ends(MessageFaults(drop=0.5)) as two:
        received = {passed(two.client, two.target, data), passed(two.target, two.client, data)}
        client, target = two.connect()
        received.add(passed(client, target, data))
    assert len(received) == 3


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
                pipe.receive(0.0)
            pipe.send(0.0)
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


# What follows needs no sockets.


def fed(faults: MessageFaults, frames: list[bytes], times: list[float]) -> list[DelayedFrame]:
    """What goes out when ``frames`` arrive at ``times``, and the stream ends with them."""
    direction = FrameFaults(faults, Random(7))
    out: list[DelayedFrame] = []
    for one, now in zip(frames, times, strict=True):
        out += direction.feed(one, now)
    return out + direction.flush(times[-1] if times else 0.0)


chances = st.floats(0.0, 1.0)
mixes = st.builds(
    MessageFaults, delay=chances, delay_s=st.floats(0.0, 5.0), duplicate=chances, reorder=chances
)


@given(mixes, st.lists(st.floats(0.0, 1.0), max_size=30))
def test_without_loss_every_frame_goes_out_and_due_times_never_go_back(
    faults: MessageFaults, gaps: list[float]
) -> None:
    times = [sum(gaps[:number]) for number in range(len(gaps))]
    frames = [b"%d" % number for number in range(len(gaps))]
    out = fed(faults, frames, times)
    assert {one.frame for one in out} == set(frames)
    assert max(Counter(one.frame for one in out).values(), default=0) <= 2
    assert [one.due for one in out] == sorted(one.due for one in out)
    for one in out:
        assert one.due >= times[int(one.frame)]


@given(mixes, st.integers(0, 30))
def test_a_frame_is_overtaken_by_one_frame_at_most(faults: MessageFaults, num: int) -> None:
    frames = [b"%d" % number for number in range(num)]
    order = [int(one.frame) for one in fed(faults, frames, [0.0] * num)]
    for place, number in enumerate(order):
        assert all(later > number - 2 for later in order[place:])


def test_a_cut_takes_what_is_held_and_a_stall_lets_it_go() -> None:
    for faults, state, expected in (
        (MessageFaults(cut=0.5, reorder=1.0), FlowState.CUT, []),
        (MessageFaults(stall=0.5, reorder=1.0), FlowState.STALLED, [b"held"]),
    ):
        rng = Scripted([0.9] * 7 + [0.0] + [0.1] * 7 + [0.0] + [0.9] * 8)
        direction = FrameFaults(faults, rng)
        assert direction.feed(b"held", 1.0) == []
        assert direction.held_until == 1.0 + HOLD_S
        assert [one.frame for one in direction.feed(b"end", 1.1)] == expected
        assert (direction.state, direction.held_until) == (state, None)
        assert direction.feed(b"more", 1.2) == []


def test_a_late_frame_that_is_overtaken_is_no_earlier_for_it() -> None:
    rng = Scripted([0.9] * 5 + [0.0, 0.0, 0.1] + [0.9] * 8)
    direction = FrameFaults(MessageFaults(delay=0.5, delay_s=5.0, reorder=0.5), rng)
    assert direction.feed(b"late", 1.0) == []
    assert direction.feed(b"next", 1.1) == [DelayedFrame(1.1, b"next"), DelayedFrame(6.0, b"late")]


class Scripted(Random):
    """Draws the values it is given."""

    def __init__(self, draws: list[float]) -> None:
        super().__init__(7)
        self._draws = draws

    def random(self) -> float:
        return self._draws.pop(0)


@given(st.lists(st.binary(max_size=50), max_size=20), st.data())
def test_units_lose_and_add_nothing_however_the_stream_is_cut(
    some: list[bytes], data: st.DataObject
) -> None:
    stream = framed(some) + data.draw(st.sampled_from([b"", b"\0", b"\0\0\0\x09abc"]))
    units, seen, at = FrameCutter(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 60))
        seen += units.feed(stream[at : at + size])
        at += size
    assert seen == [frame(body) for body in some]
    assert b"".join(seen + units.rest()) == stream


@given(st.binary(max_size=300), st.integers(1, 60))
def test_units_pass_any_bytes_on(stream: bytes, size: int) -> None:
    units, seen = FrameCutter(max_frame=40), []
    for at in range(0, len(stream), size):
        seen += units.feed(stream[at : at + size])
    assert b"".join(seen + units.rest()) == stream
