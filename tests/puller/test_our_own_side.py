"""What is scarce or slow on our own side fails one pull at most, and closes no peer."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdconn.integrity.checks import Expected
from pdconn.lender.sessions import LenderSessions
from pdconn.lifecycle.pull import Patience, Pull, PullState
from pdconn.protocol.messages import ChecksumRequest, ChecksumUnavailable, Claim, Reader, Refused
from pdconn.protocol.proof import ChecksumQuery, PieceRange
from pdconn.protocol.ticket import BlockList
from pdconn.puller.reads import Connect, Connected, Disconnect, JobResult, TransportJobs
from pdconn.puller.verification import Verify
from tests.fakes.pair import Pair
from tests.faults.raw_clients import RawReader
from transport import Memory, PeerId
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport

BLOCKS = (BlockList(0, (3, 4, 5)),)


def serves(pair: Pair, request: str = "after") -> bool:
    """Whether another pull succeeds."""
    pair.pull(request, pair.lend(f"lent-{request}"))
    return pair.outcome_of(request) is None


# Checksums that cannot be made


def test_a_checksum_of_ours_that_cannot_be_made_costs_its_pull_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError("no room on the device")

    with Pair(verify=Verify.ALWAYS, their_verify=Verify.ALWAYS) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(Expected, "ours", exhausted)
            pair.pull("d", pair.lend("r"))
            assert "no checksum of ours: MemoryError: no room" in str(pair.outcome_of("d"))
        assert pair.puller.take_pull_counts() == {"pulls_unverified": 1}
        assert serves(pair)


def test_checksums_that_prefill_could_not_make_are_named_at_once() -> None:
    with Pair(verify=Verify.ALWAYS, their_verify=Verify.ALWAYS, claim_timeout_s=60) as pair:
        ticket = pair.lend_blocks("r", BLOCKS)
        pair.lender.add_sums("r", 0, None)
        pair.pull("d", ticket)
        assert "prefill failed to make its checksums" in str(pair.outcome_of("d"))
        assert serves(pair)


# Our own queue is not the lender's silence


def test_our_own_sums_may_take_longer_than_a_lender_may(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Expected.ours

    def slow(self: Expected, *memory: Any) -> Any:
        time.sleep(3.5)
        return made(self, *memory)

    monkeypatch.setattr(Expected, "ours", slow)
    with Pair(verify=Verify.ALWAYS, their_verify=Verify.ALWAYS, claim_timeout_s=2.5) as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None


def test_our_own_transport_may_take_longer_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = InProcessTransport.connect

    def slow(self: InProcessTransport, address: bytes) -> Any:
        time.sleep(3.5)
        return connect(self, address)

    monkeypatch.setattr(InProcessTransport, "connect", slow)
    with Pair(claim_timeout_s=2.5) as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None


def test_but_it_may_not_take_for_ever() -> None:
    patience = Patience(claim_s=10.0, read_s=100.0)
    pull = Pull(patience, 0.0, verify=True)
    pull.want(0.0)
    pull.welcomed(9.0)
    assert pull.next_deadline() == 109.0
    pull.greeted(50.0)
    assert pull.next_deadline() == 60.0
    pull.granted(1, 1000.0, 51.0)
    pull.settled(52.0)
    assert pull.state is PullState.VERIFYING
    assert pull.next_deadline() == 62.0
    pull.answered(60.0)
    assert pull.tick(159.0) == []
    assert pull.tick(160.0) != []
    assert pull.state is PullState.FAILED


# No thread, no room to watch a socket


def test_without_a_thread_to_look_a_host_up_only_its_pull_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Pair() as pair:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            pair.pull("d", replace(pair.lend("r"), host="localhost"))
            assert "can't start new thread" in str(pair.outcome_of("d"))
        pair.pull("e", replace(pair.lend("s"), host="localhost"))
        assert pair.outcome_of("e") is None


def test_a_connection_that_cannot_be_watched_is_closed_and_the_others_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register = selectors.DefaultSelector.register

    def full(self: Any, sock: Any, *rest: Any) -> Any:
        if threading.current_thread().name == "pdconn-lender":
            raise OSError(errno.ENOSPC, "no watches left")
        return register(self, sock, *rest)

    with Pair() as pair:
        assert serves(pair, "before")
        with monkeypatch.context() as patch:
            patch.setattr(selectors.DefaultSelector, "register", full)
            with socket.create_connection(("127.0.0.1", pair.lender.port), 5.0) as sock:
                assert sock.recv(1) == b""
        pair.wait(lambda: pair.lender.counts["accept_failed"] == 1)
        with RawReader(pair.lender.port):
            assert serves(pair)


# What is sent, and when


def test_a_refusal_does_not_give_the_digest_away() -> None:
    with Pair() as pair, RawReader(pair.lender.port) as raw:
        ticket = pair.lend("r").digest()
        raw.say(Claim(1, "r", Reader("x", 0, 1), bytes(len(ticket))))
        refused = raw.hear(Refused)
        assert refused.why == "altered"
        assert ticket.hex()[:8] not in repr(refused)


def test_a_reader_that_waits_for_checksums_hears_that_the_lease_has_ended() -> None:
    with (
        Pair(their_verify=Verify.ALWAYS, ttl_s=3.0) as pair,
        RawReader(pair.lender.port) as raw,
    ):
        ticket = pair.lend_blocks("r", BLOCKS)
        raw.claim("r", ticket.digest(), "here/1")
        reader = Reader("here/1", 0, 1)
        raw.say(
            ChecksumRequest(
                0, "r", reader, ChecksumQuery(0, False, (PieceRange(0, 0, 1, 0, 2, 0, 1),))
            )
        )
        assert "the lease has ended" in raw.hear(ChecksumUnavailable).detail


def test_a_lender_that_wakes_late_hears_that_it_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or it would keep the blocks for a whole lease, just when it has too much to do."""
    hear = LenderSessions.handle_messages

    def late(self: LenderSessions, session: Any, messages: list[Any], now: float) -> None:
        if any(isinstance(message, Claim) for message in messages):
            time.sleep(3.5)
        hear(self, session, messages, now)

    with Pair(claim_timeout_s=2.5, ttl_s=60.0) as pair:
        assert serves(pair, "before")
        assert pair.freed() == "read"
        monkeypatch.setattr(LenderSessions, "handle_messages", late)
        pair.pull("d", pair.lend("r"))
        assert "no answer to the claim" in str(pair.outcome_of("d"))
        assert pair.freed(seconds=20.0) == "read"


# Names of peers


def test_no_other_lender_is_connected_under_the_name_of_a_peer_in_use() -> None:
    """Until the peer is not in use any more: that is its next boot."""
    network, results = InProcessNetwork(), list[JobResult]()
    reading = TransportJobs(InProcessTransport(network, "decode"), results.append)
    honest = InProcessTransport(network, "prefill").address()
    elsewhere = InProcessNetwork()
    InProcessTransport(elsewhere, "decode")  # so that the next one gets the same number
    other = InProcessTransport(elsewhere, "prefill")
    room = np.zeros(64, np.uint8)
    other.register([Memory(room.ctypes.data, room.nbytes)])
    reading.do_job(Connect(1, honest))
    reading.do_job(Connect(2, other.address()))
    reading.do_job(Connect(3, honest))
    first, second, third = connected(results)
    assert first is not None
    assert second == "BadAddress: prefill#1 is in use under another address"
    assert third == first
    for _ in range(2):
        reading.do_job(Disconnect(PeerId(first)))
    reading.do_job(Connect(4, other.address()))
    assert connected(results)[-1] == first


def connected(results: list[JobResult]) -> list[str | None]:
    """Peers, or why there is none."""
    return [result.peer or result.error for result in results if isinstance(result, Connected)]
