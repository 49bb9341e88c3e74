"""Laws of faults of messages: between real sockets, each does what it says and no more."""

from __future__ import annotations

import time

import pytest

from pdconn.faults.frame_faults import HOLD_S, MessageFaults
from pdconn.protocol.messages import frame
from tests.faults.on_demand.relay_ends import BODIES, SECONDS, bodies, ends, framed, passed, until


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
