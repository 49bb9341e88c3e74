"""The table of metrics is what ``GET /metrics`` shows."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdconn.router.exposition import RouterMetric
from pdconn.router.metric_table import METRICS
from tests.fakes.event_loop import in_loop
from tests.fakes.routed import fleet, other_prompt


@in_loop
async def test_every_metric_of_the_page_is_in_the_table_and_the_other_way_round():
    async with fleet(num_prefill=1) as f:
        for pod in f.pods.values():  # only then is their lag known
            await pod.store(other_prompt(1))
        await f.events_applied()
        await f.ask()
        page = (await f.send("/metrics", method="GET")).body.decode()
    assert "_created" not in page
    shown = {}
    for family in text_string_to_metric_families(page):
        samples = family.samples
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for one in samples for label in one.labels} - {"le"}
        if samples:
            shown[name] = (family.type, labels, family.documentation)
    process = {name for name in shown if name.startswith("process_")}
    assert {
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_open_fds",
    } <= process
    for name in process:  # as every exporter names them; all else is the router's own
        del shown[name]
    assert shown == {row.name: (row.kind, set(row.labels), row.help) for row in METRICS}


OF_THE_FLEET = {"route", "engine", "role", "pod", "policy", "version", "python"}


@pytest.mark.parametrize("row", METRICS, ids=lambda row: row.name)
def test_every_label_that_is_not_of_the_fleet_has_a_table_of_values(row: RouterMetric) -> None:
    assert set(row.labels) - OF_THE_FLEET == row.values.keys()
    for values in row.values.values():
        assert len({one.meaning for one in values}) == len(values) > 1
        assert all(one.meaning.endswith((".", "503.")) for one in values)


@pytest.mark.parametrize("row", METRICS, ids=lambda row: row.name)
def test_names_follow_prometheus(row: RouterMetric) -> None:
    assert row.name.startswith("pdconn_router_")
    assert row.name.endswith("_total") == (row.kind == "counter")
    assert bool(row.buckets) == (row.kind == "histogram")
    assert row.help
    assert row.help[0].isupper() or row.help[0] == "1"
