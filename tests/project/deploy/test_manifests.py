"""The manifests are ones that a cluster takes, and that pdconn's own options fit.

What needs vLLM is in ``test_manifests_vllm``.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdconn.router.access.api_keys import ApiKeys
from pdconn.router.fleet.member import Role, parse_member
from pdconn.router.fleet.sources import DnsName, parse_source
from pdconn.vllm.config import ConfigError, Settings, read_settings
from tests.project.deploy import manifests as laws
from tests.project.deploy.manifests import (
    CHECKS,
    LEASE_S,
    OVERLAYS,
    SECRETS,
    Cluster,
    argument,
    built,
    pod_of,
)
from tests.project.deploy.network import allowed, parties, reachable
from tests.project.docker.test_compose import proxy_config

Change = Callable[[Cluster], object]
KV_PORTS = (5600, 20000, 20500, 20999)


HELD = [(overlay, check) for overlay in OVERLAYS if overlay != "llm-d" for check in CHECKS]


@pytest.mark.parametrize(
    ("overlay", "check"),
    [*HELD, ("llm-d", laws.misshapen)],  # the rest of its pods is llm-d's
    ids=lambda one: getattr(one, "__name__", one),
)
def test_every_overlay_keeps_the_laws(
    examples: Path, overlay: str, check: Callable[[Cluster], list[str]]
) -> None:
    assert check(built(examples, overlay)) == []


def prefill(cluster: Cluster) -> Any:
    return cluster.workloads["pdconn-prefill"]["spec"]["template"]["spec"]


def router(cluster: Cluster) -> Any:
    return cluster.workloads["pdconn-router"]["spec"]["template"]["spec"]


def engine(cluster: Cluster) -> Any:
    return prefill(cluster)["containers"][0]


def policy(cluster: Cluster, name: str) -> Any:
    return cluster.named("NetworkPolicy", name)["spec"]


def replace_argument(container: Any, old: str, new: str) -> None:
    container["args"] = [one.replace(old, new) for one in container["args"]]


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (laws.misshapen, lambda c: prefill(c).update(terminationGraceSeconds=3)),
        (laws.misshapen, lambda c: engine(c)["resources"]["limits"].update(memory=[])),
        (laws.misshapen, lambda c: c.of("NetworkPolicy")[0]["spec"].update(ingres=[])),
        (laws.misshapen, lambda c: c.of("PodMonitor")[0]["spec"].update(selektor={})),
        (laws.misshapen, lambda c: c.of("PrometheusRule")[0]["spec"]["groups"][0].pop("name")),
        (laws.without_bounds, lambda c: engine(c)["resources"]["limits"].pop("memory")),
        (laws.without_bounds, lambda c: engine(c)["resources"]["requests"].pop("nvidia.com/gpu")),
        (laws.insecure, lambda c: prefill(c)["securityContext"].update(runAsUser=0)),
        (laws.insecure, lambda c: prefill(c)["securityContext"].pop("seccompProfile")),
        (laws.insecure, lambda c: prefill(c).pop("automountServiceAccountToken")),
        (laws.insecure, lambda c: prefill(c).update(hostNetwork=True)),
        (laws.insecure, lambda c: engine(c)["securityContext"].pop("allowPrivilegeEscalation")),
        (laws.insecure, lambda c: engine(c)["securityContext"].pop("readOnlyRootFilesystem")),
        (
            laws.insecure,
            lambda c: engine(c)["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
        ),
        (laws.unwritable, lambda c: engine(c)["volumeMounts"].pop(1)),
        (laws.unwritable, lambda c: router(c)["containers"][0]["volumeMounts"].pop()),
        (laws.cut_short, lambda c: prefill(c).pop("terminationGracePeriodSeconds")),
        (laws.cut_short, lambda c: engine(c).pop("lifecycle")),
        (laws.cut_short, lambda c: replace_argument(engine(c), "timeout=40", "timeout=20")),
        (laws.cut_short, lambda c: router(c).update(terminationGracePeriodSeconds=125)),
        (laws.unprobed, lambda c: engine(c).pop("startupProbe")),
        (laws.unprobed, lambda c: engine(c)["livenessProbe"]["httpGet"].update(port="htp")),
        (laws.unselected, lambda c: c.of("Service")[0]["spec"]["selector"].update(a="b")),
        (laws.unselected, lambda c: c.of("Service")[0]["spec"]["ports"][0].update(targetPort="x")),
        (laws.unselected, lambda c: c.of("PodDisruptionBudget")[0]["spec"].update(minAvailable=2)),
        (laws.unselected, lambda c: c.of("PodMonitor")[1]["spec"].update(selector={})),
        (
            laws.unselected,
            lambda c: c.named("Service", "pdconn-prefill")["spec"].pop("clusterIP"),
        ),
        (laws.unpinned, lambda c: engine(c).update(image="pdconn-gpu:latest")),
        (laws.unpinned, lambda c: engine(c).update(image="pdconn-gpu")),
    ],
)
def test_a_manifest_with_a_fault_is_refused(
    default: Cluster, check: Callable[[Cluster], list[str]], change: Change
) -> None:
    cluster = changed(default, change)
    assert check(cluster) != []


POOL, ROUTE = "InferencePool", "HTTPRoute"


def spec(cluster: Cluster, kind: str) -> Any:
    return cluster.of(kind)[0]["spec"]


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (laws.misshapen, lambda c: spec(c, POOL).update(targetPort=8000)),
        (laws.misshapen, lambda c: spec(c, POOL)["selector"].update(app="decode")),
        (laws.misshapen, lambda c: spec(c, POOL)["endpointPickerRef"].update(failureMode="Open")),
        (
            laws.misshapen,
            lambda c: c.of(POOL)[0].update(apiVersion="inference.networking.k8s.io/v2"),
        ),
        (laws.misshapen, lambda c: spec(c, ROUTE)["rules"][0]["timeouts"].update(request="none")),
        (laws.misshapen, lambda c: spec(c, ROUTE)["rules"][0].update(match=[])),
        (laws.unselected, lambda c: spec(c, POOL)["selector"].update(matchLabels={"a": "b"})),
        (laws.unselected, lambda c: spec(c, POOL).update(targetPorts=[{"number": 8001}])),
        (laws.unselected, lambda c: spec(c, POOL)["endpointPickerRef"].update(name="picker")),
        (laws.unselected, lambda c: spec(c, POOL)["endpointPickerRef"]["port"].update(number=1)),
        (laws.unselected, lambda c: spec(c, ROUTE)["rules"][0]["backendRefs"][0].update(name="a")),
        (laws.unprobed, lambda c: picker(c)["readinessProbe"]["grpc"].update(port=9003)),
        (laws.unprobed, lambda c: picker(c)["readinessProbe"].pop("grpc")),
    ],
)
def test_a_manifest_for_a_gateway_with_a_fault_is_refused(
    gateway: Cluster, check: Callable[[Cluster], list[str]], change: Change
) -> None:
    cluster = changed(gateway, change)
    assert check(cluster) != []
    assert check(gateway) == []


@pytest.fixture(scope="module")
def gateway(examples: Path) -> Cluster:
    return built(examples, "gateway")


def picker(cluster: Cluster) -> Any:
    return pod_of(cluster.workloads["pdconn-picker"])["containers"][0]


def changed(cluster: Cluster, change: Change) -> Cluster:
    made = Cluster(copy.deepcopy(cluster.resources))
    change(made)
    return made


def test_only_rdma_adds_a_capability_and_a_device_for_it(examples: Path) -> None:
    for overlay in ("default", "keda", "rdma"):
        cluster = built(examples, overlay)
        for name in ("pdconn-prefill", "pdconn-decode"):
            (container,) = pod_of(cluster.workloads[name])["containers"]
            added = container["securityContext"]["capabilities"].get("add", [])
            assert added == (["IPC_LOCK"] if overlay == "rdma" else [])
            assert ("rdma/ib" in container["resources"]["limits"]) == (overlay == "rdma")
            env = {one["name"]: one.get("value") for one in container["env"]}
            assert env["UCX_TLS"].startswith("rc," if overlay == "rdma" else "tcp,")
            assert container["image"] == "pdconn-gpu:0.1.0"  # merged, not replaced


@pytest.mark.parametrize("overlay", ["keda", "keda-roles"])
def test_what_keda_scales_exists_and_has_no_replicas_of_its_own(
    examples: Path, overlay: str
) -> None:
    cluster = built(examples, overlay)
    for scaled in cluster.of("ScaledObject"):
        target = scaled["spec"]["scaleTargetRef"]
        assert "replicas" not in cluster.named(target["kind"], target["name"])["spec"]
    assert len(cluster.of("ScaledObject")) == 2


def test_keda_scales_to_what_the_router_wants(
    examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router says what it wants, and moves nothing: engines of these pods have one role."""
    cluster = built(examples, "keda-roles")
    (container,) = pod_of(cluster.workloads["pdconn-router"])["containers"]
    assert proxy_config(container["args"], monkeypatch).roles.roles == "dry-run"
    (plain,) = pod_of(built(examples, "keda").workloads["pdconn-router"])["containers"]
    assert proxy_config(plain["args"], monkeypatch).roles.roles == "static"


