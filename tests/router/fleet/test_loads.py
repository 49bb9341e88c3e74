"""How busy engines are: reading a page of metrics, and polling for it."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from pdconn.router.fleet.engine_client import EngineClient
from pdconn.router.fleet.engine_page import _LIMITS, Load, parse_metrics
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.loads import LoadPoller
from pdconn.router.fleet.member import Member, Role
from pdconn.router.fleet.prometheus_page import MAX_LINE, MAX_PARSED
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import FakeEngine, Leases
from transport.testing.inprocess.faults import ManualClock

LABELS = ("model_name", "engine")


def page(**values: list[float]) -> str:
    """As vLLM's page is written: by prometheus_client, one sample per rank."""
    registry = CollectorRegistry()
    for key, per_rank in values.items():
        family, _, name = key.partition("_")
        kind = (
            Counter if "num_kv_expired" in name or name.startswith(("prefix", "leases")) else Gauge
        )
        metric = kind(f"{family}:{name}", "Some text.", LABELS, registry=registry)
        for rank, value in enumerate(per_rank):
            child = metric.labels(model_name='odd "} 9 \\ {name', engine=rank)
            child.inc(value)
    return generate_latest(registry).decode()


def test_queues_are_added_up_and_the_fullest_cache_counts():
    text = page(
        vllm_num_requests_running=[3, 4],
        vllm_num_requests_waiting=[0, 2],
        vllm_kv_cache_usage_perc=[0.25, 0.75],
        vllm_prefix_cache_queries=[1e9, 1],
        vllm_prefix_cache_hits=[10, 20],
    )
    assert parse_metrics(text) == Load(7, 2, 0.75, None, 1_000_000_001, 30)


def test_blocks_that_are_kept_for_sessions_are_no_pressure():
    """They give way, so that a full engine that keeps sessions still gets their turns."""
    used = {"vllm_kv_cache_usage_perc": [0.5, 0.9]}
    kept = {"pdconn_kept_blocks": [0, 60], "pdconn_blocks": [100, 100]}
    assert parse_metrics(page(**used, **kept)).kv_usage == pytest.approx(0.5)
    assert parse_metrics(page(**used)).kv_usage == 0.9
    assert parse_metrics(page(**used, pdconn_kept_blocks=[60])).kv_usage == 0.9
    odd = page(vllm_kv_cache_usage_perc=[0.1], pdconn_kept_blocks=[9], pdconn_blocks=[0])
    assert parse_metrics(odd).kv_usage == 0.0


def test_the_fullest_rank_says_how_much_is_kept_of_what_may_be():
    kept = {"pdconn_kept_blocks": [10, 60], "pdconn_keepable_blocks": [50, 80]}
    assert parse_metrics(page(**kept)).kept_share == 0.75
    assert parse_metrics(page(pdconn_kept_blocks=[60])).kept_share is None
    odd = page(pdconn_kept_blocks=[9], pdconn_keepable_blocks=[0])
    assert parse_metrics(odd).kept_share == 1.0


def test_leases_that_did_not_end_are_lent():
    ended = {"pdconn_leases_read": [5, 1], "pdconn_leases_aborted": [1, 0]}
    text = page(pdconn_leases_granted=[9, 3], **ended, vllm_nixl_num_kv_expired_reqs=[1, 0])
    assert parse_metrics(text).lent_leases == 4
    assert parse_metrics(page(pdconn_leases_granted=[1], **ended)).lent_leases == 0
    assert parse_metrics(page(**ended)).lent_leases is None


@pytest.mark.parametrize("name", ["running", "waiting"])
def test_the_names_are_those_that_vllm_writes(name):
    """The control for the pages above: another name is not read."""
    load = parse_metrics(f"vllm:num_requests_{name} 1\nvllm:num_requests_{name}_by_reason 2\n")
    assert getattr(load, name) == 1
    assert parse_metrics(f"vllm_num_requests_{name} 1") == Load()


def test_other_lines_are_not_looked_at():
    text = """# HELP vllm:num_requests_running junk
# TYPE vllm:num_requests_running gauge
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} nonsense
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 1.0
vllm:num_requests_waiting\t4 1700000000000\r
"""
    assert parse_metrics(text) == Load(waiting=4)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "x", "", "1 2 3", "1e300", "0x10"])
