"""Why pulls have failed: doctor names the cause that an engine's counters name."""

from __future__ import annotations

import pytest

from pdconn.router.fleet.pull_counts import FAILED, PULL_CAUSES, PULLS, PullCause
from pdconn.tools.doctor.fleet.engines import EngineFacts
from pdconn.tools.doctor.fleet.traffic import judge_traffic


def decode(page: str) -> EngineFacts:
    return EngineFacts("http://d:1", frozenset({"decode"}), metrics=page)


@pytest.mark.parametrize("cause", PULL_CAUSES, ids=lambda cause: cause.metric)
def test_the_cause_of_failed_pulls_is_the_one_that_the_counter_names(cause: PullCause) -> None:
    """Decode alone with ``verify: always`` was sent to read its log."""
    other = next(one for one in PULL_CAUSES if one != cause)
    begun = 7 - 6 * cause.is_apart - other.is_apart
    page = f"{PULLS} 0\n{FAILED} {begun}\n{cause.metric} 6\n{other.metric} 1\n"
    (found,) = [f for f in judge_traffic([decode(page)]) if "failed" in f.id]
    assert f"7 of 7 pulls have failed (6 {cause.words}, 1 {other.words})" in found.message
    assert found.remedy == cause.remedy


def test_pulls_that_failed_for_no_counted_cause_are_in_the_log() -> None:
    (found,) = judge_traffic([decode(f"{PULLS} 0\n{FAILED} 7\n")])
    assert found.message.endswith("7 of 7 pulls have failed")
    assert "its log" in found.remedy
