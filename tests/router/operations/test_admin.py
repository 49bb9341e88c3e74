"""The admin pages have a listener of their own, and what they show gives no prompt away."""

from __future__ import annotations

import json
import socket

import aiohttp
import pytest

from pdconn.router.access.listen_settings import ADMIN_ABOVE
from pdconn.router.admission.listener import ADMIN_LIMITS
from pdconn.router.prefix.hashing import chain, external
from pdconn.router.prefix.snapshot import explain_snapshot, read_snapshot, take_snapshot
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import BadSetting, CannotListen
from pdconn.router.router_server import running_proxy
from pdconn.tools.lab.ports import free_ports
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.routed import ASKED, PROMPT, SCHEME, Fleet, fleet

PAGES = ["/", "/debug/state", "/debug/history", "/debug/route/some-id", "/metrics"]
URLS = (["http://p:1"], ["http://d:1"])


@pytest.mark.parametrize("path", PAGES)
@in_loop
async def test_clients_do_not_reach_the_admin_pages(path):
    """Without a listener of their own, every client of the API reads all other clients' ids."""
    async with deployment() as d:
        reply = await d.send(d.proxy.url + path, method="GET")
        assert reply.status == 404
        assert not any(page in reply.error["message"].partition(", got ")[0] for page in PAGES[1:])


@in_loop
async def test_operators_reach_them_and_generate_nothing_there():
    """The control for the test above."""
    async with deployment() as d:
        done = await d.complete()
        request_id = done.headers["X-Request-Id"]
        pages = [path.replace("some-id", request_id) for path in PAGES]
        for path in (*pages, "/health"):
            assert (await d.send(d.proxy.admin_url + path, method="GET")).status == 200
        refused = await d.send(d.proxy.admin_url + "/v1/completions", b"{}")
        assert refused.status == 404
        assert "/metrics" in refused.error["message"]


@in_loop
async def test_half_requests_to_the_admin_pages_take_no_place_from_clients_or_operators():
    """Else they take every file descriptor of the proxy, and no client is accepted."""
    async with deployment() as d:
        port = int(d.proxy.admin_url.rsplit(":", 1)[1])
        halves = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        try:
            for half in halves:
                half.sendall(b"GET /metrics HTTP/1.1\r\n")
            assert (await d.complete()).status == 200
            assert (await d.send(d.proxy.admin_url + "/metrics", method="GET")).status == 200
            closed = 0
            for half in halves:
                half.settimeout(0.2)
                try:
                    closed += half.recv(1) == b""
                except ConnectionResetError:
                    closed += 1
                except TimeoutError:
                    pass
            assert closed >= len(halves) - ADMIN_LIMITS.connections
        finally:
            for half in halves:
                half.close()


@in_loop
async def test_head_has_no_body_that_the_next_answer_would_begin_with():
    async with deployment() as d:
        reply = await d.send("/v1/models", method="HEAD")
        assert (reply.status, reply.body, reply.headers["Allow"]) == (405, b"", "GET")
        assert (await d.send("/v1/models", method="GET")).status == 200


@in_loop
async def test_a_wrong_method_is_405_with_those_that_are_right():
    async with deployment() as d:
        for path, method, allowed in (
            ("/v1/completions", "GET", "POST"),
            ("/v1/models", "POST", "GET"),
            ("/v1/responses/resp_1", "POST", "GET"),
            ("/health", "POST", "GET, HEAD"),
            ("/tokenize", "DELETE", "POST"),
        ):
            reply = await d.send(path, b"{}", method=method)
            assert (reply.status, reply.headers["Allow"]) == (405, allowed), path
            assert reply.error["message"] == f"method: expected {allowed} for {path}, got {method}"
            assert reply.error["type"] == "MethodNotAllowedError"
        reply = await d.send("/nowhere", b"{}", method="GET")  # the control
        assert (reply.status, "Allow" in reply.headers) == (404, False)


async def can_connect(host: str, url: str) -> bool:
    port = url.rsplit(":", 1)[1]
    try:
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"http://{host}:{port}/livez") as reply,
        ):
            return reply.status == 200
    except aiohttp.ClientConnectorError:
        return False


@in_loop
async def test_they_stay_on_loopback_when_the_api_does_not():
    """127.0.0.2 stands for another address of this machine."""
    config = ProxyConfig.from_options(*URLS, host="0.0.0.0", port=0)
    async with running_proxy(config) as proxy:
        assert await can_connect("127.0.0.1", proxy.admin_url)
        assert not await can_connect("127.0.0.2", proxy.admin_url)
        assert await can_connect("127.0.0.2", proxy.url)
    wide = ProxyConfig.from_options(*URLS, port=0, admin_host="0.0.0.0")
    async with running_proxy(wide) as proxy:
        assert await can_connect("127.0.0.2", proxy.admin_url)


