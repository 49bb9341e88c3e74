"""What the store counts is exported, and gauges are as they were last."""

from __future__ import annotations

import ast
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdconn.vllm.store.store_metrics import STORE_COUNTERS, STORE_GAUGES

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pdconn.vllm.stats import PdPromMetrics, PdStats

ROOT = Path(__file__).parents[3]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> PdPromMetrics:
    types: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    return PdPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})


def value(registry: CollectorRegistry, name: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "m", "engine": "0"})


def counted(source: str) -> set[str]:
    """Names that code counts: ``counts["store_x"] += …`` and ``reports.add_counts(x=…)``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            if isinstance(node.slice.value, str) and node.slice.value.startswith("store_"):
                found.add(node.slice.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
            "add_counts",
            "_count",
        ):
            words = [word.arg for word in node.keywords if word.arg]
            found |= {f"store_{word.removeprefix('store_')}" for word in words}
    return found


def test_a_gauge_by_tenant_has_the_tenant_as_a_label(
    metrics: PdPromMetrics, registry: CollectorRegistry
) -> None:
    for nbytes in (5, 7):
        gauges = {"store_tenant_bytes/0a0b": nbytes, "store_tenant_bytes/others": 1, "x/y": 3}
        counts = {"store_tenant_hits/0a0b": nbytes, "store_tenant_hits/others": 1, "x/y": 3}
        metrics.observe({"gauges": gauges, "counts": counts})
    labels = {"model_name": "m", "engine": "0"}
    for tenant, gauge, count in (("0a0b", 7, 12), ("others", 1, 2)):
        mine = {**labels, "tenant": tenant}
        assert registry.get_sample_value("pdconn:store_tenant_bytes", mine) == gauge
        assert registry.get_sample_value("pdconn:store_tenant_hits_total", mine) == count


def test_whatever_is_counted_has_a_metric() -> None:
    folders = [ROOT / "pdconn/store/engine", ROOT / "pdconn/store/rank"]
    sources = [
        path.read_text(encoding="utf-8") for folder in folders for path in folder.glob("*.py")
    ]
    names = set().union(*map(counted, sources))
    assert len(names) > 18
    assert sorted(names - STORE_COUNTERS.keys() - STORE_GAUGES.keys()) == []


def test_a_count_without_a_metric_is_noticed() -> None:
    """Negative control."""
    source = 'self.counts["store_wonders"] += 1\nself._reports.add_counts(rows_bent=2)\n'
    source += "self._count(store_moons=3)\n"
    unknown = counted(source) - STORE_COUNTERS.keys()
    assert unknown == {"store_wonders", "store_rows_bent", "store_moons"}


def test_counts_add_up_and_gauges_are_the_last_ones(
    metrics: PdPromMetrics, registry: CollectorRegistry
) -> None:
    for hits, used in ((2, 700), (3, 500)):
        stats = PdStats({"counts": {"store_hits": hits}, "gauges": {"store_committed_bytes": used}})
        metrics.observe(stats.data)
    assert value(registry, "pdconn:store_hits_total") == 5
    assert value(registry, "pdconn:store_committed_bytes") == 500


def test_every_metric_of_the_store_is_fed(
    metrics: PdPromMetrics, registry: CollectorRegistry
) -> None:
    counts = dict.fromkeys(STORE_COUNTERS, 7)
    metrics.observe({"counts": counts, "gauges": dict.fromkeys(STORE_GAUGES, 9)})
    assert {value(registry, f"{name}_total") for name, _ in STORE_COUNTERS.values()} == {7}
    assert {value(registry, name) for name, _ in STORE_GAUGES.values()} == {9}


def test_names_without_a_metric_harm_nothing(metrics: PdPromMetrics) -> None:
    metrics.observe({"counts": {"store_wonders": 1}, "gauges": {"store_moons": 2}})
    metrics.observe({"counts": {"pulls": 1}})


def test_workers_are_added_and_the_last_gauges_win() -> None:
    ours = PdStats({"counts": {"store_rows_read": 4}, "gauges": {"store_committed_bytes": 1}})
    ours.aggregate(PdStats({"counts": {"store_rows_read": 5}}))
    ours.aggregate(PdStats({"gauges": {"store_committed_bytes": 2}}))
    assert ours.data["counts"] == {"store_rows_read": 9}
    assert ours.data["gauges"] == {"store_committed_bytes": 2}
    assert not ours.is_empty()
    ours.reset()
    assert ours.is_empty()


def test_the_log_line_tells_of_the_store_where_there_is_one() -> None:
    assert "store hits" not in PdStats({"counts": {"pulls": 1}}).reduce()
    line = PdStats({"counts": {"store_hits": 2, "store_hit_tokens": 512}}).reduce()
    assert (line["store hits"], line["store hit tokens"]) == (2, 512)
