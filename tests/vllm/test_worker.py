"""The worker's half without an engine: what it tells the engine of its transport."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.lifecycle.turns import Urgency
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import ClaimTicket, Command, FailedPull, ReadBlocks
from pdconn.puller.thread import PullResults
from pdconn.store.rank_commands import LoadRows
from pdconn.vllm.config import read_settings
from registration import RegisteredKVMemory
from tests.fakes.pair import Cache, Pair
from tests.fakes.stream_points import Point
from transport import BackendFailure, Device, Memory
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    from pdconn.vllm import worker as worker_module
    from pdconn.vllm.metadata import PdMetadata
    from pdconn.vllm.worker import PdWorker


class Mortal(InProcessTransport):
    """A transport that answers peers by a thread, which may be dead."""

    dead = False

    def check(self) -> None:
        """As ``Transport.check``."""
        if self.dead:
            raise BackendFailure("its thread ended")


def test_a_lender_that_cannot_be_read_from_stops_its_engine() -> None:
    worker: Any = PdWorker(read_settings({}, "127.0.0.1", 1, 0), None, None)  # type: ignore[arg-type]
    transport, cache = Mortal(InProcessNetwork(), "p"), Cache("BHLNC", filled=False)
    worker._memory = RegisteredKVMemory(transport, cache.references, [cache])
    worker._lends = True
    assert not worker.get_transfer_results().finished_recving
    transport.dead = True
    with pytest.raises(BackendFailure, match="its thread ended"):
        worker.get_transfer_results()
    worker._lends = False
    assert not worker.get_transfer_results().finished_recving, "one that only reads recomputes"


def test_what_came_of_claims_is_reported_while_the_engine_idles() -> None:
    """An engine that waits for nothing else sleeps until then, and its scheduler hears of it."""
    with Pair() as pair:
        worker: Any = PdWorker(read_settings({}, "127.0.0.1", 1, 0), None, None)
        worker._puller = pair.puller
        ticket = pair.lend("r")
        gone = replace(ticket, request_id="never lent")
        claims = [
            ClaimTicket(name, f"here/{name}", each, is_awaited=True)
            for name, each in (("granted", ticket), ("gone", gone))
        ]
        worker.bind_connector_metadata(PdMetadata(list(claims), is_idle=True))
        told: dict[str, str | None] = {}
        steps, give_up = 0, time.monotonic() + 30.0
        while len(told) < len(claims):
            assert time.monotonic() < give_up, told
            steps += 1
            results = worker.get_transfer_results()
            assert not results.finished_recving
            report = worker.build_connector_worker_meta()
            told |= {each.request: each.problem for each in report.claims} if report else {}
        assert told["granted"] is None
        assert "refused, unknown" in str(told["gone"])
        assert steps < 1000, "it spins"


@pytest.mark.parametrize(("reason", "counted"), [("cancelled", 0), ("p at h:1: gone", 1)])
def test_a_pull_that_the_engine_has_given_up_has_not_failed(reason: str, counted: int) -> None:
    """Its client has left; a router would take the pair for one that cannot pull."""
    worker: Any = PdWorker(read_settings({}, "127.0.0.1", 1, 0), None, None)
    failed = FailedPull("r", reason, quarantined=True)
    results = KVConnectorTransferResults()
    worker._note(PullResults.from_reports([failed]), results)
    assert results.finished_recving == results.failed_recving == {"r"}
    assert worker._report.quarantined == ["r"]
    assert worker._stats.reduce().get("failed", 0) == counted


class Posted:
    """A puller or a store that keeps what a worker posts."""

    def __init__(self) -> None:
        self.after: dict[str, Any] = {}

    def post(self, command: Command, after: Any = None) -> None:
        self.after[type(command).__name__] = after

    post_command = post  # a puller's name for it
    most_urgent = Urgency.PULL

    def set_waiting(self, pulls: Urgency | None, *, is_loading: bool) -> None:
        """A store is told that requests wait."""
        assert pulls is Urgency.PULL
        assert is_loading


class NoGpu(InProcessTransport):
    """A transport for GPU memory, on a machine without one."""

    def register(self, memories: Iterable[Memory]) -> None:
        """Registers nothing."""


@pytest.mark.parametrize("speculates", [True, False])
def test_an_engine_that_drafts_waits_for_its_drafter(
    speculates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, point = Device("cuda", 3), Point()
    monkeypatch.setattr(worker_module, "stream_point", {gpu: point}.get)
    config: Any = SimpleNamespace(speculative_config=SimpleNamespace() if speculates else None)
    worker: Any = PdWorker(read_settings({}, "127.0.0.1", 1, 0), config, None)
    cache = Cache("BHLNC", filled=False)
    tensors = tuple(replace(tensor, device=gpu) for tensor in cache.references.tensors)
    references = replace(cache.references, tensors=tensors)
    worker._memory = RegisteredKVMemory(NoGpu(InProcessNetwork(), "d"), references, [cache])
    worker._puller, worker._store = pulled, loaded = Posted(), Posted()
    need = Need.for_range(0, 12, (BlockList(0, (6, 7, 8)),))
    with Pair() as pair:
        claim = ClaimTicket("r", "here/1", pair.lend("lent"))
    worker.bind_connector_metadata(
        PdMetadata([claim, ReadBlocks("r", need)], store=[LoadRows(1, "s", need)])
    )
    expected = point if speculates else None
    assert pulled.after == {"ClaimTicket": None, "ReadBlocks": expected}
    assert loaded.after == {"LoadRows": expected}
