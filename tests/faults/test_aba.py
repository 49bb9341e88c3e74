"""The ABA trap: blocks that are lent, read late, and reused by then.

A lease of 50 ms whose renewals get lost, reads that are 2 s late, and a prefill pool of 24
blocks that is computed over at once: nearly every read copies another request's KV, in
good order and without an error.  Decode's tokens are a function of what it received, and
must be those of one engine alone::

    prefill   r7 in blocks 4 5 6 ──50 ms──► free ──► r19 in 4 5 6 ──► r31 ...
    decode    claim ─ granted ─ read ················ 2 s ················► copies r211
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from random import Random
from typing import Protocol

import pytest

from pdconn.lifecycle.pull import Patience
from pdconn.protocol.ticket import Ticket
from tests.fakes.credulous import without_leases
from tests.fakes.model_free_engines import Decode, Prefill
from tests.faults.on_demand.relays import RelayWithoutRenewals
from tests.faults.prefill_process import PrefillProcess
from tests.threads.inside import num_open
from tests.transport.contract.rigs import nixl_options
from transport.faulty import FaultyTransport, ReadFaults
from transport.testing.inprocess.faults import Late
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport

LEASE_S = 0.05
LATE = ReadFaults(delay=1.0, delay_s=2.0)
PATIENCE = Patience(claim_s=10.0, drain_s=10.0)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hundreds of failures are meant here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Prefilling(Protocol):
    """What computes and lends: :class:`Prefill`, or one in another process."""

    def compute(self, number: int) -> Ticket | None:
        """Lend request ``number``, or None when there is no room yet."""


Enough = Callable[[Decode], object]
"""Whether the trap has closed as often as a test needs."""


def serve(prefill: Prefilling, decode: Decode, count: int, enough: Enough) -> None:
    """Hand over ``count`` requests, as many at once as there is room for.

    Prefill computes others as long as decode is not through, so blocks are always reused.
    Where the machine is so busy that leases ran out before they were claimed, what was
    read may not be ``enough``: then more are handed over, eight times as many at most.
    """
    number = _serve(prefill, decode, 0, count)
    for _ in range(28):
        if enough(decode):
            return
        number = _serve(prefill, decode, number, count // 4)


def _serve(prefill: Prefilling, decode: Decode, number: int, count: int) -> int:
    """Hand over ``count`` requests from ``number`` on; the next unused number."""
    end, give_up = number + count, time.monotonic() + 120.0
    while number < end or decode.num_open:
        assert time.monotonic() < give_up, f"{decode.num_open} are open, {number} were asked"
        while number >= end or decode.has_room:
            ticket = prefill.compute(number)
            if ticket is None:
                break
            if number < end:
                decode.pull(number, ticket)
            number += 1
        decode.collect()
        time.sleep(0.001)
    return number


def trap(
    count: int,
    *,
    faults: ReadFaults = LATE,
    ttl_s: float = LEASE_S,
    lossy: bool = True,
    pool: int = 24,
    network: InProcessNetwork | None = None,
    enough: Enough = lambda _: True,
) -> Decode:
    """``count`` requests over the in-process transport."""
    network = network or InProcessNetwork()
    late = FaultyTransport(InProcessTransport(network, "decode"), faults, Random(7))
    with ExitStack() as stack:
        lending = InProcessTransport(network, "prefill")
        prefill = stack.enter_context(Prefill(lending, pool=pool, ttl_s=ttl_s))
        through: Callable[[str, int], tuple[str, int]] | None = None
        if lossy:
            relay = stack.enter_context(closing(RelayWithoutRenewals(prefill.lender.port)))
            through = lambda _host, _port: (relay.host, relay.port)  # noqa: E731
        decode = Decode(late, pool=3 * count, patience=PATIENCE, through=through)
        stack.enter_context(decode)
        serve(prefill, decode, count, enough)
        assert prefill.ended["aborted"] == 0
        assert num_open(decode.puller) == 0
        print(f"{summary(decode)}; leases {dict(prefill.ended)}")
    return decode


def summary(decode: Decode) -> str:
    return (
        f"{len(decode.tokens)} requests: {len(decode.received)} received, "
        f"{len(decode.rejected)} rejected, {len(decode.corrupted)} reads on reused blocks, "
        f"{len(decode.wrong)} wrong"
    )


def test_500_reads_of_reused_blocks_give_no_wrong_token() -> None:
    decode = trap(500, enough=lambda decode: len(decode.corrupted) > 400)
    assert len(decode.tokens) >= 500
    assert decode.wrong == []
    assert len(decode.corrupted) > 400, "the trap did not close: blocks were not reused under reads"
    assert decode.corrupted <= set(decode.rejected)


def test_without_the_deadline_the_same_gives_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    without_leases(monkeypatch)
    assert len(trap(120, enough=lambda decode: len(decode.wrong) > 60).wrong) > 60


def test_reads_that_land_about_the_deadline_are_believed_or_not_and_never_wrong() -> None:
    """Some land in time, some under a lease that is just over, some on reused blocks."""
    rng = Random(11)
    network = InProcessNetwork(script=lambda _: Late(rng.uniform(0.0, 4 * LEASE_S)))
    decode = trap(
        300,
        faults=ReadFaults(),
        network=network,
        enough=lambda decode: decode.received and decode.corrupted,
    )
    assert decode.wrong == []
    assert decode.received
    assert decode.corrupted


def test_about_the_deadline_too_it_is_the_check_that_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    without_leases(monkeypatch)
    rng = Random(11)
    network = InProcessNetwork(script=lambda _: Late(rng.uniform(0.0, 4 * LEASE_S)))
    enough: Enough = lambda decode: decode.wrong  # noqa: E731
    assert trap(150, faults=ReadFaults(), network=network, enough=enough).wrong


def test_240_undisturbed_requests_raise_no_false_alarm() -> None:
    """The lease is longer: a busy machine may take a thread off its core for 50 ms."""
    decode = trap(240, faults=ReadFaults(), ttl_s=5.0, lossy=False)
    assert len(decode.received) == 240
    assert decode.rejected == {}
    assert decode.wrong == []


def test_240_late_reads_whose_renewals_arrive_raise_no_false_alarm() -> None:
    """What is rejected above is rejected for the lost renewals, not for being late.

    A busy machine may stand still for two seconds of a lease.
    """
    late = ReadFaults(delay=1.0, delay_s=6.0)
    decode = trap(240, faults=late, ttl_s=3.6, lossy=False, pool=720)
    assert decode.wrong == []
    assert len(decode.received) == 240


@pytest.fixture(scope="module")
def prefill() -> Iterator[PrefillProcess]:
    with closing(PrefillProcess()) as process:
        yield process


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
class TestNixlOverTcp:
    """The same with real agents, prefill in a process of its own."""

    def trap(
        self,
        prefill: PrefillProcess,
        count: int,
        faults: ReadFaults,
        ttl_s: float,
        lossy: bool,
        *,
        enough: Enough = lambda _: True,
    ) -> Decode:
        from transport.nixl.transport import NixlTransport

        options = nixl_options("tcp")
        with ExitStack() as stack:
            port = prefill.open(ttl_s, options)
            inner = NixlTransport("decode", **options)
            late = FaultyTransport(inner, faults, Random(7))
            through: Callable[[str, int], tuple[str, int]] | None = None
            if lossy:
                relay = stack.enter_context(closing(RelayWithoutRenewals(port)))
                through = lambda _host, _port: (relay.host, relay.port)  # noqa: E731
            decode = Decode(late, pool=3 * count, patience=PATIENCE, through=through)
            stack.enter_context(decode)
            serve(prefill, decode, count, enough)
            print(summary(decode))
        return decode

    def test_48_reads_of_reused_blocks_give_no_wrong_token(self, prefill: PrefillProcess) -> None:
        enough: Enough = lambda decode: len(decode.corrupted) > 24  # noqa: E731
        decode = self.trap(prefill, 48, LATE, LEASE_S, lossy=True, enough=enough)
        assert decode.wrong == []
        assert len(decode.corrupted) > 24

    def test_without_the_deadline_the_same_gives_wrong_tokens(
        self, prefill: PrefillProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without_leases(monkeypatch)
        enough: Enough = lambda decode: len(decode.wrong) > 12  # noqa: E731
        assert len(self.trap(prefill, 24, LATE, LEASE_S, lossy=True, enough=enough).wrong) > 12

    def test_48_undisturbed_requests_raise_no_false_alarm(self, prefill: PrefillProcess) -> None:
        decode = self.trap(prefill, 48, ReadFaults(), 5.0, lossy=False)
        assert len(decode.received) == 48
        assert decode.wrong == []
