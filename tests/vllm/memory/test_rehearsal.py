"""A rehearsal is a whole pull from ourselves, and leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from pdconn.vllm.memory.warm import PagedTransport, RehearsalFailed, rehearse
from transport import Memory, PeerId, ReadId, Spans
from transport.nixl.transport import NixlTransport
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport, Lost

BLOCK_NBYTES = 256


class Watched(InProcessTransport):
    """Notes who is connected, and what is read."""

    def __init__(self, network: InProcessNetwork, name: str) -> None:
        super().__init__(network, name)
        self.connected: list[PeerId] = []
        self.registered: list[Memory] = []
        self.read_nbytes = 0

    def register(self, memories: Sequence[Memory]) -> None:
        super().register(memories)
        self.registered += memories

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        self.connected.append(peer)
        return peer

    def disconnect(self, peer: PeerId) -> None:
        if peer in self.connected:
            self.connected.remove(peer)
        super().disconnect(peer)

    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        self.read_nbytes += spans.total_bytes
        return super().read(peer, spans)


def stages() -> tuple[Watched, PagedTransport, PagedTransport, InProcessNetwork]:
    network = InProcessNetwork()
    reader = Watched(network, "reader")
    return (
        reader,
        PagedTransport.on(reader),
        PagedTransport.on(InProcessTransport(network, "lender")),
        network,
    )


def page_bytes(stage: PagedTransport) -> bytes:
    offset = stage.page.memory.base - stage.page.tensor.data_ptr()
    return stage.page.tensor.numpy()[offset : offset + stage.page.memory.nbytes].tobytes()


def test_one_block_is_pulled_and_nothing_else_written() -> None:
    reader, ours, theirs, _ = stages()
    theirs.page.tensor.fill_(7)
    rehearse(ours, theirs)
    seen = page_bytes(ours)
    assert seen[BLOCK_NBYTES : 2 * BLOCK_NBYTES] == bytes([7]) * BLOCK_NBYTES
    assert not any(seen[:BLOCK_NBYTES] + seen[2 * BLOCK_NBYTES :])
    assert reader.read_nbytes == BLOCK_NBYTES


def test_both_transports_stay_open_and_know_each_other_no_more() -> None:
    threads = threading.active_count()
    reader, ours, theirs, _ = stages()
    for _ in range(3):
        rehearse(ours, theirs)
        rehearse(theirs, ours)
    assert reader.connected == []
    assert threading.active_count() == threads
    peer = reader.connect(theirs.transport.address())  # still open
    assert reader.connected == [peer]


def test_a_read_that_never_ends_fails_the_rehearsal() -> None:
    reader, ours, theirs, network = stages()
    network.script = lambda read: Lost()
    with pytest.raises(RehearsalFailed, match="not pulled within"):
        rehearse(ours, theirs, limit_s=0.3)
    assert reader.connected == []


def test_a_corrupted_block_fails_the_rehearsal() -> None:
    """Its checksums are compared as those of a pull are."""

    class Corrupting(Watched):
        def read(self, peer: PeerId, spans: Spans) -> ReadId:
            posted = super().read(peer, spans)
            theirs.page.tensor.fill_(1)  # after it was summed, before it is copied
            return posted

    network = InProcessNetwork()
    reader = Corrupting(network, "reader")
    ours, theirs = (
        PagedTransport.on(reader),
        PagedTransport.on(InProcessTransport(network, "lender")),
    )
    with pytest.raises(RehearsalFailed, match="orrupted"):
        rehearse(ours, theirs)


def first_connection_s(rehearsed: bool) -> float:
    """Processor time of an agent's first connection to a real peer, the least of three agents."""
    taken = []
    for _ in range(3):
        with (
            NixlTransport("reader", huge_pages=False) as reader,
            NixlTransport("peer", huge_pages=False) as peer,
        ):
            ours, theirs = PagedTransport.on(reader), PagedTransport.on(peer)
            if rehearsed:
                with NixlTransport("partner", huge_pages=False) as partner:
                    rehearse(ours, PagedTransport.on(partner))
            address = theirs.transport.address()
            began = time.thread_time()
            reader.connect(address)
            taken.append(time.thread_time() - began)
    return min(taken)


def test_a_rehearsal_leaves_the_first_connection_a_third_of_its_work() -> None:
    """UCX picks protocols once for an agent; the control is an agent without a rehearsal."""
    assert first_connection_s(rehearsed=True) < first_connection_s(rehearsed=False) / 3