# Who may connect to whom


def test_kv_passes_between_engines_alone(default: Cluster) -> None:
    engines = {"prefill", "decode"}
    for port in KV_PORTS:
        assert reachable(default, port) == {(a, b) for a in engines for b in engines}
    assert reachable(default, 21000) == set()


def test_engines_serve_the_router_and_monitoring_and_the_router_everyone(default: Cluster) -> None:
    everyone = {"prefill", "decode", "router", "monitoring", "gateway", "stranger", "dns"}
    pairs = reachable(default, 8000)
    assert {pair for pair in pairs if pair[1] != "router"} == {
        (source, target) for source in ("router", "monitoring") for target in ("prefill", "decode")
    }
    # Engines connect to nothing but engines, names and the hub.
    assert {a for a, b in pairs if b == "router"} == everyone - {"prefill", "decode", "router"}
    for port in (5557, 5657):
        assert reachable(default, port) == {("router", "prefill"), ("router", "decode")}


def test_admin_pages_are_monitorings_alone(default: Cluster) -> None:
    assert reachable(default, 9000) == {("monitoring", "router")}


def test_a_gateway_reaches_decode_and_pickers_and_pickers_reach_engines(
    default: Cluster, gateway: Cluster
) -> None:
    assert reachable(gateway, 9002) == {("gateway", "picker")}
    assert reachable(gateway, 9000) == {("monitoring", "router"), ("monitoring", "picker")}
    added = reachable(gateway, 8000) - reachable(default, 8000)
    assert {pair for pair in added if pair[1] != "router"} == {
        ("picker", "prefill"), ("picker", "decode"), ("gateway", "decode"),
    }  # fmt: skip
    for port in (5557, 5657):
        added = reachable(gateway, port) - reachable(default, port)
        assert added == {("picker", "prefill"), ("picker", "decode")}
    for port in KV_PORTS:
        assert reachable(gateway, port) == reachable(default, port)


