"""The table of sessions is bounded, fair to tenants, and only a hint."""

from __future__ import annotations

from multidict import CIMultiDict

from pdconn.router.metric_table import PromiseEnd
from pdconn.router.openai.requests import Route, parse_body
from pdconn.router.openai.session_orders import (
    BrokenReport,
    KeptReport,
    SessionName,
    SessionOrder,
)
from pdconn.router.routing.request_events import TurnKept
from pdconn.router.routing.routed_request import RoutedRequest
from pdconn.router.routing.session_table import (
    MOST_KEEPERS,
    MOST_REASONS,
    MOST_REPORTED,
    SessionTable,
)
from transport.testing.inprocess.faults import ManualClock

A = SessionName("a", "1")


def told(table: SessionTable, order: SessionOrder, report: KeptReport, **how: bool) -> None:
    body = parse_body(Route.COMPLETIONS, b'{"prompt": "hi"}')
    request = RoutedRequest("r", CIMultiDict(), body, session=order)
    table.saw(request, TurnKept("p", report, **how))


def test_an_engine_keeps_a_session_for_its_time_and_as_much_as_it_tells() -> None:
    clock = ManualClock(0.0)
    table, order = SessionTable(clock=clock), SessionOrder(A, 60.0)
    assert table.ask_to_keep(order, "p") == {"session": "1", "seconds": 60.0, "tenant": "a"}
    assert table.tokens_kept_at(A, "p") == 0, "it has not answered"
    told(table, order, KeptReport(320))
    assert (table.tokens_kept_at(A, "p"), table.tokens_kept_at(A, "q")) == (320, 0)
    clock.advance(60.0)
    assert table.tokens_kept_at(A, "p") == 0


def test_an_engine_keeps_blocks_for_as_long_as_it_has_granted_and_rows_for_longer() -> None:
    clock = ManualClock(0.0)
    table, order = SessionTable(clock=clock), SessionOrder(A, 60.0)
    table.ask_to_keep(order, "p")
    told(table, order, KeptReport(320, seconds=30.0))
    clock.advance(29.0)
    assert table.tokens_kept_at(A, "p") == 320
    clock.advance(1.0)
    assert table.tokens_kept_at(A, "p") == 0
    table.note_broken("p", [BrokenReport("1", "store-room", "a")])
    assert table.take_untold(A) == ("store-room",)
    assert table.release(A) == ("p",), "it may keep rows still"


def test_what_a_session_is_granted_is_told_once_of_its_last_turn_that_says_keep() -> None:
    table, order = SessionTable(), SessionOrder(A, 60.0)
    told(table, order, KeptReport(320, seconds=30.0))
    told(table, order, KeptReport(0, seconds=9.0), is_prefill=False)
    assert (table.take_cut(A), table.take_cut(A)) == ("seconds=30", None)
    for report in (KeptReport(320, seconds=30.0), KeptReport(640)):
        told(table, order, report)
    assert table.take_cut(A) is None
    told(table, order, KeptReport(320, seconds=30.0))
    table.ask_to_keep(SessionOrder(A, 0.0), "p")
    assert table.take_cut(A) is None, "it is released"
    assert table.take_cut(SessionName("b", "1")) is None


def test_engines_that_may_keep_a_session_are_named_once_for_its_release() -> None:
    clock = ManualClock(0.0)
    table = SessionTable(clock=clock)
    for engine, seconds in (("old", 5.0), ("p", 60.0), ("d", 60.0)):
        table.ask_to_keep(SessionOrder(A, seconds), engine)
    clock.advance(10.0)
    assert table.release(A) == ("p", "d")
    assert table.release(A) == table.release(SessionName("b", "1")) == ()


def test_a_turn_that_releases_and_one_that_only_names_keep_nothing() -> None:
    table = SessionTable()
    table.ask_to_keep(SessionOrder(A, 60.0), "p")
    assert table.ask_to_keep(SessionOrder(A), "p") is None
    assert table.release(A) == ("p",)
    table.ask_to_keep(SessionOrder(A, 60.0), "p")
    assert table.ask_to_keep(SessionOrder(A, 0.0), "p") is not None
    assert table.release(A) == ()


def test_engines_of_one_session_are_bounded() -> None:
    table = SessionTable()
    for number in range(50):
        table.ask_to_keep(SessionOrder(A, 60.0), f"p{number}")
    assert len(table.release(A)) == MOST_KEEPERS


