"""One wrapper stands in front of a pool's reset, and every part sees each reset once."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

pytest.importorskip("vllm")

from pdconn.tools.lab.ports import free_ports
from pdconn.vllm.config import ConfigError
from tests.vllm.patches.vllm_scheduler import (
    Engine,
    engine_config,
    store_in,
    transfer_config,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.core.block_pool import BlockPool

    from pdconn.vllm.identity.changes import WeightChanges
    from pdconn.vllm.lends.lending import Lending
    from pdconn.vllm.patches.cache_resets import watch_resets
    from pdconn.vllm.store.storing import Storing


class Pool:
    """vLLM's block pool, as far as resets go."""

    is_free = True

    def __init__(self) -> None:
        self.seen: list[object] = []

    def reset_prefix_cache(self) -> bool:
        self.seen.append("reset")
        return self.is_free


def test_the_newest_comes_first_before_a_reset_and_last_after_it() -> None:
    pool: Any = Pool()
    for name in ("first", "second"):
        watch_resets(
            pool,
            before=lambda name=name: pool.seen.append(name),  # type: ignore[misc]
            after=lambda is_reset, name=name: pool.seen.append((name, is_reset)),  # type: ignore[misc]
        )
    assert pool.reset_prefix_cache()
    assert pool.seen == ["second", "first", "reset", ("first", True), ("second", True)]
    pool.is_free = False
    assert not pool.reset_prefix_cache()
    assert pool.seen[-2:] == [("first", False), ("second", False)]


def test_a_pool_that_is_reset_in_another_way_is_refused() -> None:
    class Other:
        def reset_prefix_cache(self, groups: list[int]) -> bool:
            return bool(groups)

    with pytest.raises(ConfigError, match="expected no arguments, got groups"):
        watch_resets(Other(), before=list)


def test_an_engine_that_lends_pulls_and_stores_replaces_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its parts each put a wrapper of their own around that of the part before."""
    seen: list[str] = []
    monkeypatch.setattr(Lending, "take_back", lambda _: seen.append("leases"))
    monkeypatch.setattr(Storing, "drop_rows", lambda _: seen.append("store"))
    monkeypatch.setattr(WeightChanges, "_was_reset", lambda _, is_reset: seen.append("weights"))
    [port] = free_ports(1)
    extra = {"side_channel_host": "127.0.0.1", "side_channel_port": port}
    stored = store_in(tmp_path / "store")
    engine = Engine(engine_config(transfer_config("kv_both", store=stored, **extra)))
    try:
        pool = engine.scheduler.kv_cache_manager.block_pool
        assert pool.reset_prefix_cache._resetting == MethodType(BlockPool.reset_prefix_cache, pool)
        assert engine.scheduler.reset_prefix_cache()
        assert seen == ["store", "leases", "weights"]
    finally:
        engine.close()
