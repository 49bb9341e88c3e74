"""A block that a step in flight may still write is never one that we fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from pdconn.tools.lab.ports import free_ports
from pdconn.vllm.config import ConfigError
from tests.vllm.patches.vllm_scheduler import (
    BLOCK_TOKENS,
    Engine,
    KVTransferConfig,
    Scheduler,
    deferred_frees,
    engine_config,
    store_in,
    transfer_config,
)

PROMPT = 6 * BLOCK_TOKENS
"""Six of eight blocks: a second such prompt does not fit beside it."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []
    [port] = free_ports(1)

    def start(role: str, *, store: bool = True, multi: str = "", **how: Any) -> Engine:
        extra: dict[str, Any] = {"side_channel_host": "127.0.0.1", "side_channel_port": port}
        if store:
            extra["store"] = store_in(tmp_path / "store")
        transfer = transfer_config(role, **extra)
        if multi:
            child = {
                "kv_connector": "PdconnConnector",
                "kv_connector_module_path": "pdconn.vllm",
                "kv_role": role,
                "kv_connector_extra_config": extra,
            }
            transfer = KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role=multi,
                kv_connector_extra_config={"connectors": [child]},
            )
        engines.append(Engine(engine_config(transfer, **how)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def shared_in_flight(engine: Engine) -> set[int]:
    """Blocks of a prompt aborted in flight that a load got before the step was processed.

    The step is then processed, and the load gets its blocks at last.
    """
    aborted = engine.add(PROMPT)
    engine.schedule()
    written = engine.blocks(aborted)
    assert len(written) == PROMPT // BLOCK_TOKENS
    engine.abort(aborted)
    loaded = engine.add(PROMPT + 1, loads=PROMPT)
    engine.schedule()
    shared = written & engine.blocks(loaded)
    while engine.in_flight:
        engine.process()
    engine.schedule()
    assert len(engine.blocks(loaded)) == PROMPT // BLOCK_TOKENS
    return shared


@pytest.mark.parametrize("how", [{}, {"is_async": False, "pp": 2}], ids=["async", "pipeline"])
@pytest.mark.parametrize("role", ["kv_producer", "kv_both", "kv_consumer"])
def test_a_store_load_gets_no_block_of_a_step_in_flight(
    started: Callable[..., Engine], role: str, how: dict[str, Any]
) -> None:
    assert not shared_in_flight(started(role, **how))


def test_a_pull_gets_no_block_of_a_step_in_flight(started: Callable[..., Engine]) -> None:
    assert not shared_in_flight(started("kv_consumer", store=False))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_the_role_of_a_multi_connector_changes_nothing(
    started: Callable[..., Engine], role: str
) -> None:
    """vLLM looks at the outer role, which need not be that of the connector that fills blocks."""
    assert not shared_in_flight(started(role, multi="kv_producer"))


def test_a_preempted_requests_blocks_wait_for_its_step(started: Callable[..., Engine]) -> None:
    engine = started("kv_producer")
    preempted = engine.add(PROMPT)
    engine.schedule()
    written = engine.blocks(preempted)
    request = engine.scheduler.running.pop()
    engine.scheduler._preempt_request(request, 0.0)
    loaded = engine.add(PROMPT + 1, loads=PROMPT)
    engine.schedule()
    assert not written & engine.blocks(loaded)
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 2


def test_an_engine_that_fills_no_block_frees_at_once(started: Callable[..., Engine]) -> None:
    """The control: this is what happens to the blocks without the deferral."""
    engine = started("kv_producer", store=False)
    aborted = engine.add(PROMPT)
    engine.schedule()
    written = engine.blocks(aborted)
    engine.abort(aborted)
    other = engine.add(PROMPT)
    engine.schedule()
    assert written & engine.blocks(other)


def test_a_connector_that_no_scheduler_binds_is_refused(started: Callable[..., Engine]) -> None:
    engine = started("kv_producer")
    with pytest.raises(ConfigError, match="defer_block_free, got none that binds us"):
        engine.connector.bind_kv_cache_manager(engine.scheduler.kv_cache_manager)


def test_a_scheduler_that_frees_in_another_way_is_refused(
    started: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert deferred_frees.missing(Scheduler) is None

    def free_at_once(self: Any, request: Any) -> None:
        self.kv_cache_manager.free(request)

    monkeypatch.setattr(Scheduler, "_free_request_blocks", free_at_once)
    with pytest.raises(ConfigError, match="free_request_blocks does not use"):
        started("kv_producer")


def test_a_scheduler_that_sets_the_fence_later_is_refused(
    started: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_frees, "_FENCE", "defer_frees")
    with pytest.raises(ConfigError, match="has not set it when it binds connectors"):
        started("kv_producer")
