"""The stack in ``docker/`` is one that could run: its shape, its addresses, its commands.

The checks that need vLLM are in ``test_compose_vllm``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric

from pdconn.router.events.caches import PrefixCaches
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.file import read_fleet
from pdconn.router.fleet.member import Role
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_metrics import RouterMetrics
from pdconn.tools.cli.main import main
from pdconn.vllm.config import ConfigError, Settings, read_settings
from tests.project.docker import stack as laws
from tests.project.docker.dashboard import (
    Exported,
    asked,
    dashboard,
    exported_by,
    provisioned,
    scraping,
    unknown,
    unscraped,
)
from tests.project.docker.stack import CHECKS, DOCKER, Stack, load, option

STACKS = {
    "cpu": ("compose.yaml",),
    "gpu": ("compose.yaml", "compose.gpu.yaml"),
    "rdma": ("compose.yaml", "compose.gpu.yaml", "compose.rdma.yaml"),
    "shm": ("compose.yaml", "compose.shm.yaml"),
}
Change = Callable[[dict[str, Any]], object]
HEALTHY = {"condition": "service_healthy"}


@pytest.fixture(params=list(STACKS.values()), ids=list(STACKS))
def stack(request: pytest.FixtureRequest) -> Stack:
    return load(*request.param)


def changed(stack: Stack, change: Change) -> Stack:
    """The same with something wrong with it."""
    doc = copy.deepcopy(dict(stack.doc))
    change(doc)
    return Stack(doc, stack.directory)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_stack_keeps_the_laws(stack: Stack, check: Callable[[Stack], list[str]]) -> None:
    assert check(stack) == []


def test_the_stack_is_what_its_name_says(stack: Stack) -> None:
    """A router, two prefill and two decode engines, each with addresses of its own."""
    assert list(stack.engines()) == ["p1", "p2", "d1", "d2"]
    others = set(stack.running()) - set(stack.engines()) - {"namespaces"}
    assert others == {"router", "prometheus", "grafana"}
    assert stack.doc["networks"]["kv"]["internal"]
    on_kv = {name for name, one in stack.services.items() if "kv" in one.get("networks", {})}
    assert on_kv == set(stack.engines())
    assert not any("ports" in one for one in stack.engines().values())


def test_what_cannot_be_pulled_everywhere_starts_on_demand_only(stack: Stack) -> None:
    """Images of others are in a profile; what starts without one needs none of them."""
    others = {n for n, one in stack.services.items() if not one["image"].startswith("pdconn-")}
    assert others == {"prometheus", "grafana"}
    on_demand = {name for name, one in stack.services.items() if "profiles" in one}
    assert on_demand == others
    started = stack.services.keys() - on_demand
    assert not any(on_demand & set(stack.services[n].get("depends_on", ())) for n in started)


def test_the_project_has_a_name_without_the_key_that_old_compose_refuses() -> None:
    assert "COMPOSE_PROJECT_NAME=pdconn" in (DOCKER / ".env").read_text().splitlines()


def test_kv_goes_by_the_card_of_its_network_and_no_card_is_named() -> None:
    for files in (STACKS["cpu"], STACKS["gpu"]):
        stack = load(*files)
        (subnet,) = stack.doc["networks"]["kv"]["ipam"]["config"]
        for service in stack.engines().values():
            assert "UCX_NET_DEVICES" not in service["environment"]
            transfer = json.loads(option(service["command"], "kv-transfer-config") or "")
            assert transfer["kv_connector_extra_config"]["kv_interface"] == subnet["subnet"]


def test_engines_share_memory_through_a_container_that_outlives_them() -> None:
    """And only where it is asked for: all processes of a PID namespace end with its first one."""
    stack = load(*STACKS["shm"])
    assert "namespaces" not in stack.engines()
    assert stack.services["namespaces"]["ipc"] == "shareable"
    for one in stack.engines().values():
        assert one["ipc"] == one["pid"] == "service:namespaces"
        assert one["cap_add"] == ["SYS_PTRACE"]
        assert one["environment"]["UCX_TLS"] == "cma,tcp"
    for files in (STACKS["cpu"], STACKS["rdma"]):
        for one in load(*files).services.values():
            assert not {"ipc", "pid", "cap_add"} & one.keys()


def test_an_overlay_changes_what_its_machines_need_and_nothing_else() -> None:
    """Images, commands and devices of engines; networks, router and metrics stay."""
    below = load(*STACKS["cpu"])
    for files in (STACKS["gpu"], STACKS["rdma"]):
        above = load(*files)
        assert above.doc["networks"] == below.doc["networks"]
        for name in ("router", "prometheus", "grafana"):
            assert above.services[name] == below.services[name]
        for name, one in above.engines().items():
            changed = {key for key in one if one[key] != below.engines()[name].get(key)}
            assert changed <= {
                "image", "command", "environment", "deploy", "volumes", "shm_size", "devices",
                "ulimits",
            }  # fmt: skip


def test_rdma_gives_each_engine_a_card_and_memory_to_pin() -> None:
    engines = load(*STACKS["rdma"]).engines()
    cards = {one["environment"]["UCX_NET_DEVICES"] for one in engines.values()}
    assert len(cards) == len(engines) == 4
    for one in engines.values():
        assert one["devices"] == ["/dev/infiniband"]
        assert one["ulimits"] == {"memlock": -1}
        assert "tcp" not in one["environment"]["UCX_TLS"]
    assert not any("devices" in one for one in load(*STACKS["gpu"]).engines().values())


def test_every_gpu_is_one_engines() -> None:
    reserved = [
        device["device_ids"]
        for one in load(*STACKS["gpu"]).engines().values()
        for device in one["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert sorted(reserved) == [["0"], ["1"], ["2"], ["3"]]


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (laws.misshapen, lambda d: d["services"]["p1"].update(helthcheck={})),
        (laws.misshapen, lambda d: d["services"]["p1"].update(restart="sometimes")),
        (laws.misshapen, lambda d: d.update(netwroks={})),
        (laws.misshapen, lambda d: d.update(name="pdconn")),
        (laws.misshapen, lambda d: networks(d, "p1")["kv"].update(interface_name="kv0")),
        (laws.misshapen, lambda d: d["services"]["router"].pop("image")),
        (laws.unpinned, lambda d: d["services"]["grafana"].update(image="grafana/grafana")),
        (laws.unpinned, lambda d: d["services"]["p1"].update(image="pdconn:latest")),
        (laws.unpinned, lambda d: d["services"]["grafana"].update(image="grafana/grafana:12.1.1")),
        (laws.unbounded, lambda d: d["services"]["p1"].pop("deploy")),
        (laws.unbounded, lambda d: d["services"]["router"].pop("cap_drop")),
        (laws.collisions, lambda d: d["services"]["grafana"].update(ports=["127.0.0.1:9090:3000"])),
        (laws.bad_addresses, lambda d: move(d, "p2", "172.30.0.11")),
        (laws.bad_addresses, lambda d: move(d, "p2", "172.31.0.12")),
        (laws.bad_addresses, lambda d: move(d, "p2", "172.30.0.1")),
        (laws.bad_addresses, lambda d: d["services"]["p2"].update(networks={})),
        (laws.bad_volumes, lambda d: d["services"]["p2"].update(volumes=["./gone:/x"])),
        (laws.bad_volumes, lambda d: d["volumes"].pop("models")),
        (laws.bad_volumes, lambda d: d["volumes"].update(spare={})),
        (laws.bad_secrets, lambda d: d["services"]["p2"].pop("secrets")),
        (laws.bad_secrets, lambda d: d["services"]["router"].update(secrets=["pdconn_secret"])),
        (laws.bad_secrets, lambda d: d["secrets"].pop("pdconn_secret")),
        (laws.bad_secrets, lambda d: d["secrets"]["pdconn_secret"].update(file="./key")),
        (laws.bad_health, lambda d: d["services"]["d1"].pop("healthcheck")),
        (laws.bad_health, lambda d: d["services"]["router"].update(depends_on={"p3": HEALTHY})),
        (laws.bad_health, lambda d: d["services"]["model"].update(depends_on={"p1": HEALTHY})),
        (laws.bad_health, lambda d: d["services"]["p1"].update(depends_on={"model": HEALTHY})),
        (laws.held_up, lambda d: d["services"]["router"].update(depends_on={"p1": HEALTHY})),
        (laws.held_up, lambda d: d["services"]["d1"].update(depends_on={"p1": HEALTHY})),
        (
            laws.held_up,
            lambda d: d["services"]["prometheus"].update(depends_on={"router": HEALTHY}),
        ),
    ],
)
def test_a_stack_with_a_fault_is_refused(
    check: Callable[[Stack], list[str]], change: Change
) -> None:
    assert check(changed(load("compose.yaml"), change)) != []


def networks(doc: dict[str, Any], service: str) -> dict[str, Any]:
    return dict(doc["services"][service]["networks"])


def move(doc: dict[str, Any], service: str, address: str) -> None:
    doc["services"][service]["networks"]["serving"]["ipv4_address"] = address


# The router's options


def proxy_config(words: list[str], monkeypatch: pytest.MonkeyPatch) -> ProxyConfig:
    """What ``pdconn`` makes of its command line, without serving; SystemExit as it does."""
    made: list[ProxyConfig] = []

    async def serve(config: ProxyConfig, *_events_and_router: object) -> int:
        made.append(config)
        return 0

    monkeypatch.setattr("pdconn.tools.cli.proxy.router_command.serve", serve)
    if (code := main(words)) != 0:
        raise SystemExit(code)
    return made[0]


def test_the_routers_command_is_one_and_names_every_engine_where_it_listens(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = stack.services["router"]
    assert router["entrypoint"] == ["pdconn"]
    config = proxy_config(router["command"], monkeypatch)
    assert not config.engines.prefill
    assert not config.engines.decode
    mounted = dict(each.split(":")[:2] for each in router["volumes"])
    inside = Path(config.engines.fleet or "")
    (folder,) = (here for here, there in mounted.items() if there == str(inside.parent))
    members = read_fleet(DOCKER / folder / inside.name)
    configured = {
        role: [one for one in members if role in one.roles and not one.draining]
        for role in (Role.PREFILL, Role.DECODE)
    }
    assert [m.url for m in configured[Role.PREFILL]] == ["http://p1:8000", "http://p2:8000"]
    assert [m.url for m in configured[Role.DECODE]] == ["http://d1:8000", "http://d2:8000"]
    for member in [*configured[Role.PREFILL], *configured[Role.DECODE]]:
        name = member.url.removeprefix("http://").partition(":")[0]
        command = stack.engines()[name]["command"]
        assert member.url == f"http://{name}:{option(command, 'port')}"
        events = json.loads(option(command, "kv-events-config") or "{}")
        assert member.events == events["endpoint"].replace("*", "{host}")
        assert member.replay == events["replay_endpoint"].replace("*", "{host}")


@pytest.mark.parametrize(
    "words",
    [
        ["proxy", "--prefil", "http://p1:8000"],
        ["proxy", "--prefill", "http://p1:8000", "--decode", "d1:8000"],
        ["proxy", "--prefill", "http://p1:8000,evnts=tcp://p1:1", "--decode", "http://d1:8000"],
        ["proxy", "--prefill", "http://p1:8000"],
    ],
)
def test_a_router_with_a_fault_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        proxy_config(words, monkeypatch)
    assert end.value.code == 2
    assert capsys.readouterr().err


# The engines' options


def settings(service: Any, secrets: Path) -> Settings:
    """What the connector makes of an engine's configuration; its secret lies in ``secrets``."""
    transfer = json.loads(option(service["command"], "kv-transfer-config") or "")
    extra = json.loads(
        json.dumps(transfer["kv_connector_extra_config"]).replace("/run/secrets", str(secrets))
    )
    host = service["environment"].get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost")
    return read_settings(extra, host, 5600, 0, environ={})


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """What a machine that runs the stack has at ``/run/secrets``."""
    path = tmp_path / "pdconn_secret"
    path.touch(0o600)
    path.write_text("0123456789abcdef" * 4)
    return tmp_path


