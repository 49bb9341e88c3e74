"""The proxy as a server: odd requests, its pages, its start and its end."""

import asyncio
import io
import json
import socket

import pytest

from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import CannotListen, EnginesMissing
from pdconn.router.router_server import Limits, running_proxy
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, hang


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        (b"{", "body", "not JSON"),
        (b"[]", "body", "JSON object"),
        (b'{"model": "m"}', "prompt", "nothing"),
        (b'{"prompt": 1}', "prompt", "a number"),
        (b'{"prompt": "x", "kv_transfer_params": {"a": 1}}', "kv_transfer_params", "may not"),
    ],
)
@in_loop
async def test_a_bad_body_is_refused_in_the_shape_clients_know(raw, param, words):
    async with deployment() as d:
        reply = await d.send("/v1/completions", raw)
        assert reply.status == 400
        assert reply.headers["Content-Type"].startswith("application/json")
        assert set(reply.error) == {"message", "type", "param", "code"}
        assert (reply.error["type"], reply.error["code"]) == ("BadRequestError", 400)
        assert reply.error["param"] == param
        assert words in reply.error["message"]
        assert not d.prefill[0].seen
        assert d.outcome("refused") == 1


@pytest.mark.parametrize("announced", [True, False])
@in_loop
async def test_a_body_that_is_too_long_is_refused(announced):
    raw = json.dumps({"prompt": "x" * 5000}).encode()

    async def pieces():
        for start in range(0, len(raw), 1000):
            yield raw[start : start + 1000]

    async with deployment(max_body_mib=4096 / 2**20) as d:
        async with d.client.post(
            d.url("/v1/completions"), data=raw if announced else pieces()
        ) as response:
            assert response.status == 413
            assert "4096 bytes" in (await response.json())["error"]["message"]
        assert not d.prefill[0].seen
        fits = json.dumps({"prompt": "x" * 4000}).encode()
        assert (await d.send("/v1/completions", fits)).status == 200


@in_loop
async def test_a_body_of_megabytes_passes_whole():
    async with deployment() as d:
        raw = json.dumps({"prompt": "x" * (3 << 20)}).encode()
        assert (await d.send("/v1/completions", io.BytesIO(raw))).status == 200
        for engine in (d.prefill[0], d.decode[0]):
            assert engine.seen[0].body["prompt"] == "x" * (3 << 20)


@pytest.mark.parametrize(("method", "path"), [("POST", "/sleep"), ("GET", "/no")])
@in_loop
async def test_what_is_not_served_is_refused_with_what_is(method, path):
    async with deployment() as d:
        reply = await d.send(path, method=method)
        assert reply.status == 404
        assert "/v1/chat/completions" in reply.error["message"]
        assert path in reply.error["message"]


@in_loop
async def test_the_metrics_page_holds_every_series_from_the_start():
    async with deployment() as d:
        reply = await d.send("/metrics", method="GET")
        text = reply.body.decode()
        for line in (
            'pdconn_router_requests_total{outcome="ok",route="/v1/completions"} 0.0',
            'pdconn_router_direct_requests_total{reason="several_prompts"} 0.0',
            f'pdconn_router_engine_up{{engine="{d.prefill[0].url}",role="prefill"}} 1.0',
            "pdconn_router_inflight_requests 0.0",
            "pdconn_router_time_to_ticket_seconds_count 0.0",
            "pdconn_router_decode_first_byte_seconds_count 0.0",
            'pdconn_router_unused_tickets_total{outcome="returned"} 0.0',
        ):
            assert line in text
        await d.complete()
        text = (await d.send("/metrics", method="GET")).body.decode()
        assert "pdconn_router_time_to_ticket_seconds_count 1.0" in text


@in_loop
async def test_a_client_cannot_grow_the_metrics():
    async with deployment() as d:
        before = (await d.send("/metrics", method="GET")).body.count(b"\n")
        for i in range(5):
            await d.complete(model=f"m{i}", prompt=f"{i}")
            await d.send(f"/nowhere/{i}", b"")
        assert (await d.send("/metrics", method="GET")).body.count(b"\n") == before


@in_loop
async def test_leaving_the_block_lets_requests_finish():
    async with deployment(drain_timeout_s=60.0) as d:
        d.decode[0].admission_s = 0.3
        asking = asyncio.create_task(d.complete())
        await until(lambda: d.decode[0].seen)
        d_exit = asyncio.get_running_loop().time()
    assert (await asking).body == ANSWER
    assert asyncio.get_running_loop().time() - d_exit < 30  # no longer than they need


@in_loop
async def test_requests_that_do_not_finish_are_cut_off_and_aborted():
    async with deployment(drain_timeout_s=0.2, limits=Limits(patience_s=0.1)) as d:
        d.decode[0].script = hang
        asking = asyncio.create_task(d.complete())
        await until(lambda: d.decode[0].seen)
        outcome = d.outcome
        engine = d.decode[0]
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.exception() is not None
    assert outcome("cut_off") == 1
    assert engine.aborted


@in_loop
async def test_a_port_in_use_is_an_error_at_once_with_its_number():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = ProxyConfig.from_options(
            ["http://127.0.0.1:1"], ["http://127.0.0.1:1"], port=port, wait_s=9
        )
        with pytest.raises(CannotListen, match=f"port {port}: Address already in use"):
            async with running_proxy(config):
                pass


@in_loop
async def test_a_host_that_is_not_ours_is_an_error():
    config = ProxyConfig.from_options(["http://a:1"], ["http://b:1"], host="192.0.2.1")
    with pytest.raises(CannotListen, match=r"192\.0\.2\.1"):
        async with running_proxy(config):
            pass


@in_loop
async def test_the_wait_ends_when_every_engine_answers():
    progress = []
    async with deployment(num_prefill=2) as d:
        late = d.prefill[1]
        await late.stop()
        config = ProxyConfig.from_options(
            [e.url for e in d.prefill], [d.decode[0].url], port=0, wait_s=5.0
        )

        async def start_later():
            await until(lambda: len(progress) == 2)
            await late.start()

        starting = asyncio.create_task(start_later())
        async with running_proxy(
            config, progress.append, limits=Limits(ready_pause_s=0.02)
        ) as proxy:
            assert proxy.url
        await starting
    assert [(p.num_ready, p.num_engines) for p in progress] == [(1, 3), (2, 3), (3, 3)]
    assert progress[-1].engine == late.url


@in_loop
async def test_the_wait_is_over_in_time_if_each_role_has_an_engine():
    async with deployment(num_prefill=2) as d:
        await d.prefill[0].stop()
        config = ProxyConfig.from_options(
            [e.url for e in d.prefill], [d.decode[0].url], port=0, wait_s=0.1
        )
        async with (
            running_proxy(config) as proxy,
            d.client.post(proxy.url + "/v1/completions", json={"prompt": "x"}) as response,
        ):
            assert response.status == 200


@in_loop
async def test_a_role_without_an_engine_ends_the_wait_by_name():
    async with deployment() as d:
        await d.decode[0].stop()
        config = ProxyConfig.from_options([d.prefill[0].url], [d.decode[0].url], port=0, wait_s=0.1)
        with pytest.raises(EnginesMissing, match=d.decode[0].url) as caught:
            async with running_proxy(config):
                pass
        assert [miss.engine for miss in caught.value.failures] == [d.decode[0].url]


def test_the_check_for_what_is_left_behind_can_fail():
    @in_loop
    async def careless():
        tasks.append(asyncio.create_task(asyncio.sleep(60)))

    tasks = []
    with pytest.raises(AssertionError, match="tasks left behind"):
        careless()
