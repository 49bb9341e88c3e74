"""Engines that come, go, start anew and garble: what the router knows follows them."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdconn.router.events.caches import PrefixCaches
from pdconn.router.events.feeds import EventFeeds
from pdconn.router.fleet.member import Member, Role
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_server import Limits, running_proxy
from pdconn.tools.lab.ports import free_ports
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.routed import PROMPT, Fleet, Pod, fleet, other_prompt
from tests.router.events.publisher import Publisher


@in_loop
async def test_an_engine_that_starts_anew_holds_nothing_of_before():
    async with fleet() as f:
        engine = f.prefill[0]
        pod = f.pod(engine)
        await pod.store(PROMPT)
        await f.events_applied()
        assert (await f.ask()).hit_tokens(engine.url) == 320
        await pod.publisher.die()
        pod.publisher = Publisher(pod.ports)
        await pod.store(other_prompt(1)[:16])
        await until(lambda: f.of_pod("blocks", pod) == 1)
        assert (await f.ask()).hit_tokens(engine.url) == 0
        assert f.of_pod("restarts_total", pod) == 1
        await pod.store(PROMPT)
        await until(lambda: f.of_pod("blocks", pod) == 21)
        assert (await f.ask()).prefill == engine.url


@in_loop
async def test_events_that_cannot_be_read_are_counted_and_the_router_goes_on():
    async with fleet() as f:
        engine = f.prefill[1]
        pod = f.pod(engine)
        for garbage in ((b"",), (b"", b"\0" * 8), (b"x", b"\xff" * 8, b"\xc1"), (b"",) * 9):
            await pod.publisher.wire(*garbage)
        await pod.publisher.publish({"type": "BlockMoved"})
        await pod.store(PROMPT, token_ids=["x"] * 320)  # does not reveal its hash scheme
        await pod.store(other_prompt(1)[:16])
        await until(lambda: f.of_pod("blocks", pod) == 21)
        page = (await f.send("/metrics", method="GET")).body.decode()
        label = f'{{pod="{engine.url}"}}'
        assert f"pdconn_router_pod_malformed_messages_total{label} 4.0" in page
        assert f"pdconn_router_pod_undecodable_events_total{label} 1.0" in page
        assert f"pdconn_router_pod_complete{label} 0.0" in page
        other = f'{{pod="{f.prefill[0].url}"}}'
        assert f"pdconn_router_pod_malformed_messages_total{other} 0.0" in page
        assert f"pdconn_router_pod_complete{other} 1.0" in page
        assert (await f.ask()).prefill == engine.url


def fleet_file(engines: dict[FakeEngine, str], pods: dict[FakeEngine, Pod]) -> str:
    tables = []
    for engine, role in engines.items():
        table = f'[[engine]]\nurl = "{engine.url}"\nroles = ["{role}"]\n'
        if engine in pods:
            events, replay = pods[engine].ports
            table += f'events = "tcp://{{host}}:{events}"\nreplay = "tcp://{{host}}:{replay}"\n'
        tables.append(table)
    return "\n".join(tables)


@asynccontextmanager
async def router_by_file(tmp_path: Any, num_prefill: int = 2) -> AsyncIterator:
    """A fleet, and a second router over the same engines, with its members from a file."""
    path = tmp_path / "fleet.toml"
    async with fleet(num_prefill) as f:
        all_of_them = {**dict.fromkeys(f.prefill, "prefill"), f.decode[0]: "decode"}
        pods = {engine: f.pod(engine) for engine in f.prefill}

        def write(engines: dict[FakeEngine, str], pods: dict[FakeEngine, Pod] = pods) -> None:
            (tmp_path / "new").write_text(fleet_file(engines, pods), encoding="utf-8")
            (tmp_path / "new").rename(path)

        write(all_of_them)
        config = ProxyConfig.from_options([], [], fleet=str(path), port=0)
        async with running_proxy(config, limits=Limits(fleet_interval_s=0.02)) as proxy:
            parts = (f.prefill, f.decode, f.leases, proxy, f.client)
            yield Fleet(*parts, {pod.name: pod for pod in pods.values()}), write


@in_loop
async def test_an_engine_that_leaves_the_fleet_leaves_every_table(tmp_path):
    async with router_by_file(tmp_path) as (f, write):
        gone, stays = f.prefill
        for engine in f.prefill:
            await f.pod(engine).store(PROMPT)
        await f.events_applied()
        gone.cached_tokens = stays.cached_tokens = 0
        for _ in range(8):
            await f.ask()
        assert set(f.router.trust) == {gone.url, stays.url}
        write({stays: "prefill", f.decode[0]: "decode"})
        caches = f.router.caches
        await until(lambda: gone.url not in caches.index.pods)
        assert (set(caches.feeds), set(f.router.trust)) == ({stays.url}, {stays.url})
        page = (await f.send("/metrics", method="GET")).body.decode()
        assert (gone.url in page, stays.url in page) == (False, True)
        assert caches.index.num_hashes == 20
        assert (await f.ask()).prefill == stays.url
        write({stays: "prefill", f.decode[0]: "decode"}, {})  # it publishes no more
        await until(lambda: not caches.feeds)
        assert caches.index.num_hashes == 0
        assert "no engine publishes" in ((await f.ask()).unknown or "")


@in_loop
async def test_an_engine_that_publishes_elsewhere_now_is_believed_from_there_only(tmp_path):
    """Else blocks of the old address stay for ever, or count twice and outlive a removal."""
    async with router_by_file(tmp_path, num_prefill=1) as (f, write):
        (engine,) = f.prefill
        await f.pod(engine).store(PROMPT)
        await f.pod(engine).store(other_prompt(2))
        await f.events_applied()
        index = f.router.caches.index
        assert index.num_hashes == 40
        ports = tuple(free_ports(2))
        moved = Pod(engine.url, ports, Publisher(ports))
        try:
            await moved.store(PROMPT)
            write({engine: "prefill", f.decode[0]: "decode"}, {engine: moved})
            await until(lambda: index.num_hashes == 20)
            assert (await f.ask()).hit_tokens(engine.url) == 320
            await moved.remove(PROMPT)
            await until(lambda: index.num_hashes == 0)
            assert (await f.ask()).hit_tokens(engine.url) == 0
            assert f.router.caches.feeds[engine.url].source.events.endswith(str(ports[0]))
        finally:
            await moved.publisher.die()


@in_loop
async def test_a_new_address_is_listened_to_once_the_old_one_is_forgotten():
    class Slow:
        def __init__(self, source, sink, **others):
            self.port = source.events[-1]

        def start_receiving(self):
            log.append(f"start {self.port}")

        async def close(self):
            await may_close.wait()
            log.append(f"closed {self.port}")

    class Forgetful(PrefixCaches):
        def forget_source(self, source):
            log.append(f"forgot {source.events[-1]}")

    log: list[str] = []
    may_close = asyncio.Event()
    feeds = EventFeeds(Forgetful(), Slow)
    other = Member("http://q:1", frozenset({Role.PREFILL}), "tcp://h:9")
    for port in (1, 2, 1, 3):
        feeds.fleet_changed(
            [Member("http://p:1", frozenset({Role.PREFILL}), f"tcp://h:{port}"), other]
        )
    assert log == ["start 1", "start 9"]
    may_close.set()
    await until(lambda: "start 3" in log)
    assert log[2:].index("start 3") > max(i for i, one in enumerate(log[2:]) if "forgot" in one)
    assert [one for one in log if "start" in one] == ["start 1", "start 9", "start 3"]
    await feeds.close()


@in_loop
async def test_hundreds_of_ranks_are_listened_to(caplog):
    """Each takes up to 4 sockets, and a context of ZeroMQ has 1023 by default."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        pytest.skip(f"needs 4096 open files, has {soft}")
    caches, engine = PrefixCaches(), frozenset({Role.PREFILL})
    feeds = EventFeeds(caches)
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"  # nothing listens there
    feeds.fleet_changed(Member(f"http://p{number}:1", engine, address) for number in range(400))
    await asyncio.sleep(0.05)  # one that cannot listen fails at once
    assert "failed" not in caplog.text
    assert len(feeds.statuses()) == 400
    await feeds.close()
    assert (feeds.statuses(), caches.feeds) == ({}, {})