def test_a_client_that_names_ten_thousand_sessions_forgets_its_own() -> None:
    table, own = SessionTable(100), SessionName("a", "mine")
    table.ask_to_keep(SessionOrder(own, 60.0), "p")
    for number in range(10_000):
        table.ask_to_keep(SessionOrder(SessionName("greedy", str(number)), 60.0), "p")
        assert len(table) <= 100
    assert table.find_session(own) is not None
    assert table.find_session(SessionName("greedy", "9999")) is not None
    assert table.find_session(SessionName("greedy", "0")) is None


def test_many_tenants_of_one_session_each_are_bounded_too() -> None:
    table = SessionTable(100)
    for number in range(1000):
        table.ask_to_keep(SessionOrder(SessionName(str(number), "s"), 60.0), "p")
    assert len(table) == 100
    assert len(list(table.newest(1000))) == 100


def test_what_engines_tell_is_counted_once_and_shown() -> None:
    table, counted = SessionTable(), list[PromiseEnd]()
    table.when_told = counted.append
    order = SessionOrder(A, 60.0)
    told(table, order, KeptReport(320))
    told(table, order, KeptReport(640, used=True, broken="room"))
    told(table, order, KeptReport(0, refused="share"))
    assert counted == [
        PromiseEnd.MADE, PromiseEnd.MADE, PromiseEnd.USED, PromiseEnd.BROKEN, PromiseEnd.REFUSED,
    ]  # fmt: skip
    assert table.take_untold(A) == ("room",)
    assert table.take_untold(A) == ()
    [(session, known)] = table.newest(9)
    assert (session, known.ends[PromiseEnd.MADE], known.broken, known.tokens) == (A, 2, (), 0)


# Broken promises


def kept_at(*engines: str, clock: ManualClock | None = None) -> tuple[SessionTable, SessionOrder]:
    """A session that these engines were asked to keep for a minute."""
    table, order = SessionTable(clock=clock or ManualClock(0.0)), SessionOrder(A, 60.0)
    for engine in engines:
        table.ask_to_keep(order, engine)
    told(table, order, KeptReport(320))
    return table, order


def broken(why: str = "room", name: SessionName = A) -> list[BrokenReport]:
    return [BrokenReport(name.name, why, name.tenant)]


def test_a_report_is_told_once_whichever_engine_answers_next_and_ends_the_hint() -> None:
    table, _ = kept_at("p", "q")
    table.note_broken("p", broken())
    assert (table.tokens_kept_at(A, "p"), table.tokens_kept_at(A, "q")) == (0, 320)
    assert table.tokens_kept() == {"p": 0, "q": 320}
    assert table.take_untold(A) == ("room",)
    assert table.take_untold(A) == ()


def test_an_engine_that_reports_its_own_promise_again_is_neither_counted_nor_told_twice() -> None:
    table, order = kept_at("p")
    counted = list[PromiseEnd]()
    table.when_told = counted.append
    table.note_broken("p", broken())
    table.note_broken("p", broken())
    table.ask_to_keep(order, "p")  # the session is back where it was kept
    assert table.take_untold(A) == ("room",)
    told(table, order, KeptReport(320, broken="room"))
    assert table.take_untold(A) == ()
    assert counted == [PromiseEnd.BROKEN, PromiseEnd.MADE]
    table.note_broken("p", broken())
    assert table.take_untold(A) == ("room",), "the new promise was broken as well"


def test_reasons_of_blocks_and_rows_of_several_engines_are_told_together() -> None:
    table, _ = kept_at("p", "q")
    table.note_broken("p", broken("store-room"))
    assert table.tokens_kept_at(A, "p") == 320, "its blocks are kept"
    table.note_broken("q", broken("share"))
    assert table.take_untold(A) == ("store-room", "share")


def test_what_no_promise_explains_is_not_told() -> None:
    clock = ManualClock(0.0)
    table, _ = kept_at("p", clock=clock)
    table.note_broken("stranger", broken())
    table.note_broken("p", broken(name=SessionName("b", "1")))
    table.note_broken("p", broken(name=SessionName("", "unknown")))
    clock.advance(60.0)
    table.note_broken("p", broken())
    assert table.take_untold(A) == ()
    assert len(table) == 1, "a report makes no session known"


def test_a_release_leaves_nothing_to_tell() -> None:
    table, _ = kept_at("p")
    table.note_broken("p", broken())
    table.release(A)
    assert table.take_untold(A) == ()


def test_an_engine_that_reports_without_end_is_bounded() -> None:
    table, _ = kept_at("p")
    table.note_broken("p", [one for n in range(1000) for one in broken(f"why {n}")])
    assert len(table.take_untold(A)) == MOST_REASONS
    late = [BrokenReport("x", "room", "y")] * MOST_REPORTED + broken("late")
    table, _ = kept_at("p")
    table.note_broken("p", late)
    assert table.take_untold(A) == ()
