"""Leases end early: a cache reset takes back what is lent, a shutdown waits until it is read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pdconn.protocol.messages import (
    Claim,
    Confirm,
    Confirmed,
    Done,
    Granted,
    Reader,
    RefusalReason,
    Refused,
)
from pdconn.protocol.ticket import parse_ticket
from pdconn.vllm.lends.lending import Lending
from tests.fakes.simulated.block_pool import CountedPool
from tests.faults.raw_clients import RawReader
from tests.vllm.lends.scheduler import request
from transport.testing.inprocess.faults import ManualClock


def lending_port(params: dict[str, Any]) -> int:
    return parse_ticket(params).port


# A cache reset: /reset_prefix_cache, /pause?clear_cache=true, new weights.


@pytest.mark.parametrize("lease_s", [60.0])
def test_a_reset_takes_back_what_is_lent_and_succeeds(
    lending: Lending, pool: CountedPool, lease_s: float
) -> None:
    """Otherwise vLLM answers `success: false`, or 500 to a pause, and stays paused."""
    params = lending.lend_request(request("r"), ([3, 4],))
    assert params is not None
    assert pool.reset_prefix_cache()
    assert pool.freed == [4, 3]
    with RawReader(lending_port(params), wants="boot") as reader:
        ticket = parse_ticket(params)
        reader.say(Claim(1, "r", Reader("d", 0, 1), ticket.digest()))
        assert reader.hear(Refused).why is RefusalReason.ABORTED
    assert lending.take_counts()["freed_aborted"] == 1


@pytest.mark.parametrize("lease_s", [60.0])
def test_a_reset_waits_for_what_is_being_read(
    lending: Lending, pool: CountedPool, lease_s: float
) -> None:
    """A reset on an engine in use fails no request that is about to be handed over."""
    params = lending.lend_request(request("r"), ([3],))
    assert params is not None
    ticket, me = parse_ticket(params), Reader("d", 0, 1)
    with RawReader(lending_port(params), wants="boot") as reader, ThreadPoolExecutor(1) as other:
        reader.say(Claim(1, "r", me, ticket.digest()))
        reader.hear(Granted)
        done = other.submit(pool.reset_prefix_cache)
        time.sleep(0.1)
        assert not done.done()
        reader.say(Confirm(2, "r", me, ticket.digest()))
        reader.hear(Confirmed)
        assert done.result()
    assert lending.take_counts()["confirmed"] == 1


def test_a_reset_of_an_engine_that_lends_nothing_is_vllms_own(
    lending: Lending, pool: CountedPool
) -> None:
    assert pool.reset_prefix_cache()
    pool.touch([pool.blocks[5]])
    assert not pool.reset_prefix_cache(), "a running request's block is not ours to take back"


# Shutdown


@pytest.mark.parametrize("lease_s", [60.0])
def test_an_engine_that_was_asked_to_stop_waits_until_its_leases_are_read(
    lending: Lending, pool: CountedPool, clock: ManualClock, lease_s: float
) -> None:
    """Otherwise every ticket that is not redeemed yet is a failed request."""
    params = lending.lend_request(request("r"), ([3],))
    assert params is not None
    ticket = parse_ticket(params)
    looks, over = 0, time.monotonic() + 0.5
    while lending.drain_leases(clock() + lease_s):
        looks += 1
        if time.monotonic() > over:
            break
    assert pool.pinned() == [3]
    assert 0 < looks < 100, "it spins, or does not wait"
    with RawReader(lending_port(params), wants="boot") as reader:
        reader.say(Done("r", Reader("d", 0, 1), ticket.digest()))
        give_up = time.monotonic() + 20
        while lending.drain_leases(clock() + lease_s):
            assert time.monotonic() < give_up
    assert pool.pinned() == []


@pytest.mark.parametrize("lease_s", [60.0])
def test_the_wait_for_leases_is_bounded(
    lending: Lending,
    pool: CountedPool,
    clock: ManualClock,
    lease_s: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It counts from the signal: vLLM asks only when no request is left, which may be late."""
    lending.lend_request(request("r"), ([3],))
    until = clock() + 9.0
    clock.advance(8.9)
    assert lending.drain_leases(until)
    clock.advance(0.1)
    for _ in range(3):  # vLLM asks several times in a row
        assert not lending.drain_leases(until)
    assert pool.pinned() == [3]
    told = [record.message for record in caplog.records if "stopping with leases" in record.message]
    assert told == ["pdconn: stopping with leases unread: leases=1"]


def test_an_engine_that_lends_nothing_stops_at_once(lending: Lending, clock: ManualClock) -> None:
    assert not lending.drain_leases(clock() + 60.0)
