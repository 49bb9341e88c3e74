"""Stalled connections do not keep decode engines out; what hangs does not hold up others.

The rows of the fault table that concern the listener, and what waits for it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest

from pdconn.lender.sessions import ConnectionLimits
from pdconn.sidechannel.connection import Address, Unauthenticated, resolve
from pdconn.sidechannel.security import Security
from tests.fakes.credentials import FOREIGN, SHARED
from tests.fakes.model_free_engines import until
from tests.fakes.pair import Pair
from tests.faults.child import Child
from tests.faults.raw_clients import RawReader
from tests.faults.raw_connections import (
    BLOCKS,
    HELLO,
    LIMITS,
    is_closed,
    lift_limits,
    raw_connections,
    serves,
)
from tests.threads.inside import loop_of, num_open, num_peers
from transport.testing.inprocess.faults import Held

# Stalled connections


@pytest.mark.parametrize(
    "data", [b"", HELLO[:1], HELLO[:-1], HELLO + HELLO[:9]], ids=["mute", "byte", "half", "greeted"]
)
def test_a_connection_that_sends_no_whole_frame_is_timed_out(data: bytes) -> None:
    with Pair(limits=ConnectionLimits(stall_s=0.3)) as pair:
        began = time.monotonic()
        with raw_connections(pair, 3, data) as waiting:
            until(lambda: all(map(is_closed, waiting)))
            assert time.monotonic() - began > 0.2
            until(lambda: pair.lender.counts["connections_timed_out"] == 3)
            lift_limits(pair)
            assert serves(pair)


def test_a_byte_at_a_time_does_not_extend_the_time_out() -> None:
    """Slowloris: each byte is a sign of life, and buys no time."""
    with (
        Pair(limits=ConnectionLimits(stall_s=0.4)) as pair,
        raw_connections(pair, 1) as [slow],
    ):
        unsent = HELLO
        while unsent and not is_closed(slow):
            with suppress(ConnectionError):
                slow.send(unsent[:1])
            unsent = unsent[1:]
            time.sleep(0.02)
        assert unsent
        until(lambda: pair.lender.counts["connections_timed_out"] == 1)
        lift_limits(pair)
        assert serves(pair)


def test_an_idle_reader_is_not_timed_out() -> None:
    """Negative control: time alone does not close a connection."""
    with Pair(limits=ConnectionLimits(stall_s=2.5)) as pair:
        pair.lender.lend("r", BLOCKS, 60.0)
        with RawReader(pair.lender.port) as reader:
            time.sleep(4.0)
            reader.claim("r", BLOCKS, "reader/1")
            assert pair.lender.counts["connections_timed_out"] == 0


def test_a_flood_of_stalled_connections_closes_the_oldest_and_no_reader() -> None:
    with Pair(limits=ConnectionLimits(stalled=4)) as pair:
        pair.lender.lend("r", BLOCKS, 60.0)
        with RawReader(pair.lender.port) as before, raw_connections(pair, 20) as crowd:
            assert serves(pair)
            until(lambda: sum(map(is_closed, crowd)) >= 16)
            before.claim("r", BLOCKS, "reader/1")
            assert not is_closed(crowd[-1])
            assert len(loop_of(pair.lender)._admission) <= 4 + 2


# Connections per host


def test_one_host_cannot_use_up_all_connections() -> None:
    with Pair(limits=ConnectionLimits(per_host=4)) as pair:
        with raw_connections(pair, 9, HELLO) as crowd:
            until(lambda: sum(map(is_closed, crowd)) == 5)
            until(lambda: pair.lender.counts["connections_refused"] == 5)
            with closing(socket.socket()) as other:
                other.bind(("127.0.0.2", 0))
                other.settimeout(5.0)
                other.connect(("127.0.0.1", pair.lender.port))
                other.sendall(HELLO)
                assert b"welcome" in other.recv(1 << 16)
        until(lambda: len(loop_of(pair.lender)._admission) == 0)
        assert serves(pair)


def test_without_a_free_file_descriptor_the_lender_pauses_and_serves_on() -> None:
    """It does not spin, open connections are served, and new ones once descriptors are free."""
    with closing(Child("tests.faults.lender_process")) as child, ExitStack() as stack:
        port = child.ask(do="open", secret=None, mutant=None)
        child.ask(do="lend", request="r", digest=BLOCKS.hex(), ttl_s=60.0)
        reader = stack.enter_context(RawReader(port))
        child.ask(do="limit_files", spare=2)
        for _ in range(12):
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), 5.0)))
        until(lambda: _failed_accepts(child) > 0)
        began = time.monotonic()
        before = child.ask(do="report")
        time.sleep(1.5)
        until(lambda: _failed_accepts(child) > before["counts"]["accept_failed"])
        reader.claim("r", BLOCKS, "reader/1")
        after = child.ask(do="report")
        took_s = time.monotonic() - began
        assert after["alive"]
        failed = after["counts"]["accept_failed"] - before["counts"]["accept_failed"]
        assert failed <= 1 + took_s / LIMITS.accept_pause_s
        assert (after["cpu_s"] - before["cpu_s"]) / took_s < 1 / 3, "it spins"
        child.ask(do="limit_files", spare=None)
        child.ask(do="lend", request="s", digest=BLOCKS.hex(), ttl_s=60.0)
        with RawReader(port) as late:
            late.claim("s", BLOCKS, "reader/2")


def _failed_accepts(child: Child) -> int:
    counts: dict[str, int] = child.ask(do="report")["counts"]
    return counts.get("accept_failed", 0)


# Connections without the secret


@pytest.mark.parametrize("how", ["no secret", "another secret"])
def test_a_reader_without_the_secret_is_logged_counted_and_sent_nothing(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with Pair(security=SHARED) as pair, closing(socket.socket()) as sock:
        if how == "another secret":
            with pytest.raises(Unauthenticated, match="the secrets probably differ"):
                RawReader(pair.lender.port, FOREIGN)
        else:
            sock.settimeout(5.0)
            sock.connect(("127.0.0.1", pair.lender.port))
            sock.sendall(HELLO)
            assert not b"".join(iter(lambda: sock.recv(1 << 16), b""))
        until(lambda: pair.lender.counts["connections_unauthenticated"] == 1)
        lines = [record.getMessage() for record in caplog.records]
        [line] = [line for line in lines if "not authenticated" in line]
        assert "peer='127.0.0.1:" in line
        assert serves(pair)


# What hangs does not hold up others


def test_a_slow_name_server_does_not_keep_other_pulls_from_renewing() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow(host: str, port: int) -> Address:
        if host != "slow.example":
            return resolve(host, port)
        asked.set()
        go_on.wait(60.0)
        return resolve("127.0.0.1", port)

    insecure = Security(insecure=True)
    with Pair(ttl_s=3.0, claim_timeout_s=60.0, security=insecure, resolve=slow) as pair:
        try:
            pair.network.script = lambda read: Held() if read.number == 0 else None
            pair.pull("d", pair.lend("r"))
            until(pair.network.in_flight)
            pair.ttl_s = 60.0
            pair.pull("slow", replace(pair.lend("s"), host="slow.example"), (1, 2, 3))
            assert asked.wait(20.0)
            renewals, since = pair.lender.counts["renewals"], time.monotonic()
            until(lambda: time.monotonic() - since > 4.0)  # longer than the lease
            pair.network.release_held()
            assert pair.outcome_of("d") is None
            assert pair.lender.counts["renewals"] >= renewals + 2
            assert pair.received == ["d"]
        finally:
            go_on.set()
        assert pair.outcome_of("slow") is None


def test_a_read_that_hangs_is_reported_in_time_and_its_blocks_stay_out_of_use() -> None:
    with Pair(drain_s=0.3) as pair:
        pair.network.script = lambda _: Held()
        pair.pull("d", pair.lend("r"))
        pair.wait(pair.network.in_flight)
        began = time.monotonic()
        pair.cancel("d")
        assert pair.outcome_of("d") == "cancelled"
        assert time.monotonic() - began > 0.25
        time.sleep(0.3)
        pair.collect()
        assert pair.released == []
        assert num_open(pair.puller) > 0
        assert pair.lender.take_freed() == []  # what may still be read is still lent
        pair.network.script = None
        assert serves(pair)
        pair.network.release_held()
        pair.wait(lambda: pair.released == ["d"])
        assert num_open(pair.puller) == 0


# Peers


def test_an_idle_peer_makes_room_and_a_busy_one_does_not() -> None:
    with Pair(max_peers=2, through=lambda _, port: ("127.0.0.1", port)) as pair:
        for number in range(2, 6):
            _serves_at(pair, f"127.0.0.{number}", f"idle{number}")
            assert num_peers(pair.puller) <= 2
        pair.network.script = lambda _: Held()
        for number in (2, 3):
            _pull_at(pair, f"127.0.0.{number}", f"busy{number}")
        until(lambda: len(pair.network.in_flight()) == 2)
        _pull_at(pair, "127.0.0.4", "refused")
        assert "2 lenders are in use" in str(pair.outcome_of("refused"))
        pair.network.script = None
        pair.network.release_held()
        assert pair.outcome_of("busy2") is None
        assert pair.outcome_of("busy3") is None
        _serves_at(pair, "127.0.0.4", "after")


def _pull_at(pair: Pair, host: str, request: str) -> None:
    """Pull from the lender, under another name."""
    pair.pull(request, replace(pair.lend(f"lent-{request}"), host=host))


def _serves_at(pair: Pair, host: str, request: str) -> None:
    _pull_at(pair, host, request)
    assert pair.outcome_of(request) is None
