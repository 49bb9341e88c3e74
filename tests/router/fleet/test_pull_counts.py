"""Pulls as engines count them: in the log, on the page, and why they fail."""

from __future__ import annotations

import json

import pytest

from pdconn.router.fleet import loads
from pdconn.router.fleet.engine_page import parse_metrics
from pdconn.router.fleet.pull_counts import (
    FAILED,
    PULL_CAUSES,
    PULLS,
    READS,
    STEP_S,
    WINDOW_S,
    PullCounts,
    RecentPulls,
)
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop

UNVERIFIED = "pdconn:pulls_unverified_total"
REFUSED = "pdconn:pulls_refused_expired_total"
MISTAKEN = "pdconn:tickets_mistaken_total"
"""A chat template that asks for the time: every prompt was computed twice, and nothing said so."""
GONE = "pdconn:tickets_gone_total"


def test_counts_are_summed_over_ranks_and_named_by_their_cause() -> None:
    page = (
        f'{PULLS}{{engine="0"}} 3\n{PULLS}{{engine="1"}} 4\n{FAILED}{{engine="0"}} 5\n'
        f'{UNVERIFIED}{{engine="0"}} 4\n{REFUSED}{{engine="0"}} 1\n'
    )
    pulls = parse_metrics(page).pulls
    assert pulls is not None
    assert (pulls.received, pulls.failed, pulls.tried) == (7, 5, 12)
    assert pulls.why == "4 without checksums to compare, 1 refused: expired"
    assert '"verify"' in pulls.remedy


def test_an_engine_with_vllms_own_connector_counts_by_its_reads() -> None:
    pulls = parse_metrics(f"{READS} 7\n{FAILED} 1\n").pulls
    assert pulls == PullCounts(7, 1)
    assert parse_metrics("vllm:num_requests_running 1\n").pulls is None


def test_a_cause_that_nothing_counts_is_in_the_log_of_the_engine() -> None:
    assert PullCounts(0, 3).why == ""
    assert "its log" in PullCounts(0, 3).remedy


def test_an_engine_that_restarts_begins_anew() -> None:
    assert PullCounts(2, 1).since(PullCounts(90, 9)) == PullCounts(2, 1)
    grown = PullCounts(9, 4, {UNVERIFIED: 4}).since(PullCounts(2, 1, {UNVERIFIED: 1}))
    assert grown == PullCounts(7, 3, {UNVERIFIED: 3})


def test_what_failed_long_ago_is_not_lately() -> None:
    recent, now = RecentPulls(), 0.0
    assert recent.note_counts("a", PullCounts(0, 50), now) == PullCounts(0, 0), "before the router"
    assert recent.note_counts("a", PullCounts(1, 52), 1.0) == PullCounts(1, 2)
    assert recent.lately("a") == PullCounts(1, 2)
    for now in range(2, int(WINDOW_S + 3 * STEP_S)):
        recent.note_counts("a", PullCounts(1, 52), float(now))
    assert recent.lately("a") == PullCounts(0, 0)
    assert len(recent._seen["a"]) <= 2 * WINDOW_S / STEP_S
    recent.keep_engines(("b",))
    assert recent.lately("a") == PullCounts(0, 0)
    assert not recent._seen


@pytest.mark.parametrize("fails", [UNVERIFIED, MISTAKEN, GONE, None])
@in_loop
async def test_pulls_that_fail_are_in_the_log_and_on_the_page_though_every_answer_is_good(
    fails: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "INTERVAL_S", 60.0)
    async with deployment() as d:
        poller = d.proxy.router.loads
        await poller.poll_now()
        d.decode[0].pull_fails, d.decode[0].policy = fails, "recompute"
        for _ in range(3):
            assert (await d.complete()).status == 200
        assert d.metric("handed_over_requests_total") == 3, "that is all the router itself knows"
        for _ in range(2):
            await poller.poll_now()
        complaints = [r.getMessage() for r in caplog.records if "pulls fail" in r.getMessage()]
        state = json.loads((await d.send("/debug/state", method="GET")).body)
        history = json.loads((await d.send("/debug/history", method="GET")).body)
        (shown,) = [one["pulls"] for one in state["engines"] if one["engine"] == d.decode[0].url]
        assert shown["tried"] == 3
        if fails is None:
            assert (complaints, shown["failed"]) == ([], 0)
            return
        (line,) = complaints
        assert f"engine={d.decode[0].url} failed=3 of=3" in line
        (words,) = [one.words for one in PULL_CAUSES if one.metric == fails]
        assert words in line
        assert shown["failed"] == 3
        assert words in shown["why"]
        assert all("pulls_failed" in one for one in history["samples"])


def test_every_cause_has_words_of_its_own() -> None:
    assert len({one.words for one in PULL_CAUSES}) == len({one.metric for one in PULL_CAUSES})
