"""Alert rules: Prometheus finds them, and they ask for what the router says."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml

from pdconn.router.openai.requests import Direct
from pdconn.router.routing.routed_request import RequestEnd
from tests.docker.dashboard import Exported, scraping, unknown
from tests.docker.stack import DOCKER, load
from tests.docker.test_compose import routers_metrics  # noqa: F401 - a fixture

VALUES = {
    "reason": {one.value for one in Direct},
    "outcome": {one.value for one in RequestEnd},
}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def unknown_values(given: list[dict[str, Any]]) -> list[str]:
    """Values of labels that the router never sets."""
    wrong = []
    for rule in given:
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', rule["expr"]):
            wrong += sorted(set(values.split("|")) - VALUES[label])
    return wrong


def asked_of_the_router(given: list[dict[str, Any]], exported: Exported) -> list[str]:
    panel = {"targets": given}
    return unknown({"panels": [panel]}, exported, "pdconn_")


def test_prometheus_reads_the_rules_where_compose_puts_them() -> None:
    (name,) = scraping()["rule_files"]
    mounted = [
        each.split(":")[1] for each in load("compose.yaml").services["prometheus"]["volumes"]
    ]
    assert f"/etc/prometheus/{name}" in mounted
    assert (DOCKER / name).exists()


def test_rules_ask_for_what_the_router_says(routers_metrics: Exported) -> None:  # noqa: F811
    assert len(rules()) >= 5
    assert asked_of_the_router(rules(), routers_metrics) == []
    assert unknown_values(rules()) == []
    for rule in rules():
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize(
    ("true", "false"),
    [
        ("handed_over_requests", "handed_over"),
        ("by (role", "by (kind"),
        ("no_ticket", "no_tickets"),
    ],
)
def test_a_rule_with_a_fault_is_refused(
    true: str,
    false: str,
    routers_metrics: Exported,  # noqa: F811
) -> None:
    faulty = copy.deepcopy(rules())
    for rule in faulty:
        rule["expr"] = rule["expr"].replace(true, false)
    assert faulty != rules()
    assert asked_of_the_router(faulty, routers_metrics) or unknown_values(faulty)