def test_a_number_without_sense_is_counted_and_left_out(value):
    line = f'vllm:num_requests_running{{engine="0"}} {value}\n'
    good = 'vllm:num_requests_running{engine="1"} 2.0\n'
    assert parse_metrics(line) == Load(num_ignored=1)
    assert parse_metrics(line + good) == Load(running=2, num_ignored=1)


def test_usage_is_a_share_of_one():
    assert parse_metrics("vllm:kv_cache_usage_perc 1.0").kv_usage == 1.0
    assert parse_metrics("vllm:kv_cache_usage_perc 50") == Load(num_ignored=1)


def test_a_page_that_is_too_long_is_read_up_to_a_whole_line():
    text = "vllm:num_requests_running 1\n" * 3 + "vllm:num_requests_waiting 123\n"
    assert parse_metrics(text, len(text) - 2) == Load(running=3)
    assert parse_metrics(text, len(text)) == Load(running=3, waiting=123)
    assert parse_metrics(text, 5) == Load()


@given(
    st.lists(
        st.builds(
            str.__add__,
            st.sampled_from(["", *tuple(_LIMITS)]),
            st.text(alphabet=st.sampled_from('{}" \t\n\\0123.eE+-_NaIinf#٣') | st.characters()),
        )
    ).map("\n".join)
)
def test_any_text_has_a_load(text):
    load = parse_metrics(text)
    for name in ("running", "waiting", "lent_leases", "prefix_queries", "prefix_hits"):
        value = getattr(load, name)
        assert value is None or (type(value) is int and value >= 0)
    assert load.kv_usage is None or 0 <= load.kv_usage <= 1


