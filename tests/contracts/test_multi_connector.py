"""Beside another connector under vLLM's MultiConnector, in both orders.

The other one is a cache as LMCache's is: without a handshake, with a hit of its own, keeping
the blocks of a finished request until they are stored, and adding a key to the answer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
        MultiKVConnectorMetadata,
    )

    from pdconn.vllm.connector import PdconnConnector

from pdconn.protocol.ticket import parse_ticket
from pdconn.puller.commands import CancelPull, ClaimTicket, ReadBlocks
from pdconn.tools.lab.ports import free_ports
from pdconn.vllm.config import ConfigError
from pdconn.vllm.plugin import register
from tests.contracts.engines import (
    LENT,
    PULLED,
    Engine,
    cache_config,
    claim,
    end_prefill,
    engine_config,
    handshake,
)
from tests.fakes.simulated.block_pool import CountedPool
from tests.vllm.lends.scheduler import untried

PROMPT = list(range(100, 141))
STATS = {"num_lmcache_cached_tokens": 0}


class CacheConnector(KVConnectorBase_V1, SupportsHMA):
    """A cache in a process of its own, of which only the answers are there."""

    hit: int | None = 0
    stores = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return (None, True) if self.hit is None else (self.hit, self.hit > 0)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.loaded = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return self.stores, {"cached_token_stats": STATS}

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished(request, block_ids[0])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


@dataclass
class TheirHandshake(KVConnectorHandshakeMetadata):
    """Of a connector that hands over by itself."""


ORDERS = ["ours first", "ours last"]


def children(order: str, role: str, **extra: Any) -> list[dict[str, Any]]:
    ours = {
        "kv_connector": "PdconnConnector",
        "kv_connector_module_path": "pdconn.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    theirs = {
        "kv_connector": "CacheConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
    }
    return [ours, theirs] if order == "ours first" else [theirs, ours]


def multi(order: str, role: str, **extra: Any) -> Any:
    """vLLM's MultiConnector in its scheduler's role."""
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": children(order, role, **extra)},
    )
    made = MultiConnector(engine_config(transfer), KVConnectorRole.SCHEDULER, cache_config())
    made.bind_gpu_block_pool(CountedPool())
    for each in made.sub_connectors:
        if isinstance(each, PdconnConnector):
            untried(each)
    return made


def ours(connector: Any) -> Any:
    [found] = [one for one in connector.sub_connectors if isinstance(one, PdconnConnector)]
    return found


def cache(connector: Any) -> Any:
    [found] = [one for one in connector.sub_connectors if isinstance(one, CacheConnector)]
    return found


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def both(order: str) -> Iterator[tuple[Any, Any]]:
    """Prefill and decode, each with the other connector beside ours."""
    [port] = free_ports(1)
    prefill = multi(order, "kv_producer", side_channel_host="127.0.0.1", side_channel_port=port)
    decode = multi(order, "kv_consumer")
    for one in (prefill, decode):
        one.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake()})
    yield prefill, decode
    decode.shutdown()
    prefill.shutdown()


def request(params: Any, name: str = "cmpl-1") -> Any:
    return Engine.new(None, PROMPT, {"kv_transfer_params": params}, name)  # type: ignore[arg-type]


def lent(prefill: Any) -> Any:
    asked = request({"do_remote_decode": True, "cached_token_stats": True}, "cmpl-p")
    prefill.on_new_request(asked)
    end_prefill(asked)
    return prefill.request_finished_all_groups(asked, LENT)


def decoded(decode: Any, params: Any) -> tuple[Any, list[Any]]:
    """What vLLM is told of a request with a ticket, and what our workers are."""
    asked = request(params)
    decode.on_new_request(asked)
    matched, _ = decode.get_num_new_matched_tokens(asked, 0)
    if matched is None:
        return None, []
    blocks = SimpleNamespace(get_block_ids=lambda: PULLED, blocks=())
    decode.update_state_after_alloc(asked, blocks, matched)
    meta = decode.build_connector_meta(
        SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"other": 1})
    )
    assert isinstance(meta, MultiKVConnectorMetadata)
    index = decode.sub_connectors.index(ours(decode))
    return matched, meta.metadata[index].commands  # type: ignore[attr-defined]


def test_the_hybrid_allocator_stays_on_when_the_other_supports_it(order: str) -> None:
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children(order, "kv_both")},
    )
    assert MultiConnector.all_children_support_hma(transfer)


def test_it_is_off_when_the_other_does_not(order: str) -> None:
    """Control: the same with a connector of vLLM's own that does not."""
    without = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    others = [
        one if one["kv_connector"] == "PdconnConnector" else without
        for one in children(order, "kv_both")
    ]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": others},
    )
    assert not MultiConnector.all_children_support_hma(transfer)


