"""Alerts and scaling ask for metrics that exist, and alerts fire when they should.

What vLLM exports of its own is checked in ``test_manifests_vllm``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project.deploy.expressions import (
    ROOT,
    SCRAPED,
    documented,
    groups,
    rules,
    scalers,
    unexported,
)
from tests.project.deploy.manifests import Cluster
from tests.project.deploy.promql import fires, samples
from tests.project.docker.dashboard import dashboard, expressions, scraping

PROMTOOL = shutil.which("promtool")
OURS = re.compile(r"pdconn|vllm:nixl_")


def ours(queries: dict[str, str]) -> list[str]:
    """What is wrong with queries, as far as the documentation can tell."""
    return [one for one in unexported(queries, documented()) if OURS.search(one.split(": ", 1)[1])]


def test_every_metric_of_alerts_scaling_and_dashboard_is_documented() -> None:
    panels = {f"panel {n}": one for n, one in enumerate(expressions(dashboard()))}
    assert ours(rules()) == []
    assert ours(scalers()) == []
    assert ours(panels) == []
    assert unexported(rules(), documented()) == []  # alerts need nothing of vLLM's own
    assert min(len(rules()), len(panels)) > 10
    assert len(scalers()) == 6


@pytest.mark.parametrize(
    "expression",
    [
        "sum(rate(pdconn:pulls[5m]))",
        "sum by (rank) (rate(pdconn:pulls_total[5m]))",
        'rate(pdconn_router_direct_requests_total{cause="no_prefill"}[5m])',
        "histogram_quantile(0.5, sum by (le) (rate(pdconn_router_time_to_ticket_seconds[5m])))",
        "vllm:nixl_bytes_transferred",
        "absent(pdconn_router_inflight)",
    ],
)
def test_an_expression_with_a_fault_is_noticed(expression: str) -> None:
    """Negative control."""
    assert ours({"a": expression}) != []


@pytest.mark.parametrize("expression", ["rate(pdconn:pulls_total)", "sum by (a", "a > > b"])
def test_what_is_not_promql_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        unexported({"a": expression}, documented())


def test_values_of_labels_that_alerts_match_are_values_of_the_code() -> None:
    from pdconn.router.fleet.member import Role
    from pdconn.router.labels import RequestEnd
    from pdconn.router.openai.requests import Direct

    known = {
        "role": {one.value for one in Role},
        "reason": {one.value for one in Direct},
        "outcome": {one.value for one in RequestEnd},
    }
    matched = [
        (label, value)
        for expression in rules().values()
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', expression)
        for value in values.split("|")
    ]
    assert len(matched) >= 8
    assert [(label, value) for label, value in matched if value not in known[label]] == []


def test_the_alert_of_failing_requests_counts_the_outcomes_that_are_the_services_fault() -> None:
    from pdconn.router.labels import Fault, RequestEnd

    counted, left_out = re.findall(r'outcome[=!]~"([^"]*)"', rules()["PdconnRequestsFail"])
    by_fault = {fault: {one.value for one in RequestEnd if one.fault is fault} for fault in Fault}
    assert set(counted.split("|")) == by_fault[Fault.SERVICE]
    assert set(left_out.split("|")) == by_fault[Fault.CLIENT]


def test_monitors_put_the_labels_on_series_that_queries_ask_by(default: Cluster) -> None:
    (engines,) = [m for m in default.of("PodMonitor") if "engines" in m["metadata"]["name"]]
    (endpoint,) = engines["spec"]["podMetricsEndpoints"]
    (relabeling,) = endpoint["relabelings"]
    assert relabeling["targetLabel"] == "role"
    assert "role" in SCRAPED
    assert relabeling["sourceLabels"] == [
        "__meta_kubernetes_pod_label_app_kubernetes_io_component"
    ]  # prefill and decode, as the manifests name components


def test_compose_has_the_alerts_of_the_cluster() -> None:
    assert yaml.safe_load((ROOT / "docker/alerts.yml").read_text(encoding="utf-8")) == {
        "groups": groups()
    }
    assert scraping()["rule_files"] == ["alerts.yml"]


def test_every_alert_is_explained() -> None:
    text = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    assert [name for name in rules() if f"| `{name}` |" not in text] == []
    assert set(re.findall(r"^\| `(Pdconn\w+)` \|", text, re.M)) <= rules().keys()


# Which alerts fire.  A series is a name and its values, a minute each: "0+10x30" grows by 10.

#: A fleet at work: two engines of each role, everything handed over, nothing failing.
WELL = {
    'pdconn_router_engine_up{job="r", instance="r1", role="prefill", engine="p1"}': "1x60",
    'pdconn_router_engine_up{job="r", instance="r1", role="prefill", engine="p2"}': "1x60",
    'pdconn_router_engine_up{job="r", instance="r1", role="decode", engine="d1"}': "1x60",
    'pdconn_router_inflight_requests{job="r", instance="r1"}': "3x60",
    'pdconn_router_requests_total{job="r", instance="r1", outcome="ok"}': "0+100x60",
    'pdconn_router_requests_total{job="r", instance="r1", outcome="engine_error"}': "0x60",
    'pdconn_router_requests_total{job="r", instance="r1", outcome="client_error"}': "0x60",
    'pdconn_router_requests_total{job="r", instance="r1", outcome="timed_out"}': "0x60",
    'pdconn_router_requests_total{job="r", instance="r1", outcome="busy"}': "0x60",
    'pdconn_router_direct_requests_total{job="r", instance="r1", reason="no_prefill"}': "0x60",
    'pdconn_router_direct_requests_total{job="r", instance="r1", reason="no_ticket"}': "0x60",
    'pdconn_router_direct_requests_total{job="r", instance="r1", reason="prefix_held"}': "0+50x60",
    'pdconn:leases_granted_total{job="e", instance="p1", namespace="n"}': "0+100x60",
    'vllm:nixl_num_kv_expired_reqs_total{job="e", instance="p1", namespace="n"}': "0x60",
    'pdconn:pulls_total{job="e", instance="d1", namespace="n"}': "0+100x60",
    'vllm:nixl_num_failed_transfers_total{job="e", instance="d1", namespace="n"}': "0x60",
    'pdconn:pulls_corrupted_total{job="e", instance="d1", namespace="n"}': "0x60",
    'pdconn:pulls_unauthenticated_total{job="e", instance="d1", namespace="n"}': "0x60",
    'pdconn:pulls_quarantined_total{job="e", instance="d1", namespace="n"}': "0x60",
    'pdconn:store_rows_damaged_total{job="e", instance="d1", namespace="n"}': "0x60",
}

#: What changes, by a part of a series' name, and the alerts that then fire.
FAULTS: dict[str, tuple[dict[str, str | None], set[str]]] = {
    "nothing": ({}, set()),
    "one prefill engine is down": ({'engine="p1"': "0x60"}, {"PdconnEngineDown"}),
    "prefill is down": (
        {'role="prefill"': "0x60", 'reason="no_prefill"': "0+80x60"},
        {"PdconnEngineDown", "PdconnNoPrefill", "PdconnNotHandedOver"},
    ),
    "decode is down": ({'role="decode"': "0x60"}, {"PdconnEngineDown", "PdconnNoDecode"}),
    "no router": ({"pdconn_router": None}, {"PdconnRouterAbsent"}),
    "prefill has another connector": ({'reason="no_ticket"': "0+80x60"}, {"PdconnNotHandedOver"}),
    "nothing is pulled": ({"pdconn:pulls_total": "0x60"}, {"PdconnTicketsNotPulled"}),
    "decode has another connector": ({"pdconn:pulls_total": None}, {"PdconnTicketsNotPulled"}),
    "one pull in ten fails": ({"failed_transfers": "0+10x60"}, {"PdconnPullsFail"}),
    "one pull in a thousand fails": ({"failed_transfers": "0+0.1x60"}, set()),
    "bytes changed": ({"pulls_corrupted": "0x29 1x29"}, {"PdconnPullsCorrupted"}),
    "another secret": ({"unauthenticated": "0x29 1x29"}, {"PdconnPullsUnauthenticated"}),
    "reads hang": ({"quarantined": "0x29 1x29"}, {"PdconnPullsQuarantined"}),
    "leases expire": ({"kv_expired": "0+5x60"}, {"PdconnLeasesExpire"}),
    "requests fail": ({'outcome="engine_error"': "0+5x60"}, {"PdconnRequestsFail"}),
    "requests time out": ({'outcome="timed_out"': "0+5x60"}, {"PdconnRequestsFail"}),
    "clients err": ({'outcome="client_error"': "0+500x60"}, set()),
    "few requests fail, among many mistakes of clients": (
        {'outcome="client_error"': "0+5000x60", 'outcome="engine_error"': "0+5x60"},
        {"PdconnRequestsFail"},
    ),
    "the router is full": ({'outcome="busy"': "0+50x60"}, {"PdconnBusy"}),
    "a disk is bad": ({"store_rows_damaged": "0x29 1x29"}, {"PdconnStoreDamaged"}),
    "nobody asks": ({"_total": "5x60"}, set()),
}


MINUTE = 32


def fleet(changes: dict[str, str | None]) -> dict[str, str]:
    """The fleet at work with some of it changed."""
    made = {}
    for series, values in WELL.items():
        value: str | None = values
        for part, changed in changes.items():
            value = changed if part in series else value
        if value is not None:
            made[series] = value
    return made


def firing(changes: dict[str, str | None]) -> set[str]:
    """The alerts that fire after half an hour."""
    return fired_by(fleet(changes))


def fired_by(series: dict[str, str]) -> set[str]:
    """The same, of any series."""
    given = samples(series)
    return {
        rule["alert"] for group in groups() for rule in group["rules"] if fires(rule, given, MINUTE)
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_these_alerts_fire_and_no_others(fault: str) -> None:
    changes, expected = FAULTS[fault]
    assert firing(changes) == expected


def test_every_alert_has_a_fault_that_it_is_for() -> None:
    assert set().union(*(expected for _, expected in FAULTS.values())) == rules().keys()


def promtool_says(series: dict[str, str], expected: set[str], folder: Path) -> str:
    """Nothing if exactly these alerts fire for Prometheus' own tool, else what it says."""
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": groups()}), encoding="utf-8")
    query = 'count by (alertname) (count by (alertname, job) (ALERTS{alertstate="firing"}))'
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": f"{MINUTE}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)
                ],
            }
        ],
    }
    (folder / "test.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}),
        encoding="utf-8",
    )
    assert PROMTOOL is not None
    words = [PROMTOOL, "test", "rules", "test.yml"]
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool to compare with")
@pytest.mark.parametrize("fault", FAULTS)
def test_promtool_fires_the_same(fault: str, tmp_path: Path) -> None:
    changes, expected = FAULTS[fault]
    assert promtool_says(fleet(changes), expected, tmp_path) == ""


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool to compare with")
def test_an_alert_that_promtool_does_not_fire_is_noticed(tmp_path: Path) -> None:
    """Negative control."""
    assert "PdconnPullsFail" in promtool_says(fleet({}), {"PdconnPullsFail"}, tmp_path)


@pytest.mark.parametrize(
    ("alert", "old", "new"),
    [
        ("PdconnNoPrefill", "== 0", "== 1"),
        ("PdconnNotHandedOver", "no_ticket", "no_ticked"),
        ("PdconnTicketsNotPulled", "unless", "or"),
        ("PdconnPullsFail", "> 0.01", "> 0.5"),
        ("PdconnPullsCorrupted", "[10m]", "[1m]"),
        ("PdconnLeasesExpire", "leases_granted", "pulls_confirmed"),
        ("PdconnRequestsFail", "engine_error", "client_error"),
        ("PdconnRequestsFail", "|timed_out", ""),
        ("PdconnRequestsFail", "refused|client_error|client_left", "ok"),
    ],
)
def test_a_rule_with_a_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, alert: str, old: str, new: str
) -> None:
    """Negative control: some fault no longer fires what it should, or more."""
    changed = groups()
    (rule,) = [one for group in changed for one in group["rules"] if one["alert"] == alert]
    assert old in rule["expr"]
    rule["expr"] = rule["expr"].replace(old, new)
    monkeypatch.setattr("tests.project.deploy.test_monitoring.groups", lambda: changed)
    assert any(firing(changes) != expected for changes, expected in FAULTS.values())
