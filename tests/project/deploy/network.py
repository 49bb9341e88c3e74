"""Who may connect to whom under a cluster's NetworkPolicies, as their definition says it.

A connection passes if what it leaves lets it out and what it enters lets it in.  A pod that no
policy selects for a direction is open in that direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.project.deploy.manifests import Cluster, pod_of, port_of, selects


@dataclass(frozen=True)
class Party:
    """A pod: where it lives, its labels, and the ports that have names."""

    name: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    container: Mapping[str, Any] = field(default_factory=lambda: {"ports": []})


def parties(cluster: Cluster) -> dict[str, Party]:
    """A pod of each workload, one of a gateway, one of monitoring, and a stranger's."""
    found = {}
    for name, workload in cluster.workloads.items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        container = pod_of(workload)["containers"][0]
        role = name.removeprefix("pdconn-")
        found[role] = Party(role, workload["metadata"]["namespace"], labels, container)
    dns = Party("dns", "kube-system", {"k8s-app": "kube-dns"})
    return found | {
        "dns": dns,
        "gateway": Party("gateway", "gateway"),
        "monitoring": Party("monitoring", "monitoring"),
        "stranger": Party("stranger", "default", {"app.kubernetes.io/name": "pdconn"}),
    }


@dataclass(frozen=True)
class Connection:
    """Somebody who connects to a port of somebody."""

    source: Party
    target: Party
    port: int
    protocol: str = "TCP"


def allowed(
    cluster: Cluster, source: Party, target: Party, port: int, protocol: str = "TCP"
) -> bool:
    """Whether ``source`` may open a connection to this port of ``target``."""
    wanted = Connection(source, target, port, protocol)
    out = _passes(wanted, _policies(cluster, source, "Egress"), source, target, ("egress", "to"))
    into = _policies(cluster, target, "Ingress")
    return out and _passes(wanted, into, target, source, ("ingress", "from"))


def _policies(cluster: Cluster, subject: Party, direction: str) -> list[Any]:
    """Those that select a pod for a direction."""
    return [
        one["spec"]
        for one in cluster.of("NetworkPolicy")
        if one["metadata"]["namespace"] == subject.namespace
        and direction in one["spec"]["policyTypes"]
        and selects(one["spec"]["podSelector"], subject.labels)
    ]


def _passes(
    wanted: Connection, policies: list[Any], subject: Party, other: Party, keys: tuple[str, str]
) -> bool:
    rules, peers = keys
    return not policies or any(
        _meets(rule.get(peers), subject, other) and _opens(rule.get("ports"), wanted)
        for policy in policies
        for rule in policy.get(rules, ())
    )


def _meets(peers: Any, subject: Party, other: Party) -> bool:
    if not peers:
        return True
    return any(
        (
            selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace})
            if "namespaceSelector" in peer
            else other.namespace == subject.namespace
        )
        and selects(peer.get("podSelector", {}), other.labels)
        for peer in peers
    )


def _opens(ports: Any, wanted: Connection) -> bool:
    if not ports:
        return True
    for one in ports:
        first = port_of(wanted.target.container, one["port"])
        if first is None or one.get("protocol", "TCP") != wanted.protocol:
            continue
        if first <= wanted.port <= one.get("endPort", first):
            return True
    return False


def reachable(cluster: Cluster, port: int) -> set[tuple[str, str]]:
    """Pairs of names, of which the first may connect to this port of the second."""
    everyone = parties(cluster)
    ours: Iterator[Party] = (one for one in everyone.values() if one.labels and one.name != "dns")
    targets = [one for one in ours if one.name != "stranger"]
    return {
        (source.name, target.name)
        for source in everyone.values()
        for target in targets
        if allowed(cluster, source, target, port)
    }