def test_the_ticket_is_lent_beside_the_others_keys_and_the_other_keeps_the_request(
    both: tuple[Any, Any],
) -> None:
    kept, params = lent(both[0])
    assert kept, "vLLM holds the blocks until the cache has stored them"
    assert params["cached_token_stats"] == STATS
    claim(parse_ticket(params))


def test_a_ticket_with_the_others_keys_is_pulled_if_the_other_has_no_hit(
    both: tuple[Any, Any],
) -> None:
    _, params = lent(both[0])
    matched, commands = decoded(both[1], params)
    assert matched == len(PROMPT) - 1
    assert [type(one) for one in commands] == [ClaimTicket, ReadBlocks]
    assert cache(both[1]).loaded == 0


def test_the_first_with_a_hit_loads_and_ours_gives_a_claim_back_that_is_not_used(
    both: tuple[Any, Any], order: str
) -> None:
    _, params = lent(both[0])
    cache(both[1]).hit = 16
    matched, commands = decoded(both[1], params)
    if order == "ours first":
        assert matched == len(PROMPT) - 1
        assert [type(one) for one in commands] == [ClaimTicket, ReadBlocks]
        assert cache(both[1]).loaded == 0
    else:
        assert matched == 16, "and the rest of the prompt is computed, whatever the ticket covers"
        assert [type(one) for one in commands] == [ClaimTicket, CancelPull]
        assert cache(both[1]).loaded == 16


def test_a_request_waits_until_the_other_has_made_up_its_mind(both: tuple[Any, Any]) -> None:
    _, params = lent(both[0])
    cache(both[1]).hit = None
    assert decoded(both[1], params) == (None, [])


def test_our_counts_reach_vllms_metrics_by_the_name_of_the_class(both: tuple[Any, Any]) -> None:
    """The front end builds stats anew from dicts, by a name that must be in vLLM's registry."""
    register()
    name = type(ours(both[0])).__name__
    made = MultiConnector.build_kv_connector_stats({name: {"counts": {"leases": 1}}})
    assert made is not None
    assert made.data[name].data["counts"] == {"leases": 1}


def test_a_name_that_is_not_in_the_registry_ends_the_front_end() -> None:
    """Control."""
    with pytest.raises(ValueError, match="'Nobody' is not registered"):
        MultiConnector.build_kv_connector_stats({"Nobody": {}})


def test_another_handshake_in_front_of_ours_is_refused_by_name(order: str) -> None:
    """vLLM hands the schedulers the first child's only, and then ours has no memory to serve."""
    [port] = free_ports(1)
    prefill = multi(order, "kv_producer", side_channel_host="127.0.0.1", side_channel_port=port)
    try:
        with pytest.raises(ConfigError, match="TheirHandshake"):
            prefill.set_xfer_handshake_metadata_pp_aware({(0, 0): TheirHandshake()})
    finally:
        prefill.shutdown()


def test_the_other_handshakes_are_not_asked_for_once_ours_is_there() -> None:
    """Which is why two connectors that hand over cannot live together."""
    asked: list[str] = []

    def child(name: str, meta: object) -> Any:
        return SimpleNamespace(get_handshake_metadata=lambda: asked.append(name) or meta)

    made: Any = MultiConnector.__new__(MultiConnector)
    first = handshake()
    made._connectors = [child("cache", None), child("ours", first), child("other", object())]
    assert made.get_handshake_metadata() is first
    assert asked == ["cache", "ours"]