def test_a_forged_ticket_leads_decode_nowhere_but_to_engines(default: Cluster) -> None:
    who = parties(default)
    for target in ("router", "monitoring", "stranger", "dns"):
        for port in (22, 80, 5600, 6379, 20500):
            assert not allowed(default, who["decode"], who[target], port)
    for source in ("router", "prefill", "decode"):
        assert allowed(default, who[source], who["dns"], 53, "UDP")


@pytest.mark.parametrize(
    ("change", "port"),
    [
        (lambda c: c.resources.remove(c.named("NetworkPolicy", "pdconn-engines")), 5600),
        (lambda c: policy(c, "pdconn-engines")["ingress"][2].pop("from"), 5600),
        (lambda c: policy(c, "pdconn-engines")["ingress"].pop(2), 20500),
        (lambda c: policy(c, "pdconn-engines")["ingress"][2]["ports"][1].pop("endPort"), 20500),
        (lambda c: policy(c, "pdconn-engines")["egress"].pop(0), 5600),
        (
            lambda c: policy(c, "pdconn-engines").update(podSelector={"matchLabels": {"a": "b"}}),
            5600,
        ),
        (lambda c: policy(c, "pdconn-engines").update(policyTypes=["Egress"]), 5600),
        (lambda c: policy(c, "pdconn-router")["ingress"][1].pop("from"), 9000),
        (lambda c: policy(c, "pdconn-router")["ingress"][1].pop("ports"), 5600),
    ],
)
def test_a_policy_with_a_hole_or_a_wall_is_noticed(
    default: Cluster, change: Change, port: int
) -> None:
    """Negative control: each changes who reaches a port."""
    assert reachable(changed(default, change), port) != reachable(default, port)


