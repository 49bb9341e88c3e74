"""The samples that the page draws, the times that Prometheus gets, and the steps of a request."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter

from pdconn.router.admin.history import MOST_NAMES, MOST_SAMPLES, History, _quantile_ms
from pdconn.router.events.caches import Feed, PrefixCaches
from pdconn.router.exposition import render
from pdconn.router.fleet.engine_page import Load
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.loads import LoadPoller, LoadReading
from pdconn.router.fleet.member import Member, Role
from pdconn.router.labels import RequestEnd
from pdconn.router.metric_table import EarlyStart
from pdconn.router.openai.requests import Direct, Route
from pdconn.router.pulls.pull_outcome import PrefixPull, PullEnd
from pdconn.router.router_metrics import MOST_KEPT, RouterMetrics
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.request_events import (
    Began,
    Event,
    FirstByte,
    Over,
    Passed,
    Prefilled,
    Pulled,
    Received,
    RequestEnded,
    StepKind,
    Streamed,
    WentDirect,
)
from pdconn.router.routing.routed_request import Outcome, outcome_of, steps_of
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop, until
from transport.testing.inprocess.faults import ManualClock

PREFILL, DECODE = StepKind.PREFILL, StepKind.DECODE
OK = Outcome(end=RequestEnd.OK, total_s=0.25, decode="d", ticket_s=0.1)
ALONE = Outcome(end=RequestEnd.OK, total_s=0.25, decode="d")
BROKEN = Outcome(end=RequestEnd.BROKEN_STREAM, total_s=0.25, decode="d", ticket_s=0.1)
A, B, C = "http://a", "http://b", "http://c"
LEFT = Outcome(end=RequestEnd.CLIENT_LEFT, total_s=0.25)


def members(names: list[str]) -> list[Member]:
    return [Member(name, frozenset(Role)) for name in names]


def history(names: list[str], load: Load | None = None) -> tuple[History, RouterMetrics, Any]:
    """Samples of engines that do not exist, at times 0, 1, 2 and so on."""
    nobody: Any = None
    engines, caches = EngineRegistry.from_members(members(names)), PrefixCaches()
    caches.feeds = dict.fromkeys(names, Feed(nobody, None))
    loads = LoadPoller(engines, nobody, clock=ManualClock())
    for name in names:
        loads.inflight.start_request(name, 10)
        if load is not None:
            loads.latest[name] = LoadReading(load, 0.0)
    router = RequestRouter(engines, nobody, caches, nobody, loads)
    times = RouterMetrics(EngineRegistry())
    clock = iter(range(10**9))
    return History(router, times, lambda: float(next(clock)), interval_s=2.0), times, router


# Samples


def test_rates_are_of_the_last_ten_seconds_and_shares_of_the_last_thirty():
    made, times, _ = history(["http://p"])
    for outcome in (OK, OK, OK, ALONE, BROKEN, LEFT):
        times.routed_request_ended(Route.COMPLETIONS, outcome)
    first = made.take_sample()
    # six in one interval of two seconds; of the five that decode answered, four with a ticket
    assert (first.requests_per_s, first.failed_per_s, first.handed_over) == (3.0, 0.5, 4 / 5)
    later = [made.take_sample() for _ in range(15)]
    assert [one.requests_per_s for one in later[:5]] == [1.5, 1.0, 0.75, 0.6, 0.0]
    assert [one.handed_over for one in later] == [4 / 5] * 14 + [None]


def test_a_quiet_router_has_no_share_and_no_time_rather_than_zero():
    made, _, _ = history(["http://p"])
    sample = made.take_sample()
    assert (sample.handed_over, sample.ttft_p50_ms, sample.ttft_p95_ms) == (None, None, None)
    assert sample.engines["http://p"].kv_usage is None, "its load is not known"


@given(st.lists(st.floats(0.001, 100), min_size=1), st.sampled_from([0.5, 0.95]))
def test_a_quantile_is_a_time_that_was_seen_and_exceeds_its_share(seconds, share):
    found = _quantile_ms(sorted(seconds), share)
    assert any(found == round(1000 * one, 3) for one in seconds)
    not_above = sum(round(1000 * one, 3) <= found for one in seconds)
    below = sum(round(1000 * one, 3) < found for one in seconds)
    assert not_above >= share * len(seconds)
    assert below < share * len(seconds) or below < 1


def test_samples_names_and_times_are_bounded():
    names = [f"http://e:{1 + number}" for number in range(MOST_NAMES + 50)]
    made, times, _ = history(names, Load(kv_usage=0.5, running=1, waiting=2))
    for _ in range(MOST_KEPT + 10):
        times.first_token(Route.COMPLETIONS, 0.1)
    assert len(times._moment.first_tokens_s) == MOST_KEPT
    for _ in range(MOST_SAMPLES + 20):
        sample = made.take_sample()
    assert len(made) == MOST_SAMPLES
    assert len(sample.engines) == len(sample.pods) == MOST_NAMES


def test_a_page_that_asks_for_what_is_new_gets_each_sample_once():
    made, _, router = history([A, B], Load(kv_usage=0.5, running=1, waiting=2))
    made.take_sample()
    first = json.loads(made.since(0))
    router.engines.update(members([B, C]))  # the fleet changes
    router.loads.inflight.start_request(C, 10)
    made.take_sample(), made.take_sample()
    second = json.loads(made.since(first["samples"][-1]["seq"] + 1))
    assert [one["seq"] for one in first["samples"]] == [0]
    assert [one["seq"] for one in second["samples"]] == [1, 2]
    whole = json.loads(made.since(0))
    assert whole["engines"] == [A, B, C]
    known = [[column is not None for column in one["engines"]] for one in whole["samples"]]
    assert known == [[True, True, False], [False, True, True], [False, True, True]]
    assert first["boot"] == second["boot"]
    assert json.loads(made.since(3))["samples"] == []


@in_loop
async def test_the_router_samples_itself_and_refuses_a_number_that_is_none():
    async with deployment() as d:
        assert (await d.complete(stream=True)).status == 200
        text = (await d.send("/debug/history", method="GET")).body
        assert json.loads(text)["samples"][0]["seq"] == 0
        assert set(json.loads(text)["engines"]) == {d.prefill[0].url, d.decode[0].url}
        for wrong in ("-1", "1e3", "x", "٣", "9" * 16):
            reply = await d.send(f"/debug/history?since={wrong}", method="GET")
            assert (reply.status, reply.error["param"]) == (400, "since"), wrong


# Times


@in_loop
async def test_times_count_streamed_answers_and_requests_that_ended_well():
    async with deployment() as d:
        assert (await d.complete(stream=True)).status == 200
        assert (await d.complete()).status == 200
        assert (await d.complete(model="another")).status == 404
        path = {"route": "/v1/completions"}
        await until(lambda: d.metric("request_seconds_count", **path) == 2)
        assert d.metric("time_to_first_token_seconds_count", **path) == 1
        first_token_s = d.metric("time_to_first_token_seconds_sum", **path)
        assert 0 < first_token_s <= d.metric("request_seconds_sum", **path)
        other = {"route": "/v1/chat/completions"}
        assert d.metric("request_seconds_count", **other) == 0


def test_no_series_tells_when_a_counter_was_made():
    registry = CollectorRegistry()
    Counter("pdconn_router_x_total", "X", registry=registry).inc()
    assert b"_created" not in render(registry)
    assert b"pdconn_router_x_total 1.0" in render(registry)
    assert any(  # the control: prometheus_client has it
        sample.name.endswith("_created") for one in registry.collect() for sample in one.samples
    )


# Steps


def asked(step: StepKind, at_s: float) -> Began:
    return Began(step, "p" if step is PREFILL else "d", at_s=at_s)


def prefilled(began: Began, at_s: float) -> Event:
    return Prefilled(began, True, at_s=at_s)


def first_byte(began: Began, at_s: float) -> Event:
    return FirstByte(began, True, at_s=at_s)


def over(began: Began, at_s: float) -> Event:
    return Over(began, at_s=at_s)


def ended(at_s: float) -> Event:
    return RequestEnded(RequestEnd.OK, 200, at_s=at_s)


def steps(arrived_s: float, received_s: float, *events: Event) -> list[tuple[Any, ...]]:
    found = steps_of([Received(arrived_s, at_s=received_s), *events])
    return [(one.kind.value, one.start_s, one.end_s, one.failed) for one in found]


def test_steps_follow_each_other_from_arrival_to_the_last_byte():
    pull = Pulled(PrefixPull("h", 64, 64, 1.5), at_s=13.5)
    prefill, decode = asked(PREFILL, 12.0), asked(DECODE, 16.0)
    asks = prefill, pull, prefilled(prefill, 16.0), over(prefill, 16.5), decode
    assert steps(10.0, 11.0, *asks, first_byte(decode, 17.0), ended(20.0)) == [
        ("receive", 0.0, 1.0, False),
        ("route", 1.0, 2.0, False),
        ("borrow", 2.0, 3.5, False),
        ("prefill", 3.5, 6.0, False),
        ("decode", 6.0, 7.0, False),
        ("stream", 7.0, 10.0, False),
    ]


def early(at_s: float) -> Event:
    return Streamed(EarlyStart.STARTED, 0.5, at_s=at_s)


def test_decode_that_is_asked_early_follows_beside_prefills_step_until_prefill_answers():
    pull = PrefixPull("h", 64, 64, 0.5)
    prefill, decode = asked(PREFILL, 1.0), asked(DECODE, 2.0)
    asks = prefill, Pulled(pull, at_s=1.5), early(2.0), decode, prefilled(prefill, 5.0)
    taken = Pulled(replace(pull, end=PullEnd.TAKEN), at_s=5.0)
    answered = over(prefill, 5.0), taken, first_byte(decode, 6.0), ended(9.0)
    assert steps(0.0, 0.0, *asks, *answered)[2:] == [
        ("borrow", 1.0, 1.5, False),
        ("prefill", 1.5, 5.0, False),
        ("follow", 2.0, 5.0, False),
        ("decode", 5.0, 6.0, False),
        ("stream", 6.0, 9.0, False),
    ]
    assert steps(0.0, 0.0, *asks[:4])[-1] == ("follow", 2.0, None, False)
    again = asked(DECODE, 5.0)  # prefill lends nothing, and decode computes the prompt
    gone = over(prefill, 4.5), over(decode, 4.5), WentDirect(Direct.PREFILL_ERROR, at_s=4.5)
    answered = again, first_byte(again, 6.0), ended(9.0)
    assert steps(0.0, 0.0, prefill, early(2.0), decode, *gone, *answered)[2:] == [
        ("prefill", 1.0, 4.5, True),
        ("follow", 2.0, 4.5, True),
        ("decode", 5.0, 6.0, False),
        ("stream", 6.0, 9.0, False),
    ]


def test_decode_that_answers_before_prefill_has_followed_until_then():
    prefill, decode = asked(PREFILL, 1.0), asked(DECODE, 2.0)
    first = prefill, early(2.0), decode, first_byte(decode, 3.0)
    assert steps(0.0, 0.0, *first)[2] == ("prefill", 1.0, None, False)
    assert steps(0.0, 0.0, *first, ended(9.0), prefilled(prefill, 9.5))[2:] == [
        ("prefill", 1.0, 9.5, False),
        ("follow", 2.0, 3.0, False),
        ("stream", 3.0, 9.0, False),
    ]


def test_engines_that_are_asked_in_one_moment_have_a_step_each():
    """Two steps that began at the same time were one: the clock may not have moved."""
    prefill, decode = asked(PREFILL, 1.0), asked(DECODE, 1.0)
    assert len({prefill, decode}) == 2
    assert steps(0.0, 0.0, prefill, decode, first_byte(decode, 2.0))[2:] == [
        ("prefill", 1.0, None, False),
        ("decode", 1.0, 2.0, False),
        ("stream", 2.0, None, False),
    ]


def test_an_engine_that_did_not_answer_has_a_failed_step():
    prefill, decode = asked(PREFILL, 2.0), asked(DECODE, 4.0)
    asks = (
        *failing(PREFILL, 1.0, 2.0),
        *(prefill, prefilled(prefill, 3.0)),
        *failing(DECODE, 3.0, 4.0),
        *(decode, first_byte(decode, 5.0)),
    )
    failed = [failed for _, _, _, failed in steps(0.0, 0.0, *asks, ended(9.0))]
    assert failed == [False, False, True, False, True, False, False]
    unanswered = steps(0.0, 0.0, asked(PREFILL, 1.0), ended(2.0))
    assert unanswered[-1] == ("prefill", 1.0, 2.0, True)


def failing(step: StepKind, at_s: float, until_s: float) -> tuple[Event, Event]:
    """An engine is asked, and does not answer."""
    began = asked(step, at_s)
    return began, over(began, until_s)


def test_an_engine_that_fails_after_one_that_refused_has_not_answered():
    """The answer of the first was read as the second's: decode and stream, and none failed."""
    first, second = asked(DECODE, 2.0), asked(DECODE, 3.0)
    refused = FirstByte(first, False, at_s=2.5)
    found = steps(0.0, 0.0, first, refused, second, ended(4.0), over(first, 4.0))
    assert found[2:] == [("decode", 2.0, 2.5, True), ("decode", 3.0, 4.0, True)]


