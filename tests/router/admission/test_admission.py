"""The parts of admission on their own: places, victims, budget, limits."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pdconn.lifecycle.admission import AdmissionControl, AdmissionLimits
from pdconn.router.admission.connections import (
    SHORTEST_STAY_S,
    ClientAdmission,
    ClientConnection,
    Dropped,
)
from pdconn.router.admission.listener import MOST_CONNECTIONS, limits_within
from pdconn.router.admission.places import BodyBudget, HeldBody
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import BadSetting, Busy
from pdconn.sidechannel.quiet_log import QuietLog
from tests.fakes.event_loop import in_loop

URL = ["http://a:1"]


@pytest.mark.parametrize("files", [64, 256, 1024, 65536])
def test_places_leave_descriptors_for_engines(files: int) -> None:
    limits = limits_within(files, 20, 30.0)
    assert 2 <= limits.connections <= MOST_CONNECTIONS
    assert 20 + 3 * limits.connections <= files
    assert limits.stalled < limits.per_host < limits.connections


def test_places_are_bounded_without_a_limit_and_there_are_some_with_a_tiny_one() -> None:
    assert limits_within(None, 20, 30.0).connections == MOST_CONNECTIONS
    assert limits_within(16, 20, 30.0).connections == 2


def test_sessions_that_stall_no_more_leave_their_places() -> None:
    control: AdmissionControl[str] = AdmissionControl(AdmissionLimits(stalled=2, stall_s=10.0))
    control.admit("a", "h", 1.0)
    control.admit("b", "h", 2.0)
    assert control.is_crowded
    control.note_stall("a", False, 3.0)
    assert not control.is_crowded
    control.note_stall("a", True, 4.0)
    assert control.admit("c", "h", 5.0) == "b"
    control.remove_session("b")
    assert "b" not in control


class Table:
    """Connections without sockets."""

    def __init__(self, **limits: float) -> None:
        self.counts: Counter[Dropped] = Counter()
        self.cut: list[ClientConnection] = []
        given = AdmissionLimits(**{"connections": 3, "per_host": 3, "stalled": 9, **limits})  # type: ignore[arg-type]
        self.admission = ClientAdmission(given, self._count)

    def _count(self, reason: Dropped) -> None:
        self.counts[reason] += 1

    def open(self, host: str = "h") -> ClientConnection | None:
        return self.admission.open_connection(object(), host)  # type: ignore[arg-type]

    def opened(self, host: str = "h") -> ClientConnection:
        connection = self.open(host)
        assert connection is not None
        connection.opened_by(_Opening(lambda: self.cut.append(connection)))  # type: ignore[arg-type]
        return connection


@dataclass
class _Opening:
    """Stands for the task that opens a connection; closing the connection cancels it."""

    cancel: Callable[[], None]


@in_loop
async def test_what_the_system_could_not_open_is_counted_apart() -> None:
    table = Table()
    table.admission.accept_failed()
    assert table.counts == {Dropped.ACCEPT_FAILED: 1}


@in_loop
async def test_a_place_is_made_by_what_stalls_then_by_what_idles_and_never_by_what_is_served() -> (
    None
):
    table = Table()
    served, idle, stalled = (table.opened() for _ in range(3))
    served.request_began()
    idle.request_began()
    idle.request_ended()
    await asyncio.sleep(2 * SHORTEST_STAY_S)
    await table.admission.room()
    assert table.counts == {Dropped.CROWDED_OUT: 1}
    table.opened().request_began()
    await table.admission.room()
    assert table.counts == {Dropped.CROWDED_OUT: 1, Dropped.IDLE: 1}
    table.opened().request_began()
    waiting = asyncio.create_task(table.admission.room())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    served.request_ended()
    await asyncio.wait_for(waiting, 5.0)
    assert len(table.admission) == 2
    assert stalled.stalls


@in_loop
async def test_owed_heads_make_room_before_uploads_unless_most_are_uploads() -> None:
    """Otherwise a flood of half heads would cut clients that send a body in several flights."""
    table = Table(connections=4, per_host=4)
    first, second = table.opened(), table.opened()
    async with first.reading_body(), second.reading_body():
        heads = table.opened(), table.opened()
        await asyncio.sleep(2 * SHORTEST_STAY_S)
        await table.admission.room()
        assert table.cut == [heads[0]]
        third = table.opened()
        async with third.reading_body():
            await asyncio.sleep(2 * SHORTEST_STAY_S)
            await table.admission.room()
            assert table.cut == [heads[0], first]


@in_loop
async def test_a_new_connection_may_stall_for_a_moment() -> None:
    """Else a flood pushes out good clients whose request is on its way."""
    table = Table(connections=9, per_host=9, stalled=2)
    loop = asyncio.get_running_loop()
    table.opened()
    began = loop.time()
    table.opened()
    await table.admission.room()
    assert loop.time() - began >= 0.9 * SHORTEST_STAY_S
    assert table.counts == {Dropped.CROWDED_OUT: 1}


@in_loop
async def test_a_connection_that_was_dropped_is_not_counted_again() -> None:
    table = Table(per_host=1)
    connection = table.opened()
    assert table.open() is None
    assert table.open("another host") is not None
    await asyncio.sleep(2 * SHORTEST_STAY_S)
    table.opened("a third")
    await table.admission.room()
    assert len(table.admission) == 2
    connection.request_began()
    connection.request_ended()
    assert len(table.admission) == 2
    assert table.counts == {Dropped.REFUSED: 1, Dropped.CROWDED_OUT: 1}


def test_bytes_are_given_back_by_the_last_user_and_once() -> None:
    budget, dropped = BodyBudget(max_nbytes=10), []
    with HeldBody(budget) as held:
        held.when_free = lambda: dropped.append(1)
        held.grow(6)
        with pytest.raises(Busy, match="6 bytes are held, at most 10"):
            held.grow(5)
        held.add_user()
    assert (budget.nbytes, dropped) == (6, [])
    held.drop_user()
    assert (budget.nbytes, dropped) == (0, [1])
    with held:
        assert budget.nbytes == 0


def test_a_held_body_lets_go_of_its_request_without_the_garbage_collector() -> None:
    """A cycle in each request made the router a third slower."""

    class Request:
        def drop_body(self) -> None:
            pass

    request = Request()
    request.held = held = HeldBody()  # type: ignore[attr-defined]
    with held:
        held.when_free = request.drop_body
    gone = weakref.ref(request)
    gc.disable()
    try:
        del request
        assert gone() is None
    finally:
        gc.enable()


def test_few_of_many_warnings_are_logged_and_the_others_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = iter((0.0, 0.1, 0.2, 5.0))
    quiet = QuietLog(logging.getLogger("test"), clock=lambda: next(times))
    for _ in range(4):
        quiet.warning("pdconn: n=%d", 7)
    assert [record.getMessage() for record in caplog.records] == [
        "pdconn: n=7",
        "pdconn: n=7 (2 similar warnings suppressed)",
    ]


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"max_bodies_mib": 63.0}, "--max-bodies-mib"),
        ({"max_bodies_mib": float("nan")}, "--max-bodies-mib"),
        ({"max_requests": 0}, "--max-requests"),
        ({"max_queue": -1}, "--max-queue"),
        ({"queue_timeout_s": 0.0}, "--queue-timeout"),
        ({"retries": -1}, "--retries"),
        ({"prefill_timeout_s": 0.0}, "--prefill-timeout"),
        ({"request_timeout_s": float("inf")}, "--request-timeout"),
        ({"tokenize_timeout_s": 0.0}, "--tokenize-timeout"),
        ({"health_timeout_s": 0.0}, "--health-timeout"),
        ({"lease_s": 0.0}, "--lease"),
        ({"cors_origins": ("https://a.b/path",)}, "--cors-origin"),
        ({"cors_origins": ("a.b",)}, "--cors-origin"),
        ({"cors_origins": ("https://A.b",)}, "--cors-origin"),
        ({"stall_timeout_s": 0.0}, "--stall-timeout"),
        ({"allow_xargs": ("kv_transfer_params",)}, "--allow-xargs"),
        ({"allow_xargs": ("",)}, "--allow-xargs"),
    ],
)
def test_settings_without_sense_are_named(settings: dict[str, object], option: str) -> None:
    with pytest.raises(BadSetting, match=f"^{option}: "):
        ProxyConfig.from_options(URL, URL, **settings)