def test_the_data_ports_are_those_that_ucx_is_told_to_use(default: Cluster) -> None:
    (rule,) = [
        port
        for rule in policy(default, "pdconn-engines")["ingress"]
        for port in rule["ports"]
        if "endPort" in port
    ]
    for name in ("pdconn-prefill", "pdconn-decode"):
        (container,) = pod_of(default.workloads[name])["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        assert env["UCX_TCP_PORT_RANGE"] == f"{rule['port']}-{rule['endPort']}"


# Our options


def test_the_routers_command_is_one_and_finds_engines_by_name(
    default: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = router(default)["containers"]
    config = proxy_config(container["args"], monkeypatch)
    listen, engines = config.listen, config.engines
    assert (listen.host, listen.port, listen.admin_port) == ("0.0.0.0", 8000, 9000)
    for role, words in ((Role.PREFILL, engines.prefill), (Role.DECODE, engines.decode)):
        (word,) = words
        assert isinstance(parse_source("--engine", word, [role]), DnsName)
        member = parse_member("", word.removeprefix("dns+"), [role])
        name = member.url.removeprefix("http://").partition(":")[0]
        assert name == f"pdconn-{role.value}"
        assert default.named("Service", name)["spec"]["clusterIP"] == "None"
        (started,) = pod_of(default.workloads[name])["containers"]
        events = json.loads(argument(started, "kv-events-config") or "{}")
        assert member.url.endswith(f":{argument(started, 'port')}")
        assert member.events == events["endpoint"].replace("*", "{host}")
        assert member.replay == events["replay_endpoint"].replace("*", "{host}")


def test_the_pickers_command_finds_the_routers_engines(
    default: Cluster, gateway: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = router(default)["containers"]
    words = {"picker": "proxy", "--port=9002": "--port=8000"}
    args = [words.get(one, one) for one in picker(gateway)["args"]]
    assert args == container["args"]  # the picker has the router's options
    config = proxy_config(picker(gateway)["args"], monkeypatch)
    assert (config.listen.host, config.listen.port) == ("0.0.0.0", 9002)
    assert spec(gateway, "InferencePool")["endpointPickerRef"]["failureMode"] == "FailClose"


def settings(container: Any, secrets: Path) -> Settings:
    """What the connector makes of an engine's configuration, in a pod at 10.1.2.3."""
    transfer = json.loads(argument(container, "kv-transfer-config") or "")
    extra = json.dumps(transfer["kv_connector_extra_config"])
    extra = extra.replace("/run/secrets/pdconn", str(secrets))
    return read_settings(json.loads(extra), "10.1.2.3", 5600, 0, environ={})


@pytest.fixture
def secrets(tmp_path: Path, default: Cluster) -> Path:
    """Files as a kubelet makes them: links to links, with the volumes' mode."""
    written = tmp_path / "..2026"
    written.mkdir()
    (tmp_path / "..data").symlink_to("..2026")
    names = {"secret": "pdconn-prefill", "keys": "pdconn-router"}
    for key, workload in names.items():
        (volume,) = [v for v in pod_of(default.workloads[workload])["volumes"] if "secret" in v]
        (written / key).touch(0o600)
        (written / key).write_text(next(iter(SECRETS.values())) + "\n", encoding="utf-8")
        os.chmod(written / key, volume["secret"]["defaultMode"])
        (tmp_path / key).symlink_to(f"..data/{key}")
    return tmp_path


def test_the_connector_and_the_router_take_their_secrets(default: Cluster, secrets: Path) -> None:
    for name in ("pdconn-prefill", "pdconn-decode"):
        (container,) = pod_of(default.workloads[name])["containers"]
        made = settings(container, secrets)
        assert made.side_channel_host == "10.1.2.3"
        made.security.require(made.side_channel_host)
        at = [m for m in container["volumeMounts"] if m["mountPath"] == "/run/secrets/pdconn"]
        assert len(at) == 1
    assert argument(router(default)["containers"][0], "api-key-file") == "/run/secrets/pdconn/keys"
    assert len(ApiKeys(str(secrets / "keys"))) == 1


@pytest.mark.parametrize("mode", [0o444, 0o660])
def test_a_secret_that_others_may_read_or_write_is_refused(
    default: Cluster, secrets: Path, mode: int
) -> None:
    os.chmod(secrets / "..2026/secret", mode)
    with pytest.raises(ConfigError):
        settings(engine(default), secrets)


def test_a_token_for_the_hub_is_optional(default: Cluster) -> None:
    for name in ("pdconn-prefill", "pdconn-decode"):
        (container,) = pod_of(default.workloads[name])["containers"]
        (token,) = [one for one in container["env"] if one["name"] == "HF_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"]["optional"] is True


def test_llm_ds_engines_lend_and_pull_by_pdconn_and_drain(examples: Path, secrets: Path) -> None:
    cluster = built(examples, "llm-d")
    (secret,) = cluster.of("Secret")
    (found,) = cluster.of("DisaggregatedSet")
    kinds = []
    for role in found["spec"]["roles"]:
        spec = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        (container,) = spec["containers"]
        at = container["args"].index("--kv-transfer-config")
        transfer = json.loads(container["args"][at + 1])
        kinds.append((role["name"], transfer["kv_role"]))
        as_one = {"args": [f"--kv-transfer-config={container['args'][at + 1]}"]}
        assert settings(as_one, secrets).security.secret is not None
        assert secret["metadata"]["name"] in json.dumps(spec["volumes"])
        assert spec["securityContext"] == {"fsGroup": 10001}
        drain = argument(container, "shutdown-timeout")
        assert spec["terminationGracePeriodSeconds"] >= int(drain or 0) + 10
        assert int(drain or 0) > LEASE_S
        assert container["image"].startswith("pdconn-gpu:")
    assert kinds == [("prefill", "kv_producer"), ("decode", "kv_consumer")]
