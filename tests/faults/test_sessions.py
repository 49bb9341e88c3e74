"""What one reader's session may cost a lender: replies it does not read, and claims."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from pdconn.lender.sessions import ConnectionLimits
from pdconn.protocol.messages import (
    Claim,
    Frames,
    Granted,
    Reader,
    RefusalReason,
    Refused,
    Renew,
    decode_from_lender,
    encode,
    frame,
)
from tests.fakes.model_free_engines import until
from tests.fakes.pair import Pair
from tests.faults.raw_clients import RawReader
from tests.faults.raw_connections import BLOCKS, HELLO, lift_limits, serves
from tests.threads.inside import loop_of

PATIENCE_S = 30.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as made:
        yield made


# Readers that send and do not read


LONG_REQUEST = frame(encode([Renew(1, "x" * 500, Reader("y" * 500, 0, 1))] * 500))
"""Half a MiB; so is the reply."""


@contextmanager
def unread(pair: Pair) -> Iterator[socket.socket]:
    """A reader that greets and never reads."""
    with closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", pair.lender.port))
        sock.settimeout(0.05)
        sock.sendall(HELLO)
        yield sock


def flood(sock: socket.socket, times: int) -> None:
    """Send the long request so often, or until the lender closes."""
    unsent, give_up = LONG_REQUEST * times, time.monotonic() + 30.0
    with suppress(ConnectionError):
        while unsent:
            assert time.monotonic() < give_up, "the lender does not read"
            with suppress(TimeoutError):
                unsent = unsent[sock.send(unsent[: 1 << 20]) :]


def test_a_reader_that_does_not_read_is_not_read_from() -> None:
    """Backpressure: its requests wait in its kernel, instead of our replies in our memory."""
    with Pair(limits=ConnectionLimits(stall_s=60.0)) as pair, unread(pair) as sock:
        requests = LONG_REQUEST * 64
        sent = _send_until_stuck(sock, requests)
        assert sent < len(requests), "all of it was read"
        [connection] = loop_of(pair.lender)._connections.values()
        assert connection.num_unsent < 2 * len(LONG_REQUEST)
        assert serves(pair)
        # Then it reads, finishes the frame that it had begun, and nothing was lost.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        frames = -(-sent // len(LONG_REQUEST))
        finishing = threading.Thread(
            target=sock.sendall, args=(requests[sent : frames * len(LONG_REQUEST)],)
        )
        sock.settimeout(PATIENCE_S)
        finishing.start()
        assert _refused(sock, frames * 500) == frames * 500
        finishing.join()
        assert pair.lender.counts["connections_timed_out"] == 0


def _send_until_stuck(sock: socket.socket, data: bytes) -> int:
    """Bytes that the system took before it took none for a second."""
    sock.settimeout(1.0)
    sent = 0
    with suppress(TimeoutError):
        while sent < len(data):
            sent += sock.send(data[sent : sent + (1 << 20)])
    return sent


def _refused(sock: socket.socket, count: int) -> int:
    """How many refusals arrive, up to ``count``."""
    frames, received = Frames(1 << 24), 0
    while received < count and (data := sock.recv(1 << 20)):
        for body in frames.feed_bytes(data):
            received += sum(isinstance(one, Refused) for one in decode_from_lender(body))
    return received


def test_a_reader_that_does_not_read_its_replies_is_timed_out() -> None:
    with Pair(limits=ConnectionLimits(stall_s=0.4)) as pair:
        with unread(pair) as sock:
            flood(sock, 20)
            until(lambda: len(loop_of(pair.lender)._admission) == 0)
        until(lambda: pair.lender.counts["connections_timed_out"] == 1)
        lift_limits(pair)
        assert serves(pair)


def test_further_requests_do_not_extend_the_time_out_of_a_reader_that_never_reads() -> None:
    """Else each connection may hold ``unsent_nbytes`` for ever, and a host 2048 times as much."""
    small = frame(encode([Renew(1, "r", Reader("d", 0, 1))]))
    with Pair(limits=ConnectionLimits(stall_s=0.4)) as pair, unread(pair) as sock:
        flood(sock, 20)
        sock.settimeout(20.0)
        until(lambda: _is_refused(sock, small))


def _is_refused(sock: socket.socket, data: bytes) -> bool:
    """Whether the connection is closed, a little after this call."""
    time.sleep(0.05)
    try:
        sock.sendall(data)
    except ConnectionError:
        return True
    return False


# Claims of a session


def test_a_claim_does_not_overtake_its_lease(pair: Pair) -> None:
    """What is lent while the lender is about to read is in the table before its claim is."""
    reading, go = threading.Event(), threading.Event()
    reader = Reader("reader/1", 0, 1)
    with RawReader(pair.lender.port) as client:
        [connection] = loop_of(pair.lender)._connections.values()
        real = connection.receive_frames

        def receive() -> list[bytes]:
            reading.set()
            go.wait(20.0)
            return real()

        connection.receive_frames = receive  # type: ignore[method-assign]
        client.say(Renew(1, "other", reader))
        assert reading.wait(20.0)  # the queue was emptied, and the socket was not read
        pair.lender.lend("r", BLOCKS, 60.0)
        client.say(Claim(2, "r", reader, BLOCKS))
        time.sleep(0.05)
        go.set()
        client.hear(Refused)
        client.hear(Granted)


def test_an_expired_claim_is_forgotten(pair: Pair) -> None:
    """Law 5.  A session may hold so many claims; expired ones must not count."""
    with RawReader(pair.lender.port) as client:
        pair.lender.lend("r", BLOCKS, 2.5)
        client.claim("r", BLOCKS, "reader/1")
        assert pair.freed() == "expired"
        [session] = loop_of(pair.lender)._connections
        until(lambda: not session.claimed)
        assert session.num_claims == 0, "the bound of a session counts claims that are over"


def test_only_the_session_that_claimed_may_renew_a_claim(pair: Pair) -> None:
    """As with Done and ChecksumRequest: else a reader's name suffices to keep blocks lent."""
    pair.lender.lend("r", BLOCKS, 5.0)
    with RawReader(pair.lender.port) as client, RawReader(pair.lender.port) as other:
        reader = Reader("reader/1", 0, 1)
        client.say(Claim(1, "r", reader, BLOCKS))
        client.hear(Granted)
        other.say(Renew(1, "r", reader))
        other.hear(Refused)


def test_a_session_holds_so_many_claims_and_no_more() -> None:
    """Readers count, not requests: one ticket is enough for thousands of them."""
    with Pair(limits=ConnectionLimits(claims=3)) as pair:
        pair.lender.lend("r", BLOCKS, 5.0)
        with RawReader(pair.lender.port) as client:
            for number in range(3):
                client.claim("r", BLOCKS, f"reader/{number}")
            client.say(Claim(4, "r", Reader("reader/4", 0, 1), BLOCKS))
            assert client.hear(Refused).why is RefusalReason.TOO_MANY