def test_hostile_lines_take_no_time():
    started_s = time.thread_time()
    for junk in ("{}" * 500_000, "} " * 500_000, " " * 1_000_000, '{"' * 500_000):
        parse_metrics("vllm:num_requests_running" + junk)
    # As long as a line may be, and as many as a page holds.
    for junk in ("{" + 'a="b",' * 650 + "} 1", '{="' * 1300, "{" + "," * 4000, " 1" * 2000):
        line = ("vllm:num_requests_running" + junk)[:MAX_LINE] + "\n"
        parse_metrics(line * ((4 << 20) // len(line)))
    assert time.thread_time() - started_s < 5


def test_the_parser_gets_so_many_lines_and_no_more():
    line = 'vllm:num_requests_running{engine="0"} 1\n'
    most = MAX_PARSED // (len(line) - 1)
    assert parse_metrics(line * 2 * most).running == most
    assert parse_metrics(line * 500).running == 500  # the control: more ranks than an engine has
    assert parse_metrics(line[:-2] + "0" * MAX_LINE + "1\n") == Load(num_ignored=1)


# Polling


@asynccontextmanager
async def polled(number: int, **settings):
    fakes = [FakeEngine(Leases()) for _ in range(number)]
    upstream = EngineClient(20.0)
    try:
        for fake in fakes:
            await fake.start()
            fake.metrics_page = f"vllm:num_requests_running {fakes.index(fake)}\n"
        engines = EngineRegistry.from_members(members(*fakes))
        poller = LoadPoller(engines, upstream, **settings)
        yield fakes, engines, poller
        await poller.close()
    finally:
        await upstream.close()
        for fake in fakes:
            await fake.stop()


def members(*fakes: FakeEngine, draining: bool = False) -> list[Member]:
    return [Member(fake.url, frozenset(Role), draining=draining) for fake in fakes]


def running(poller: LoadPoller) -> list[int | None]:
    return sorted(seen.load.running for seen in poller.latest.values())


@in_loop
async def test_each_engine_is_asked_once_whatever_its_roles():
    async with polled(2) as (fakes, _, poller):
        await poller.poll_now()
        assert running(poller) == [0, 1]
        assert [fake.num_polls for fake in fakes] == [1, 1]


@in_loop
async def test_loads_are_polled_by_themselves_until_the_end():
    async with polled(1, interval_s=0.01) as (fakes, _, poller):
        async with poller:
            await until(lambda: fakes[0].num_polls >= 3)
        await asyncio.sleep(0.05)  # one may be on its way
        num_polls = fakes[0].num_polls
        await asyncio.sleep(0.2)
        assert fakes[0].num_polls == num_polls


@in_loop
async def test_a_slow_engine_delays_no_other_and_is_not_asked_twice():
    async with polled(2, interval_s=0.01, timeout_s=60.0) as (fakes, _, poller):
        slow, quick = fakes
        slow.metrics_pause_s = 60.0
        async with poller:
            await until(lambda: quick.num_polls >= 5)
            assert running(poller) == [1]
            assert slow.num_polls == 1


@in_loop
async def test_an_engine_that_is_silent_has_its_time():
    async with polled(2, timeout_s=2.5) as (fakes, _, poller):
        fakes[0].metrics_pause_s = 60.0
        async with asyncio.timeout(30.0):
            await poller.poll_now()
        assert running(poller) == [1]


@in_loop
async def test_an_engine_that_stops_answering_keeps_its_load_with_its_age(caplog):
    clock = ManualClock(50.0)
    async with polled(2, clock=clock) as (fakes, _, poller):
        await poller.poll_now()
        gone, alive = fakes
        await gone.stop()
        clock.advance(3.0)
        for _ in range(3):
            await poller.poll_now()
        assert running(poller) == [0, 1]
        assert poller.fresh(2.0) == {alive.url: Load(running=1)}
        assert set(poller.fresh(3.0)) == {gone.url, alive.url}
        assert sum("load unknown" in r.getMessage() for r in caplog.records) == 1
        await gone.start()
        await poller.poll_now()
        assert set(poller.fresh(0.0)) == {gone.url, alive.url}


@in_loop
async def test_of_a_report_only_requests_of_others_count_beside_what_is_in_flight():
    clock = ManualClock(50.0)
    async with polled(1, clock=clock) as (fakes, _, poller):
        [fake] = fakes
        fake.metrics_page = "vllm:num_requests_running 5\nvllm:num_requests_waiting 2\n"
        ours = [poller.inflight.start_request(fake.url, 10) for _ in range(4)]
        await poller.poll_now()
        assert poller.requests_at(fake.url, 5.0) == (7, 3)
        for flight in ours:
            flight.finish()
        assert poller.requests_at(fake.url, 5.0) == (3, 3)
        poller.inflight.start_request(fake.url, 10)
        assert poller.requests_at(fake.url, 5.0) == (4, 3)
        clock.advance(5.5)
        assert poller.requests_at(fake.url, 5.0) == (1, 0), "it is too old"


@pytest.mark.parametrize("page", [b"x" * 4096, b"\xff\xfe\x00", b""])
@in_loop
async def test_a_page_of_junk_removes_no_engine(page):
    async with polled(2, max_page_nbytes=1024) as (fakes, _, poller):
        fakes[0].metrics_page = page
        await poller.poll_now()
        assert poller.latest[fakes[1].url].load == Load(running=1)
        got = poller.latest.get(fakes[0].url)
        assert got is None if len(page) > 1024 else got.load == Load()


@in_loop
async def test_a_page_that_is_an_error_is_no_load():
    async with polled(1) as (fakes, _, poller):
        fakes[0].metrics_status = 404
        await poller.poll_now()
        assert not poller.latest


@in_loop
async def test_engines_that_went_are_forgotten_and_new_ones_asked():
    async with polled(3) as (fakes, engines, poller):
        engines.update(members(*fakes[:2]))
        await poller.poll_now()
        assert running(poller) == [0, 1]
        engines.update(members(*fakes[1:]))
        poller.fleet_changed()
        assert running(poller) == [1]
        await poller.poll_now()
        assert running(poller) == [1, 2]


@in_loop
async def test_an_engine_that_goes_while_it_answers_leaves_no_load():
    async with polled(2) as (fakes, engines, poller):
        fakes[0].metrics_pause_s = 0.1
        polling = asyncio.create_task(poller.poll_now())
        await until(lambda: fakes[0].num_polls)
        engines.update(members(fakes[1]))
        await polling
        assert running(poller) == [1]


@pytest.mark.parametrize("out", ["down", "draining"])
@in_loop
async def test_engines_that_get_no_requests_are_not_asked(out):
    async with polled(2) as (fakes, engines, poller):
        if out == "down":
            engines.mark_down(fakes[0].url, "refused")
        else:
            engines.update([*members(fakes[0], draining=True), *members(fakes[1])])
        await poller.poll_now()
        assert [fake.num_polls for fake in fakes] == [0, 1]