def test_the_connector_takes_each_engines_configuration(stack: Stack, secrets: Path) -> None:
    networks = {name: service["networks"] for name, service in stack.engines().items()}
    lenders = {f"{at['kv']['ipv4_address']}:5600" for at in networks.values() if "kv" in at}
    lenders -= {
        f"{at['kv']['ipv4_address']}:5600" for name, at in networks.items() if name[0] == "d"
    }
    for name, service in stack.engines().items():
        made = settings(service, secrets)
        assert made.security.secret is not None
        if name.startswith("p"):
            assert made.side_channel_host == service["networks"]["kv"]["ipv4_address"]
            made.security.require(made.side_channel_host)
        else:
            assert {str(place) for place in made.warm_peers} == lenders


@pytest.mark.parametrize(
    ("true", "false"),
    [("secret_file", "secret_flie"), ("pdconn_secret", "another"), ("secret_file", "secret")],
)
def test_an_engine_with_a_fault_is_refused(true: str, false: str, secrets: Path) -> None:
    text = json.dumps(load("compose.yaml").services["p1"]).replace(true, false)
    with pytest.raises(ConfigError):
        settings(json.loads(text), secrets)


# What is measured


@pytest.fixture(scope="module")
def routers_metrics() -> Exported:
    """All that a router shows, as it registers it."""
    metrics = RouterMetrics(EngineRegistry(["http://p:1"], ["http://d:1"]))
    metrics.watch_pods(PrefixCaches(), dict, "prefix")
    families: list[Metric] = list(metrics.registry.collect())
    return exported_by(families)