def test_their_port_follows_the_apis_unless_it_is_given():
    assert (
        ProxyConfig.from_options(*URLS, port=8000).listen.effective_admin_port == 8000 + ADMIN_ABOVE
    )
    assert ProxyConfig.from_options(*URLS, port=0).listen.effective_admin_port == 0
    assert ProxyConfig.from_options(*URLS, port=8000, admin_port=0).listen.effective_admin_port == 0
    with pytest.raises(BadSetting, match=f"--admin-port: .*got {65000 + ADMIN_ABOVE}"):
        ProxyConfig.from_options(*URLS, port=65000)
    with pytest.raises(BadSetting, match="--admin-port"):
        ProxyConfig.from_options(*URLS, admin_port=-1)


@in_loop
async def test_an_admin_port_in_use_names_its_option_and_leaves_the_other_free():
    [port] = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        admin_port = taken.getsockname()[1]
        config = ProxyConfig.from_options(*URLS, port=port, admin_port=admin_port)
        with pytest.raises(CannotListen, match=f"port {admin_port}: .*in use.*--admin-port"):
            async with running_proxy(config):
                pass
        with socket.socket() as again:
            again.bind(("127.0.0.1", port))


# A guessed prompt


async def snapshot_of(f: Fleet) -> bytes:
    await until(lambda: f.pods)
    await f.pod(f.prefill[0]).store(PROMPT)
    await f.events_applied()
    await f.ask()
    path = f"/debug/route/{f.routed.decision.request_id}?snapshot=1"
    return (await f.send(path, method="GET")).body


@in_loop
async def test_a_guessed_prompt_cannot_be_confirmed_from_a_snapshot():
    """Without a key the hashes of a guess are found in it, one block after the other, offline."""
    guess = {external(full) for full in chain(SCHEME, ASKED)}
    async with fleet(num_prefill=1) as f:
        body = await snapshot_of(f)
        held = {hash_ for pod in json.loads(body)["pods"].values() for b in pod["blocks"]
                for hash_ in b["hashes"]}  # fmt: skip
        assert len(held) == len(guess)  # it has every block, under another hash
        assert not guess & (held | set(json.loads(body)["request"]["hashes"]))
        caches, lookup = f.router.caches, f.routed.decision.lookup
        assert lookup is not None
        plain = take_snapshot(
            caches.index, lookup.prompts[SCHEME], caches.weights, [f.prefill[0].url]
        )
        found = {hash_ for b in plain.pods[f.prefill[0].url].blocks for hash_ in b.hashes}
        assert found == guess, "the control: this is what is disguised"
        assert (
            explain_snapshot(read_snapshot(body))[f.prefill[0].url]
            == (explain_snapshot(plain)[f.prefill[0].url])
        ), "scores are the same"


@in_loop
async def test_two_boots_disguise_the_same_prompt_differently():
    async with fleet(num_prefill=1) as f:
        one = json.loads(await snapshot_of(f))["request"]["hashes"]
    async with fleet(num_prefill=1) as f:
        two = json.loads(await snapshot_of(f))["request"]["hashes"]
    assert len(one) == len(two) > 0
    assert not set(one) & set(two)


# Addresses of engines


async def shown_text(d) -> str:
    """All that a client gets to read: answers, refusals, headers."""
    replies = [
        await d.complete(),
        await d.send("/v1/models", method="GET"),
        await d.send(d.proxy.url + "/health", method="GET"),
    ]
    for engine in d.prefill + d.decode:
        await engine.stop()
    replies += [await d.complete(), await d.send("/v1/models", method="GET")]
    replies += [await d.send(d.proxy.url + "/health", method="GET")]
    assert [reply.status for reply in replies] == [200, 200, 200, 503, 503, 503]
    return "\n".join(f"{dict(reply.headers)} {reply.body.decode()}" for reply in replies)


@pytest.mark.parametrize("shown", [False, True])
@in_loop
async def test_clients_learn_engines_addresses_only_if_they_may(shown, caplog):
    """Without the option any client draws the network behind the proxy."""
    async with deployment(show_engines=shown) as d:
        text = await shown_text(d)
        for engine in d.prefill + d.decode:
            assert (str(engine.port) in text) is shown
        assert ("Connection refused" in text) is shown
        assert "no decode engine answers" in text
        # The log and the admin pages always say it.
        assert any(d.decode[0].url in record.getMessage() for record in caplog.records)
        health = json.loads((await d.send(d.proxy.admin_url + "/health", method="GET")).body)
        assert health["decode"][0]["engine"] == d.decode[0].url