def test_what_is_under_way_has_no_end_and_has_not_failed():
    prefill, decode = asked(PREFILL, 2.0), asked(DECODE, 3.0)
    assert steps(0.0, 1.0)[-1] == ("route", 1.0, None, False)
    assert steps(0.0, 1.0, prefill)[-1] == ("prefill", 2.0, None, False)
    asks = prefill, prefilled(prefill, 3.0), decode, first_byte(decode, 3.5)
    assert steps(0.0, 1.0, *asks)[-1] == ("stream", 3.5, None, False)


@given(
    st.lists(st.floats(1, 9), min_size=1, max_size=4),
    st.lists(st.floats(1, 9), min_size=1, max_size=4),
    st.none() | st.floats(0, 1),
    st.floats(0, 1),
)
def test_steps_leave_no_gap_whatever_is_tried_again(prefills, decodes, borrowed_s, first_byte_s):
    """Where each engine is asked in the moment in which the one before has answered or failed."""
    moments = list(accumulate([3.0, *prefills, *decodes]))
    kinds = [PREFILL] * len(prefills) + [DECODE] * len(decodes)
    events = []
    for number, (kind, at_s, until_s) in enumerate(zip(kinds, moments, moments[1:], strict=False)):
        events.append(asked(kind, at_s))
        if number == len(prefills) - 1:
            if borrowed_s is not None:
                pull = PrefixPull("h", 64, 64, borrowed_s)
                events.append(Pulled(pull, at_s=at_s + borrowed_s))
            events.append(prefilled(events[-1 - (borrowed_s is not None)], until_s))
        elif number == len(kinds) - 1:
            events.append(first_byte(events[-1], at_s + first_byte_s))
        else:
            events.append(over(events[-1], until_s))
    found = steps_of([Received(1.0, at_s=2.0), *events, ended(moments[-1])])
    assert all(one.end_s == following.start_s for one, following in pairwise(found))
    assert (found[0].start_s, found[-1].end_s) == (0.0, moments[-1] - 1.0)
    assert sum(one.failed for one in found) == len(prefills) + len(decodes) - 2


LATER = st.floats(0.0, 9.0)


@given(LATER, LATER, LATER)
def test_the_first_byte_counts_from_prefills_answer_whenever_decode_was_asked(wait, rest, late):
    """So that what is measured with streams and without is the same time."""
    prefill, decode = asked(PREFILL, 1.0), asked(DECODE, 1.0 + wait)
    prefilled_s = 1.0 + wait + rest
    answered = prefilled(prefill, prefilled_s), first_byte(decode, prefilled_s + late)
    asks = Received(0.0, at_s=1.0), prefill, early(1.0 + wait), decode, *answered
    found = outcome_of(asks)
    assert found.first_byte_s == pytest.approx(late)
    (_, _, prefill_step, follow, decode_step, _) = found.steps
    assert prefill_step.end_s == follow.end_s == decode_step.start_s
    assert decode_step.start_s + late == pytest.approx(decode_step.end_s)
    # The control: a decode engine that computes by itself, asked in the same moment.
    spent = WentDirect(Direct.TICKET_SPENT, at_s=1.0 + wait)
    alone = outcome_of([*asks[:3], spent, decode, *answered])
    assert alone.first_byte_s == pytest.approx(rest + late)
    assert "follow" not in {step.kind.value for step in alone.steps}


def test_an_answer_of_decode_before_prefills_has_waited_for_nothing():
    prefill, decode = asked(PREFILL, 1.0), asked(DECODE, 2.0)
    events = [Received(0.0), prefill, early(2.0), decode, first_byte(decode, 3.0)]
    assert outcome_of(events).first_byte_s == 0
    assert outcome_of([*events, ended(4.0), prefilled(prefill, 5.0)]).first_byte_s == 0
    events.remove(events[2])  # the control
    assert outcome_of(events).first_byte_s == 1


def test_a_spent_ticket_was_none():
    """And what a later event says does not change what an earlier one said."""
    prefill, decode = asked(PREFILL, 2.0), asked(DECODE, 4.0)
    asks = [Received(0.0, at_s=1.0), prefill, prefilled(prefill, 3.0), decode]
    assert outcome_of(asks).ticket_s == 1.0
    answered = first_byte(decode, 6.0), ended(9.0)
    spent = outcome_of([*asks, WentDirect(Direct.TICKET_SPENT), *answered])
    assert (spent.ticket_s, spent.prefill) == (None, "p")
    assert (spent.decode, spent.first_byte_s, spent.total_s) == ("d", 2.0, 9.0)
    late = outcome_of([*asks, RequestEnded(RequestEnd.CLIENT_LEFT, None, at_s=5.0), Passed(200)])
    assert (late.status, late.end) == (None, RequestEnd.CLIENT_LEFT)


def test_an_early_ticket_is_one_until_decode_does_without():
    streamed = Streamed(EarlyStart.STARTED, 0.5)
    had = outcome_of([Received(0.0), WentDirect(None), streamed])
    assert (had.early_s, had.had_ticket) == (0.5, True)
    for reason in (Direct.TICKET_SPENT, Direct.PREFILL_ERROR):
        without = outcome_of([Received(0.0), WentDirect(None), streamed, WentDirect(reason)])
        assert (without.early_s, without.had_ticket) == (None, False)
    assert not outcome_of([Received(0.0), Streamed(EarlyStart.QUEUED)]).had_ticket
