"""The fleet's warm-up: every pair hands over once, and a failure delays no client."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web
from multidict import CIMultiDict

from pdconn.router.fleet import warm_up
from pdconn.router.fleet.engine_client import EngineClient
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.warm_up import FleetWarmUp, WarmUpPauses
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import FakeEngine, Leases, Seen, error

PAUSES = WarmUpPauses(0.01, 0.02)


def asked(engine: FakeEngine) -> list[Seen]:
    return [seen for seen in engine.seen if seen.path == "/v1/completions"]


def prompts(engine: FakeEngine) -> list[str]:
    return [seen.body["prompt"] for seen in asked(engine)]


@dataclass
class Fleet:
    """Engines, and a warm-up over them without a router."""

    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    leases: Leases
    engines: EngineRegistry
    warm_up: FleetWarmUp
    sent: list[bytes]


@asynccontextmanager
async def fleet(
    num_prefill: int, num_decode: int, limit_s: float | None = 20.0
) -> AsyncIterator[Fleet]:
    leases = Leases()
    every = [FakeEngine(leases) for _ in range(num_prefill + num_decode)]
    async with AsyncExitStack() as stack:
        for engine in every:
            await engine.start()
            stack.push_async_callback(engine.stop)
        prefill, decode = every[:num_prefill], every[num_prefill:]
        engines = EngineRegistry([e.url for e in prefill], [e.url for e in decode])
        client = EngineClient(2.0)
        stack.push_async_callback(client.close)
        sent: list[bytes] = []

        async def send(raw: bytes, headers: CIMultiDict[str]) -> None:
            sent.append(raw)

        warm_up = FleetWarmUp(engines, client, limit_s, send, pauses=PAUSES, pair_s=5.0)
        stack.push_async_callback(warm_up.close)
        yield Fleet(prefill, decode, leases, engines, warm_up, sent)


@in_loop
async def test_every_pair_hands_over_once() -> None:
    async with fleet(2, 3) as f:
        await f.warm_up.wait_until_warm()
        assert f.warm_up.num_warm == 6
        assert [len(asked(engine)) for engine in f.prefill] == [3, 3]
        assert [len(asked(engine)) for engine in f.decode] == [2, 2, 2]
        seen = [each for engine in f.decode for each in asked(engine)]
        assert all("lease" in each.params for each in seen)
        assert set(Counter(each.body["prompt"] for each in seen).values()) == {1}
        assert not f.leases.held, "decode has used each ticket"


@in_loop
async def test_each_engine_is_warm_before_any_comes_again() -> None:
    async with fleet(3, 3) as f:
        await f.warm_up.wait_until_warm()
        firsts = {prompts(engine)[0] for engine in f.prefill}
        assert {prompts(engine)[0] for engine in f.decode} == firsts


UNVERIFIED = "pdconn:pulls_unverified_total"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@in_loop
async def test_a_pair_whose_pulls_fail_is_not_warm_and_the_cause_is_logged(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Decode computes the prompt and answers all the same, or it answers 500, as by default."""
    caplog.set_level("WARNING")
    async with fleet(1, 2, limit_s=0.01) as f:
        f.decode[0].pull_fails, f.decode[0].policy = UNVERIFIED, policy
        await f.warm_up.wait_until_warm()
        await until(lambda: f.warm_up.num_warm == 1)  # the other pair
        await until(lambda: len(asked(f.decode[0])) > 2)  # it is tried again
        (line,) = [one.getMessage() for one in caplog.records if "not warm" in one.getMessage()]
        assert f.decode[0].url in line
        assert "without checksums to compare" in line
        assert '"verify" on prefill' in line
        f.decode[0].pull_fails = None
        await until(lambda: f.warm_up.num_warm == 2)


@in_loop
async def test_a_pair_of_which_decode_says_nothing_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with fleet(1, 1) as f:
        f.decode[0].metrics_page = "vllm:num_requests_running 0\n"
        await f.warm_up.wait_until_warm()
        assert f.warm_up.num_warm == 0
        assert not asked(f.prefill[0])
        assert "counts no pulls" in caplog.text


