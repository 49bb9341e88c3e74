"""A page's reads: where they read and write, and that one which fails or hangs harms no request."""

from __future__ import annotations

import logging

import pytest

from pdconn.puller.warmup import MAX_REGIONS, page_spans
from registration.references import (
    AttentionChunk,
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    LayerMemory,
    build_kv_cache_references,
)
from registration.scratch import PAGE_NBYTES, Scratch
from tests.puller.warmup.warm_pair import SECONDS, WarmPair, until_warm
from tests.threads.inside import num_peers, num_warm
from transport import HOST, BackendFailure, Device, Memory, PeerLost, TransportError
from transport.testing.inprocess.faults import Failing, Held, ReadRequest
from transport.testing.inprocess.transport import InProcessNetwork


def test_one_page_is_read_and_no_byte_of_our_kv_changed() -> None:
    seen: list[int] = []

    def note(request: ReadRequest) -> None:
        seen.append(request.spans.total_bytes)

    with WarmPair(warms=True, network=InProcessNetwork(script=note)) as pair:
        until_warm(pair)
        assert seen == [min(PAGE_NBYTES, pair.theirs.bytes.size)]
        assert not pair.ours.bytes.any()
        assert pair.scratch.tensor.any(), "it went nowhere"


def test_peers_never_learn_of_the_page() -> None:
    with WarmPair() as pair:
        address = pair.their_transport.address()
        scratch = Scratch.on(HOST)
        pair.their_transport.register([scratch.memory])
        assert pair.their_transport.address() != address  # so one that was taken before lacks it


def test_every_region_is_read_and_nothing_written_beside_the_page() -> None:
    scratch = Memory(1 << 20, PAGE_NBYTES)
    for num in (1, 3, MAX_REGIONS, 2 * MAX_REGIONS):
        memories = [Memory((1 << 30) + i * 100_000, 64_000) for i in range(num)]
        spans = page_spans(scratch, one_layer_each(memories))
        assert spans.remote.tolist() == [memory.base for memory in memories][:MAX_REGIONS]
        assert spans.local[0] == scratch.base
        assert (spans.local[1:] >= spans.local[:-1] + spans.nbytes[:-1]).all()
        assert int(spans.local[-1] + spans.nbytes[-1]) <= scratch.end


def test_no_more_is_read_than_a_region_has_and_from_one_device() -> None:
    scratch, gpu = Memory(1 << 20, PAGE_NBYTES), Device("cuda", 1)
    memories = [Memory(1 << 30, 640, gpu), Memory(1 << 31, 64_000), Memory(1 << 32, 6400, gpu)]
    spans = page_spans(scratch, one_layer_each(memories))
    assert spans.nbytes.tolist() == [640, PAGE_NBYTES // 2]
    assert (spans.local_device, spans.remote_device) == (HOST, gpu)


def test_a_read_that_fails_fails_no_request_and_is_tried_again() -> None:
    network = InProcessNetwork(script=lambda request: Failing(PeerLost("cut")))
    with WarmPair(warms=True, network=network) as pair:
        pair.wait(lambda: pair.lender.counts["greeted"] > 2, SECONDS)
        assert num_warm(pair.puller) == 0
        network.script = None
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        until_warm(pair)


def test_a_peer_that_no_page_can_be_read_from_is_left() -> None:
    """Or one that names a new boot at every greeting would fill the table of peers."""
    network = InProcessNetwork(script=lambda request: Failing(BackendFailure("no")))
    with WarmPair(warms=True, network=network) as pair:
        pair.wait(lambda: pair.lender.counts["greeted"] > 2, SECONDS)
        pair.wait(lambda: num_peers(pair.puller) == 0, SECONDS)


@pytest.mark.parametrize("error", [PeerLost("cut"), BackendFailure("no")], ids=repr)
def test_a_request_that_holds_a_lease_survives_a_failed_page(error: TransportError) -> None:
    tries: list[ReadRequest] = []

    def fail(request: ReadRequest) -> Failing | None:
        if not is_of_page(request):
            return None
        tries.append(request)
        return Failing(error)

    network = InProcessNetwork(script=fail)
    with WarmPair(warms=True, network=network, ttl_s=60.0, claim_timeout_s=20.0) as pair:
        pair.claim("d", pair.lend("r"))
        pair.wait(lambda: pair.lender.counts["claims"], SECONDS)
        before = len(tries)
        pair.wait(lambda: len(tries) > before + 1, SECONDS)
        pair.start_read("d")
        assert pair.outcome_of("d") is None


def test_a_read_that_hangs_is_one_and_holds_no_pull_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="pdconn")
    network = InProcessNetwork(script=lambda request: Held() if is_of_page(request) else None)
    with WarmPair(warms=True, network=network, drain_s=0.1) as pair:
        pair.wait(network.in_flight, SECONDS)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        pair.lender.close()  # its connection ends, and its read does not
        pair.lender = pair.open_lender(pair.lender.port)
        pair.wait(lambda: caplog.text.count("an earlier read of its page is not over") > 2, SECONDS)
        assert pair.lender.counts["greeted"] == 1
        assert len(network.in_flight()) == 1
        assert num_warm(pair.puller) == 0
        network.script = None
        network.release_held()
        until_warm(pair)


def is_of_page(request: ReadRequest) -> bool:
    return request.spans.total_bytes > 1000


def one_layer_each(memories: list[Memory]) -> KVCacheReferences:
    chunk = AttentionChunk(1, 64, 64, 8, 8)
    layers = [
        LayerMemory(str(number), memory, 0, 64, memory.nbytes // 64, (chunk,))
        for number, memory in enumerate(memories)
    ]
    return build_kv_cache_references([GroupMemory(AttentionKind.FULL, None, 8, layers)])
