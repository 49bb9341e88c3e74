"""The KV usage that an idle engine reports counts for the time of a lease."""

from __future__ import annotations

from pdconn.router.fleet.loads import LEASE_S, KvUsage


def test_an_engine_that_works_is_believed_for_ever() -> None:
    usage = KvUsage()
    levels = [usage.note_share("a", 0.9, idle=False, now=now) for now in (0.0, 10 * LEASE_S)]
    assert levels == [0.9, 0.9]


def test_an_idle_engine_is_believed_until_its_leases_must_have_ended() -> None:
    usage = KvUsage()
    times = (0.0, LEASE_S - 1, LEASE_S, 5 * LEASE_S)
    assert [usage.note_share("a", 0.9, idle=True, now=now) for now in times] == [0.9, 0.9, 0.0, 0.0]


def test_news_and_work_begin_the_time_anew() -> None:
    usage = KvUsage()
    usage.note_share("a", 0.9, idle=True, now=0.0)
    assert usage.note_share("a", 0.8, idle=True, now=LEASE_S) == 0.8
    usage.note_share("a", 0.8, idle=False, now=LEASE_S + 1)
    assert usage.note_share("a", 0.8, idle=True, now=2.5 * LEASE_S) == 0.8
    assert usage.note_share("a", 0.8, idle=True, now=4 * LEASE_S) == 0.0


def test_an_engine_that_leaves_is_forgotten() -> None:
    usage = KvUsage()
    usage.note_share("a", 0.9, idle=True, now=0.0)
    usage.keep_engines(("b",))
    assert usage.note_share("a", 0.9, idle=True, now=LEASE_S) == 0.9