@in_loop
async def test_counters_that_come_with_the_next_step_are_waited_for() -> None:
    """vLLM hands counters on with its steps: those of an answer's last step come with the next."""
    async with fleet(1, 1) as f:
        decode = f.decode[0]

        async def late(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
            counted = dict(decode.counts)
            answer = await engine.answer(seen, http)
            if seen.params:
                decode.metrics_page = "".join(f"{name} {n}\n" for name, n in counted.items())
            else:
                decode.metrics_page = None
            return answer

        decode.script = late
        await f.warm_up.wait_until_warm()
        assert f.warm_up.num_warm == 1


@in_loop
async def test_a_decode_that_computes_without_a_try_is_not_warm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose connector takes no ticket, as with kv_role kv_producer on both."""
    monkeypatch.setattr(warm_up, "COUNTED_S", 0.05)
    async with fleet(1, 1, limit_s=0.01) as f:

        async def take_no_ticket(engine: FakeEngine, seen: Seen) -> bool:
            return True

        monkeypatch.setattr(FakeEngine, "pull", take_no_ticket)
        await f.warm_up.wait_until_warm()
        await until(lambda: "it computed the prompt itself" in caplog.text)
        assert f.warm_up.num_warm == 0


@in_loop
async def test_the_router_warms_its_fleet_before_it_listens() -> None:
    async with deployment(1, 2, warm_up_s=20.0) as d:
        of_pairs, of_the_router = 2, 1
        assert len(asked(d.prefill[0])) == of_pairs + of_the_router
        assert sum(len(asked(engine)) for engine in d.decode) == of_pairs + of_the_router
        assert all(map(asked, d.decode))
        assert d.outcome("ok") == 0, "no client has asked"
        assert (await d.complete()).status == 200


@in_loop
async def test_without_the_option_no_engine_is_asked() -> None:
    async with fleet(1, 1, limit_s=None) as f, deployment(1, 1) as d:
        f.warm_up.fleet_changed()
        f.warm_up.engine_up(f.decode[0].url)
        await f.warm_up.wait_until_warm()
        await asyncio.sleep(0.05)
        assert not any(map(asked, (*f.prefill, *f.decode, *d.prefill, *d.decode)))


@in_loop
async def test_an_engine_that_hangs_delays_the_start_by_the_limit_at_most() -> None:
    released = asyncio.Event()

    async def hang(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
        await released.wait()
        return await engine.answer(seen, http)

    async with fleet(1, 1, limit_s=0.05) as f:
        f.prefill[0].script = hang
        await f.warm_up.wait_until_warm()
        assert f.warm_up.num_warm == 0
        released.set()
        await until(lambda: f.warm_up.num_warm == 1)  # it went on meanwhile


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_failure_is_tried_again(status: int) -> None:
    @in_loop
    async def run() -> None:
        left = [3]

        async def fail(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
            left[0] -= 1
            return error(status, "busy") if left[0] >= 0 else await engine.answer(seen, http)

        async with fleet(1, 1) as f:
            f.decode[0].script = fail
            await f.warm_up.wait_until_warm()
            assert f.warm_up.num_warm == 1
            assert len(asked(f.decode[0])) == 4

    run()


@in_loop
async def test_what_an_engine_refuses_is_not_tried_again() -> None:
    async def refuse(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
        return error(401, "a key, please")

    async with fleet(1, 2) as f:
        f.decode[0].script = refuse
        await f.warm_up.wait_until_warm()
        assert f.warm_up.num_warm == 1
        assert len(asked(f.decode[0])) == 1


@in_loop
async def test_an_engine_that_lends_nothing_is_left_alone() -> None:
    async with fleet(1, 1) as f:
        f.prefill[0].lends = False
        await f.warm_up.wait_until_warm()
        assert f.warm_up.num_warm == 0
        assert not asked(f.decode[0])
        assert not f.sent, "a request through the router would fail, too"


@in_loop
async def test_an_engine_that_comes_back_is_warmed_again_and_no_other() -> None:
    async with fleet(1, 2) as f:
        await f.warm_up.wait_until_warm()
        f.warm_up.engine_up(f.decode[1].url)
        await f.warm_up.wait_until_warm()
        assert [len(asked(engine)) for engine in f.decode] == [1, 2]


@in_loop
async def test_one_that_is_down_is_warmed_once_it_is_up() -> None:
    async with fleet(1, 1) as f:
        await f.decode[0].stop()
        f.warm_up.fleet_changed()
        await asyncio.sleep(0.1)
        assert not asked(f.prefill[0]), "it would lend for nothing"
        await f.decode[0].start()
        await f.warm_up.wait_until_warm()
        assert f.warm_up.num_warm == 1
        assert f.engines.outage(f.decode[0].url) is None, "a warm-up marks no engine down"


@in_loop
async def test_the_table_forgets_engines_that_left() -> None:
    async with fleet(2, 2) as f:
        await f.warm_up.wait_until_warm()
        assert f.warm_up.num_warm == 4
        f.engines.update([])
        f.warm_up.fleet_changed()
        assert f.warm_up.num_warm == 0


@in_loop
async def test_engines_that_ask_for_a_key_are_warmed_with_the_routers(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("good\n", encoding="utf-8")
    async with deployment(1, 1, warm_up_s=20.0, engine_key_file=str(key)) as d:
        seen = [one for engine in (*d.prefill, *d.decode) for one in asked(engine)]
        assert len(seen) == 4
        assert {one.headers.get("Authorization") for one in seen} == {"Bearer good"}
    async with deployment(1, 1, warm_up_s=20.0) as d:
        seen = asked(d.prefill[0])
        assert {one.headers.get("Authorization") for one in seen} == {None}
