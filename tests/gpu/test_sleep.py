"""A lender that sleeps: its memory is unmapped under its peers, and other pages come back."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from pdconn.planning.plan import Pairing
from pdconn.protocol.messages import RankGeometry
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller, PullResults
from tests.gpu.bytes_on import BytesOn
from tests.gpu.cases import BLANK, Case, Request, allocated
from tests.gpu.rigs import PATIENCE_S, TRAITS, DeviceLender, settled_reads, ticket_of
from tests.gpu.test_pulls import until
from transport import BadAddress, Device
from transport.nixl.transport import NixlTransport

CASE = Case("LBHNC", "LBHNC", 1, 1)
REQUEST = Request.of(CASE)
PATHS = {"cpu": ("^cuda_ipc", "tcp"), "cuda": ("^cuda_ipc",)}
"""What the lender's UCX is restricted to: directly from its process, and by its own thread."""


@pytest.fixture(params=[0, 1])
def tls(request: pytest.FixtureRequest, device: Device) -> str:
    """A path of this device."""
    paths = PATHS[device.kind]
    if request.param >= len(paths):
        pytest.skip("not a path to GPU memory")
    return paths[request.param]


@contextmanager
def decode(device: Device) -> Iterator[tuple[Puller, BytesOn]]:
    """A puller of one rank, and its memory."""
    ours = BytesOn(REQUEST.blank(0), device)
    transport = NixlTransport("gpu-decode", huge_pages=False)
    transport.register([ours.memory])
    me = Rank("decode", 0, 1, 0, allocated(REQUEST.ours, 0, ours), TRAITS)
    puller = Puller(me, transport)
    try:
        yield puller, ours
    finally:
        puller.close()


def pull(puller: Puller, name: str, port: int, boot: str) -> PullResults:
    """How a pull of the request from a boot ended."""
    puller.post_command(ClaimTicket(name, f"here/{name}", ticket_of(REQUEST, port, boot)))
    puller.post_command(ReadBlocks(name, REQUEST.need))
    ended: list[PullResults] = []

    def is_over() -> bool:
        found = puller.take_results()
        if found.records or found.failed:
            ended.append(found)
        return bool(ended)

    until(is_over)
    return ended[0]


def changed(bytes_read: np.ndarray) -> np.ndarray:
    """What the bytes are after waking: the blank ones are not read."""
    return np.where(bytes_read == BLANK, BLANK, bytes_read ^ 1)


def test_a_peer_of_the_boot_before_reads_the_pages_of_the_next(
    lender: DeviceLender, device: Device, tls: str
) -> None:
    """It has both boots' descriptions, under the same memory and the same port."""
    before, port = lender.sleeper(CASE, tls)
    right = REQUEST.expected(0)
    with decode(device) as (puller, ours):
        assert not pull(puller, "first", port, "boot-1").failed
        assert not (ours != right).any()
        lender.sleep()
        after, again = lender.wake()
        assert again == port
        assert after.address != before.address
        [refused] = pull(puller, "old", port, "boot-1").failed
        assert "incarnation: theirs boot-2, ours boot-1" in refused.reason
        assert not (ours != right).any(), "nothing of it was read"
        assert not pull(puller, "new", port, "boot-2").failed
        assert not (ours != changed(right)).any()


def test_a_pull_while_it_sleeps_fails(lender: DeviceLender, device: Device, tls: str) -> None:
    _, port = lender.sleeper(CASE, tls)
    with decode(device) as (puller, ours):
        lender.sleep()
        [failed] = pull(puller, "asleep", port, "boot-1").failed
        assert "prefill at" in failed.reason
        assert (ours[:] == BLANK).all()
        lender.wake()
        assert not pull(puller, "awake", port, "boot-2").failed
        assert not (ours != changed(REQUEST.expected(0))).any()


def test_a_reader_that_asks_nobody_never_gets_what_was_lent(
    lender: DeviceLender,
    device: Device,
    tls: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has an old description only.  A read of unmapped memory fails, and ends neither process.

    After waking it may succeed where a reader copies by itself: with wrong bytes, so that the
    lender's word is needed.  Negative control: before the sleep the description is good.
    """
    caplog.set_level(logging.CRITICAL)
    before, _ = lender.sleeper(CASE, tls)
    right = REQUEST.expected(0)
    with NixlTransport("gpu-decode", huge_pages=False, close_wait_s=60.0) as transport:
        ours = BytesOn(REQUEST.blank(0), device)
        transport.register([ours.memory])
        assert read(transport, before, ours)
        assert not (ours != right).any()
        lender.sleep()
        assert not read(transport, before, ours)
        lender.wake()
        ours[:] = REQUEST.blank(0)
        arrived = read(transport, before, ours)
        assert (ours != right).any()
        assert not arrived or not (ours != changed(right)).any()


def test_memory_is_unmapped_amid_reads_and_nobody_dies(
    lender: DeviceLender, device: Device, tls: str
) -> None:
    """Readers that did not hear of it: their reads end, and the lender serves its next boot."""
    before, _ = lender.sleeper(CASE, tls)
    right = REQUEST.expected(0)
    begun = threading.Event()

    def read_on() -> int:
        """Reads that arrived until one did not; each was right."""
        with NixlTransport("gpu-decode", huge_pages=False, close_wait_s=60.0) as transport:
            ours = BytesOn(REQUEST.blank(0), device)
            transport.register([ours.memory])
            for number in itertools.count():
                ours[:] = REQUEST.blank(0)
                if not read(transport, before, ours):
                    return number
                assert not (ours != right).any()
                begun.set()
        raise AssertionError

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_on)
        assert begun.wait(PATIENCE_S)
        lender.sleep()
        assert reading.result(PATIENCE_S) > 0
    _, port = lender.wake()
    with decode(device) as (puller, ours):
        assert not pull(puller, "new", port, "boot-2").failed
        assert not (ours != changed(right)).any()


def read(transport: NixlTransport, rank: RankGeometry, ours: BytesOn) -> bool:
    """Read the request by a rank's description; whether the transport says that it arrived."""
    pairing = Pairing.between(allocated(REQUEST.ours, 0, ours), [rank.references], 0)
    [(_, spans)] = pairing.plan(REQUEST.need, REQUEST.theirs.tables).reads
    try:
        peer = transport.connect(rank.address)
    except BadAddress:  # nobody listens at it any more
        return False
    [settled] = settled_reads(transport, [transport.read(peer, spans)])
    return settled.ok
