"""One rank of several fails: the whole request fails, and others are unharmed.

vLLM joins what the workers of a step report; its own aggregator is asked here what comes of
two ranks of ours, one of which could not read.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller
from tests.fakes.pair import TRAITS, Cache, Pair
from transport import PeerLost
from transport.testing.inprocess.faults import Failing
from transport.testing.inprocess.transport import InProcessTransport

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput


@pytest.fixture
def ranks() -> Iterator[tuple[Pair, list[Puller], list[str]]]:
    """A lender, two ranks of one engine, and the names of their transports."""
    with Pair() as pair:
        pair.puller.close()
        pullers, names, caches = [], [], []
        for number in range(2):
            cache = Cache("BHLNC", filled=False)
            caches.append(cache)  # its memory must outlive the reads
            transport = InProcessTransport(pair.network, f"rank{number}")
            transport.register(cache.references.memories())
            pullers.append(Puller(Rank("d", number, 2, 0, cache.references, TRAITS), transport))
            names.append(transport.peer_id)
        try:
            yield pair, pullers, names
        finally:
            for puller in pullers:
                puller.close()


def joined(pullers: list[Puller], aggregator: Any, requests: set[str]) -> dict[str, bool]:
    """What is reported to vLLM's scheduler of each request: whether it failed."""
    reported: dict[str, bool] = {}
    give_up = time.monotonic() + 10
    while set(reported) != requests:
        assert time.monotonic() < give_up, reported
        outputs = []
        for puller in pullers:
            outcome = puller.take_results()
            failed = {one.request for one in outcome.failed}
            report = KVConnectorOutput(
                finished_recving={*outcome.received, *failed}, failed_recving=failed
            )
            outputs.append(SimpleNamespace(kv_connector_output=report))
        report = aggregator.aggregate(outputs, 0).kv_connector_output
        for request in report.finished_recving or ():
            assert request not in reported
            reported[request] = request in report.failed_recving
        time.sleep(0.005)
    return reported


def test_one_rank_that_fails_fails_its_request_and_no_other(
    ranks: tuple[Pair, list[Puller], list[str]],
) -> None:
    pair, pullers, names = ranks
    aggregator, reported = KVOutputAggregator(2), {}
    cut = iter([Failing(PeerLost("cut"))])
    pair.network.script = lambda read: next(cut, None) if read.reader == names[1] else None
    for request, ids in (("bad", (7, 8, 9)), ("good", (1, 2, 3))):
        ticket = pair.lend(f"lent-{request}")
        for puller in pullers:
            puller.post_command(ClaimTicket(request, f"{request}/pull", ticket))
            puller.post_command(ReadBlocks(request, Need.for_range(0, 12, (BlockList(0, ids),))))
        reported |= joined(pullers, aggregator, {request})
    assert reported == {"bad": True, "good": False}
    pair.wait(lambda: pair.lender.counts["freed_read"] == 2)