def test_every_engine_and_the_router_are_scraped(stack: Stack) -> None:
    assert unscraped(stack, scraping()) == []
    fewer = scraping()
    fewer["scrape_configs"][0]["static_configs"][0]["targets"] = ["router:8000"]
    assert unscraped(stack, fewer) == ["router:8000", "router:9000"]


def test_what_is_asked_of_the_router_it_says(routers_metrics: Exported) -> None:
    assert unknown(dashboard(), routers_metrics, "pdconn_") == []


@pytest.mark.parametrize(
    ("true", "false"),
    [
        ("pdconn_router_retries_total", "pdconn_router_retries"),
        ("pdconn_router_inflight_requests", "pdconn_router_in_flight"),
        ("by (outcome)", "by (result)"),
        ('role=\\"prefill\\"', 'rank=\\"prefill\\"'),
    ],
)
def test_a_dashboard_with_a_fault_is_refused(
    true: str, false: str, routers_metrics: Exported
) -> None:
    text = json.dumps(dashboard())
    assert true in text
    wrong = unknown(json.loads(text.replace(true, false)), routers_metrics, "pdconn_")
    assert len(wrong) >= 1


def test_expressions_are_taken_apart() -> None:
    about = asked('sum by (le, a) (rate(b:c_bucket{d="e", f!~"g|h"}[5m])) / on (i) max(j)')
    assert about.names == {"b:c_bucket", "j"}
    assert about.labels == {"le", "a", "d", "f", "i"}


def test_grafana_finds_prometheus_and_the_dashboard(stack: Stack) -> None:
    (source,) = provisioned("datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    board = dashboard()
    assert source["isDefault"]  # what the dashboard's variable begins with
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    (provider,) = provisioned("dashboards/pdconn.yaml")["providers"]
    mounted = [each.split(":")[1] for each in stack.services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted
