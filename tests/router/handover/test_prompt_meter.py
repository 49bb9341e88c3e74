"""What the controller of roles is told of prompts, and of engines' latency."""

from __future__ import annotations

from dataclasses import dataclass, field

from multidict import CIMultiDict

from pdconn.router.fleet.engine_page import Load, parse_metrics
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.flights import InflightTracker
from pdconn.router.fleet.loads import LoadReading
from pdconn.router.fleet.member import Member, Role
from pdconn.router.handover.prompt_meter import MOST_SAMPLES, PromptMeter
from pdconn.router.handover.role_follower import EngineReporter
from pdconn.router.openai.requests import Route, parse_body
from pdconn.router.roles.role_reports import PrefillSample
from pdconn.router.routing.request_events import Began, FirstToken, Prefilled, Received, StepKind
from pdconn.router.routing.routed_request import RoutedRequest
from pdconn.router.routing.session_table import SessionTable

A = "http://a:1"


def routed() -> RoutedRequest:
    body = parse_body(Route.COMPLETIONS, b'{"model": "m", "prompt": "hi"}')
    return RoutedRequest("r", CIMultiDict(), body, events=[Received(0.0, at_s=0.0)])


def asked(meter: PromptMeter, request: RoutedRequest, tokens: int, at_s: float) -> Began:
    began = Began(StepKind.PREFILL, A, {"uncached": tokens}, at_s=at_s)
    meter.saw(request, began)
    return began


def test_a_prompt_is_timed_with_what_was_before_it() -> None:
    inflight, request = InflightTracker(), routed()
    meter = PromptMeter(inflight)
    first = inflight.start_request(A, 300)
    asked(meter, request, 300, 10.0)
    inflight.start_request(A, 500)
    began = asked(meter, request, 500, 11.0)
    assert meter.backlog_tokens([A]) == 800
    first.finish()
    meter.saw(request, Prefilled(began, has_ticket=True, at_s=13.0))
    assert meter.take_counts() == (800, 2, (PrefillSample(500, 300, 2.0),), ())
    assert meter.take_counts() == (0, 0, (), ())


def test_a_prefetch_is_no_prompt_of_a_client() -> None:
    meter, request = PromptMeter(InflightTracker()), routed()
    began = Began(StepKind.PREFILL, A)
    meter.saw(request, began)
    meter.saw(request, Prefilled(began, has_ticket=False))
    assert meter.take_counts() == (0, 0, (), ())


def test_a_first_token_is_timed_from_the_arrival() -> None:
    meter, request = PromptMeter(InflightTracker()), routed()
    request.note(Prefilled(Began(StepKind.PREFILL, A), has_ticket=True, at_s=request.arrived_s + 1))
    meter.saw(request, FirstToken(at_s=request.arrived_s + 3))
    (sample,) = meter.take_counts()[3]
    assert round(sample.seconds, 6) == 3
    assert round(sample.prefill_s, 6) == 1


def test_prompts_whose_engine_never_answers_do_not_pile_up() -> None:
    meter, request = PromptMeter(InflightTracker()), routed()
    first = asked(meter, request, 1, 0.0)
    for _ in range(MOST_SAMPLES):
        asked(meter, request, 1, 0.0)
    meter.saw(request, Prefilled(first, has_ticket=True))
    assert meter.take_counts()[2] == ()


@dataclass
class Loads:
    """What a reporter reads of the poller of loads."""

    latest: dict[str, LoadReading] = field(default_factory=dict)
    inflight: InflightTracker = field(default_factory=InflightTracker)

    def report(self, at_s: float, sum_s: float | None, count: int | None) -> None:
        load = Load(running=2, waiting=1, kv_usage=0.5, itl_sum_s=sum_s, itl_count=count)
        self.latest[A] = LoadReading(load, at_s, 1)


def test_latency_is_that_of_the_tokens_since_the_last_page() -> None:
    loads, engines = Loads(), EngineRegistry.from_members([Member(A, frozenset(Role))])
    now = 0.0
    reporter = EngineReporter(engines, loads, SessionTable(), lambda: now)  # type: ignore[arg-type]
    assert reporter.reports()[A].age_s is None
    seen = []
    for at_s, sum_s, count in ((1.0, 10.0, 1000), (2.0, 12.0, 1100), (2.0, 12.0, 1100),
                               (3.0, 12.0, 1100), (4.0, 1.0, 50), (5.0, None, None)):  # fmt: skip
        now = at_s + 0.5
        loads.report(at_s, sum_s, count)
        seen.append(reporter.reports()[A].itl_s)
    # The first page tells nothing, one without new tokens neither, nor does one after a restart.
    assert seen == [None, 0.02, 0.02, None, None, None]
    report = reporter.reports()[A]
    assert (report.num_others, report.num_waiting, report.kv_usage) == (2, 1, 0.5)
    assert report.age_s == 0.5


def test_the_page_of_an_engine_has_its_latency() -> None:
    page = (
        'vllm:inter_token_latency_seconds_sum{engine="0"} 1.5\n'
        'vllm:inter_token_latency_seconds_sum{engine="1"} 0.25\n'
        'vllm:inter_token_latency_seconds_count{engine="0"} 100.0\n'
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="1"} 100.0\n'
    )
    load = parse_metrics(page)
    assert (load.itl_sum_s, load.itl_count) == (1.75, 100)
    assert parse_metrics("").itl_sum_s is None
