"""Tests of the proxy, run as they are with an Envoy and a picker in the proxy's place.

A choice: a test of the proxy is left out here where a gateway cannot do the same (docs/gateway.md
says what), or where the test looks into the proxy's own process.  A gateway ends its call a moment
after the client has its answer: a test that is to be chosen waits for outcomes (``until``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from tests.fakes import deployment
from tests.router.admission import test_fields_and_headers, test_queue, test_requests
from tests.router.handover import test_abandoned, test_handover, test_rules
from tests.router.handover.streams import test_streams_that_fail
from tests.router.openai import test_lists_and_streams, test_passed, test_routes
from tests.router.operations import test_admin, test_timeouts, test_without_prefill
from tests.router.picker.gateway import BUFFERED, PIECES, Filter, behind_envoy
from tests.router.pulls import test_prefix_pull
from tests.router.routing import test_decide, test_model_keys, test_models
from tests.router.sessions import test_sessions
from tests.router.tracing import test_traces
from tests.router.tracing.otlp_receiver import receiving

Law = Callable[[], None]

CHOSEN: tuple[Law, ...] = (
    test_fields_and_headers.test_a_second_connection_header_is_honoured,
    test_queue.test_requests_wait_for_a_place_and_are_then_served,
    test_requests.test_all_bodies_together_are_bounded_and_their_bytes_come_back,
    test_abandoned.test_leaving_while_the_ticket_is_on_its_way_gives_it_back,
    test_handover.test_many_requests_at_once_each_get_their_own_ticket,
    test_handover.test_one_engine_can_hold_both_roles,
    partial(test_rules.test_any_other_status_is_the_clients, status=422, role="prefill"),
    partial(test_rules.test_any_other_status_is_the_clients, status=422, role="decode"),
    test_streams_that_fail.test_leaving_while_both_compute_ends_both_and_gives_the_ticket_back,
    partial(test_lists_and_streams.test_a_stream_asks_proxies_not_to_hold_it_back, said=None),
    partial(test_lists_and_streams.test_a_stream_asks_proxies_not_to_hold_it_back, said="yes"),
    test_passed.test_a_form_with_a_file_reaches_decode_with_its_boundary,
    partial(test_passed.test_no_route_lets_a_client_name_memory, field="kv_transfer_params"),
    test_routes.test_anthropics_clients_read_the_routers_refusals,
    test_admin.test_a_wrong_method_is_405_with_those_that_are_right,
    test_timeouts.test_the_wait_for_a_place_counts_as_the_requests_time,
    partial(test_without_prefill.test_what_no_ticket_could_serve_is_served_either_way, True),
    test_prefix_pull.test_prefill_gets_a_ticket_for_what_decode_holds,
    test_decide.test_the_rank_that_holds_the_prefix_is_named_and_no_other,
    test_model_keys.test_each_client_sees_what_its_own_key_shows,
    test_models.test_an_adapter_goes_where_it_is_loaded,
    test_sessions.test_the_client_is_told_what_is_kept_and_that_a_promise_was_broken,
    test_sessions.test_a_session_that_comes_back_elsewhere_is_told_what_the_first_engine_broke,
    test_sessions.test_both_engines_are_asked_to_keep_and_get_none_of_the_routers_fields,
    test_sessions.test_a_release_reaches_the_engines_that_keep_the_session_and_no_others,
)

WHOLE_FILES = (test_models, test_model_keys, test_sessions, test_prefix_pull)
"""Every test of these without parameters and fixtures, under the mark ``matrix``."""

OTHERWISE = {
    "test_an_engine_that_fails_a_prefetch_costs_no_request": "a picker looks at engines each "
    "second for its health service, so that it knows before it asks",
}
"""Tests in them that are otherwise behind a gateway, and why."""


def name_of(law: Law) -> str:
    if isinstance(law, partial):
        given = (*law.args, *law.keywords.values())
        return "-".join((law.func.__name__, *map(str, given)))
    return law.__name__


def laws_of(module: ModuleType) -> Iterator[Law]:
    """The tests of a file that need no arguments, and are not chosen above."""
    for name, found in vars(module).items():
        is_test = name.startswith("test_") and inspect.iscoroutinefunction(inspect.unwrap(found))
        if not is_test or inspect.signature(found).parameters:
            continue
        if name not in OTHERWISE and found not in CHOSEN:
            yield found


def hold(law: Law, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with a gateway for each proxy; it must have had one."""
    num_started = 0

    @asynccontextmanager
    async def running(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_started
        num_started += 1
        async with behind_envoy(Filter(mode))(*args, **kwargs) as gateway:
            yield gateway

    monkeypatch.setattr(deployment, "running_proxy", running)
    law()
    assert num_started, "the test asks no proxy"


@pytest.mark.parametrize("law", CHOSEN, ids=name_of)
def test_what_holds_of_the_proxy_holds_behind_a_gateway(
    law: Law, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(law, BUFFERED, monkeypatch)


@pytest.mark.parametrize(
    "law",
    [
        test_traces.test_passed_requests_are_traced_too,
        pytest.param(test_traces.test_a_request_that_fails_is_marked, marks=pytest.mark.matrix),
    ],
    ids=name_of,
)
def test_its_traces_are_a_gateways_too(law: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        hold(partial(law, receiver=receiver), BUFFERED, monkeypatch)


@pytest.mark.matrix
@pytest.mark.parametrize("law", CHOSEN, ids=name_of)
def test_it_holds_where_bodies_come_in_pieces(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(law, PIECES, monkeypatch)


@pytest.mark.matrix
@pytest.mark.parametrize("law", [law for one in WHOLE_FILES for law in laws_of(one)], ids=name_of)
def test_whole_files_of_it_hold(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(law, BUFFERED, monkeypatch)


def test_each_that_is_otherwise_is_there() -> None:
    assert all(any(hasattr(one, name) for one in WHOLE_FILES) for name in OTHERWISE)


def test_a_gateway_that_does_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: of a picker that adds no headers to answers."""
    told = "pdconn.router.picker.picker_service.told_headers"
    monkeypatch.setattr(told, lambda routed, sessions: {})
    law = test_sessions.test_the_client_is_told_what_is_kept_and_that_a_promise_was_broken
    with pytest.raises(KeyError):
        hold(law, BUFFERED, monkeypatch)
