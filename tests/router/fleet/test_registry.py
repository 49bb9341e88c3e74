"""Engines that come, drain and go while requests run."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from pdconn.router.fleet.engine_client import ConnectFailed, EngineClient, OutOfResources
from pdconn.router.fleet.engine_registry import Changes, EngineRegistry
from pdconn.router.fleet.health import Health
from pdconn.router.fleet.member import Member, Role
from pdconn.router.router_errors import EngineFailure
from pdconn.router.router_metrics import RouterMetrics
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import CHUNKS, FakeEngine, Leases

P, D = frozenset({Role.PREFILL}), frozenset({Role.DECODE})
A, B, C = "http://a:1", "http://b:1", "http://c:1"


def fleet(*decode: str, draining: tuple[str, ...] = ()) -> list[Member]:
    return [Member(A, P), *(Member(url, D, draining=url in draining) for url in decode)]


def test_an_update_says_what_it_changed():
    engines = EngineRegistry.from_members(fleet(B, C))
    assert not engines.update(fleet(B, C))
    assert engines.update(fleet(B, draining=(B,))) == Changes(removed=(C,), drained=(B,))
    assert engines.update(fleet(B, C)) == Changes(added=(C,), resumed=(B,))
    changes = engines.update([Member(A, P | D), Member(B, D), Member(C, D)])
    assert changes == Changes(roles_changed=(A,))
    assert str(changes) == f"roles_changed={A}"
    assert engines.names == (A, B, C)


def test_engines_by_url_and_by_member_are_the_same():
    plain, configured = EngineRegistry([A], [B, C]), EngineRegistry.from_members(fleet(B, C))
    for role in Role:
        assert plain.in_role(role) == configured.in_role(role)
    assert not plain.update(fleet(B, C))


def test_an_engine_that_two_members_tell_of_is_offered_once():
    engines = EngineRegistry.from_members(
        [Member(A, P), Member(A, P | D), Member(A, D, draining=True)]
    )
    assert (engines.in_role(Role.PREFILL), engines.in_role(Role.DECODE)) == ((A,), (A,))
    assert engines.is_draining(A)


def test_an_engine_that_drains_is_a_member_but_not_offered():
    engines = EngineRegistry.from_members(fleet(B, C, draining=(B,)))
    assert engines.in_role(Role.DECODE) == (B, C)
    assert engines.live(Role.DECODE) == (C,)
    assert engines.failures(Role.DECODE) == (EngineFailure(B, "draining"),)
    engines.mark_down(B, "refused")
    engines.mark_down(C, "refused")
    assert engines.failures(Role.DECODE) == (
        EngineFailure(B, "draining"),
        EngineFailure(C, "refused"),
    )


def test_the_outage_of_an_engine_that_went_is_forgotten_and_of_one_that_stays_is_not():
    engines = EngineRegistry.from_members(fleet(B, C))
    for _ in range(3):
        engines.mark_down(B, "refused")
        engines.mark_down(C, "refused")
    engines.update(fleet(C))
    assert engines.outage(B) is None
    assert engines.outage(C).num_failures == 3
    engines.update(fleet(B, C))
    assert engines.live(Role.DECODE) == (B,)


def test_an_unknown_engine_cannot_be_down():
    engines = EngineRegistry.from_members(fleet(B))
    with pytest.raises(KeyError):
        engines.mark_down(C, "refused")
    assert A in engines
    assert C not in engines


# What is kept per engine


@asynccontextmanager
async def health_of(engines: EngineRegistry):
    upstream, metrics = EngineClient(20.0), RouterMetrics(engines)
    health = Health(engines, upstream, metrics.engine_up)
    try:
        yield health, metrics
    finally:
        await health.close()
        await upstream.close()


def probing() -> list[str]:
    return [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("probe http")]


@asynccontextmanager
async def fake_engines(number: int):
    engines = [FakeEngine(Leases()) for _ in range(number)]
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


@pytest.mark.parametrize("notified", [True, False])
@in_loop
async def test_an_engine_that_went_is_not_probed(notified):
    first_backoff_s = 0.01 if notified else 0.1
    async with fake_engines(1) as (fake,):
        fake.health_status = 503
        engines = EngineRegistry.from_members(fleet(fake.url), first_backoff_s=first_backoff_s)
        async with health_of(engines) as (health, _):
            health.report_down(fake.url, "refused", "r")
            if notified:
                await until(lambda: fake.num_probes >= 2)  # the control: it is probed
            engines.update(fleet(B))
            if notified:
                health.fleet_changed()
                await asyncio.sleep(0.01)
                assert not probing()
            await until(lambda: not probing())  # in time, even without a notice
            await asyncio.sleep(0.02)  # one may be on its way
            num_probes = fake.num_probes
            await asyncio.sleep(0.05)
            assert fake.num_probes == num_probes
            assert engines.outage(fake.url) is None


@in_loop
async def test_an_engine_that_came_back_is_probed_by_one_task():
    first_backoff_s = 0.05
    async with fake_engines(1) as (fake,):
        fake.health_status = 503
        engines = EngineRegistry.from_members(fleet(fake.url), first_backoff_s=first_backoff_s)
        async with health_of(engines) as (health, _):
            for _ in range(5):
                health.report_down(fake.url, "refused", "r")
                engines.update(fleet(B))
                health.report_down(fake.url, "of a request still under way", "r")
                engines.update(fleet(fake.url))
                assert engines.outage(fake.url) is None
            health.report_down(fake.url, "refused", "r")
            assert len(probing()) == 6  # no listener was notified of the changes
            await until(lambda: len(probing()) == 1)
            assert engines.outage(fake.url).num_failures <= 3


@in_loop
async def test_more_engines_than_at_the_start_are_probed():
    first_backoff_s = 0.01
    async with fake_engines(4) as fakes:
        engines = EngineRegistry.from_members(fleet(B), first_backoff_s=first_backoff_s)
        async with health_of(engines) as (health, _):
            engines.update(fleet(*(fake.url for fake in fakes)))
            for fake in fakes:
                health.report_down(fake.url, "refused", "r")
            assert engines.live(Role.DECODE) == ()
            await until(lambda: len(engines.live(Role.DECODE)) == 4)


@in_loop
async def test_health_shows_what_drains_and_needs_one_that_does_not():
    async with fake_engines(3) as (p, d0, d1):
        members = [Member(p.url, P), Member(d0.url, D, draining=True), Member(d1.url, D)]
        engines = EngineRegistry.from_members(members)
        async with health_of(engines) as (health, _):
            page = await health.page(name_engines=True)
            assert page == {
                "status": "ok",
                "prefill": [{"engine": p.url, "up": True, "why": None}],
                "decode": [
                    {"engine": d0.url, "up": True, "why": None, "draining": True},
                    {"engine": d1.url, "up": True, "why": None},
                ],
            }
            d1.health_status = 503
            assert (await health.page(name_engines=True))["status"] == "unavailable"


@in_loop
async def test_an_engine_that_is_shown_as_down_gets_nothing():
    """Until now only a request that failed took it out; a slow answer still does not."""
    async with fake_engines(3) as (p, wrong, d):
        engines = EngineRegistry([p.url, wrong.url], [d.url])
        async with health_of(engines) as (health, _):
            await health.page(name_engines=True)
            assert engines.outage(wrong.url) is None  # the control
            wrong.health_status = 404
            page = await health.page(name_engines=True)
            assert [line["up"] for line in page["prefill"]] == [True, False]
            assert engines.outage(wrong.url).why == "/health answered 404"
            assert engines.outage(p.url) is None
            wrong.health_status = 200
            await health.page(name_engines=True)
            assert engines.outage(wrong.url) is None
            health.report_failed({p.url: "no answer from /health within 2 s"}, "x")
            assert engines.outage(p.url) is None


@in_loop
async def test_health_of_an_engine_that_comes_or_goes_meanwhile():
    async with fake_engines(3) as (p, old, new):
        engines = EngineRegistry([p.url], [old.url])
        async with health_of(engines) as (health, _):
            asking = asyncio.create_task(health.probe_all())
            for _ in range(3):  # the round has begun, and no answer can be here
                await asyncio.sleep(0)
            engines.update([Member(p.url, P), Member(new.url, D)])
            assert await asking == {p.url: None, new.url: "not probed yet"}
            assert await health.probe_all() == {p.url: None, new.url: None}


def test_metrics_show_the_engines_of_now():
    engines = EngineRegistry.from_members(fleet(B))
    metrics = RouterMetrics(engines)

    def shown(family: str, engine: str) -> float | None:
        labels = {"role": "decode", "engine": engine}
        return metrics.registry.get_sample_value(f"pdconn_router_{family}", labels)

    metrics.retried(Role.DECODE, B)
    engines.mark_down(B, "refused")
    engines.update(fleet(B, C, draining=(C,)))
    metrics.fleet_changed()
    assert [shown("engine_up", x) for x in (B, C)] == [0.0, 1.0]
    assert [shown("engine_draining", x) for x in (B, C)] == [0.0, 1.0]
    assert [shown("retries_total", x) for x in (B, C)] == [1.0, 0.0]
    engines.update(fleet(C))
    metrics.fleet_changed()
    metrics.retried(Role.DECODE, B)  # by a request that was under way
    metrics.engine_up(B, up=False)
    assert B.encode() not in metrics.render()
    assert C.encode() in metrics.render()
    assert shown("engine_draining", C) == 0.0


@in_loop
async def test_a_fleet_that_changes_for_ever_leaves_nothing_behind():
    engines = EngineRegistry.from_members(fleet(B))
    async with health_of(engines) as (health, metrics):
        lines = []
        for i in range(20):
            urls = [f"http://d{i}:{port}" for port in (1, 2)]
            engines.update(fleet(*urls))
            for url in urls:
                metrics.retried(Role.DECODE, url)
                health.report_down(url, "refused", "r")
            health.fleet_changed()
            metrics.fleet_changed()
            await asyncio.sleep(0)
            lines.append(metrics.render().count(b"\n"))
        await asyncio.sleep(0.01)
        assert len(set(lines)) == 1
        assert len(probing()) == 2  # those of the last fleet


# With a proxy


def running_fleet(d) -> EngineRegistry:
    return d.proxy.metrics._engines


@pytest.mark.parametrize("goes", ["drains", "goes"])
@in_loop
async def test_an_answer_under_way_is_finished_and_nothing_new_is_asked(goes):
    async with deployment(num_decode=2) as d:
        old, new = d.decode
        for engine in d.decode:
            engine.chunk_pause_s = 0.05
        under_way = asyncio.create_task(d.complete(stream=True))
        await until(lambda: old.seen)
        stay = [Member(d.prefill[0].url, P), Member(new.url, D)]
        left = [Member(old.url, D, draining=True)] if goes == "drains" else []
        running_fleet(d).update([*stay, *left])
        for _ in range(3):
            assert (await d.complete()).status == 200
        assert (await under_way).body == b"".join(CHUNKS)
        assert (len(old.seen), len(new.seen)) == (1, 3)
        assert not d.leases.held


@in_loop
async def test_a_fleet_whose_last_engine_drains_says_so():
    async with deployment() as d:
        p, decode = d.prefill[0].url, d.decode[0].url
        running_fleet(d).update([Member(p, P), Member(decode, D, draining=True)])
        reply = await d.complete()
        assert reply.status == 503
        assert reply.error["engines"] == [{"engine": decode, "why": "draining"}]
        running_fleet(d).update([Member(p, P), Member(decode, D)])
        assert (await d.complete()).status == 200


@in_loop
async def test_an_engine_that_went_and_then_died_is_ignored(caplog):
    async with deployment(num_decode=2) as d:
        old, new = d.decode
        old.admitting.clear()
        under_way = asyncio.create_task(d.complete())
        await until(lambda: old.seen)
        engines = running_fleet(d)
        engines.update([Member(d.prefill[0].url, P), Member(new.url, D)])
        d.proxy.metrics.fleet_changed()
        await old.stop()
        assert (await under_way).status in (200, 503)
        assert engines.outage(old.url) is None
        page = await d.send("/metrics", method="GET")
        assert old.url.encode() not in page.body
        health = json.loads((await d.send("/health", method="GET")).body)
        assert [line["engine"] for line in health["decode"]] == [new.url]


@pytest.mark.parametrize("is_ours", [True, False])
@in_loop
async def test_an_engine_is_not_down_because_this_process_cannot_ask_it(
    is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_engines(1) as (fake,):
        engines = EngineRegistry.from_members(fleet(fake.url))
        async with health_of(engines) as (health, _):

            async def cannot_ask(*args: object) -> object:
                raise (OutOfResources if is_ours else ConnectFailed)("EMFILE")

            monkeypatch.setattr(EngineClient, "get_page", cannot_ask)
            health.suspect(fake.url, "no ticket within 3 s", "r")
            await until(lambda: not health._suspected)
            await health.page(name_engines=True)
            assert (engines.outage(fake.url) is None) == is_ours
            assert await health.probe(fake.url) is not None, "nor is it up"
