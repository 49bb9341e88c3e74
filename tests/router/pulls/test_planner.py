"""What the planner makes of pulls by an engine that it does not know yet."""

from __future__ import annotations

import pytest

from pdconn.router.pulls.planner import NEW, RESTS_S, PullPlanner
from pdconn.router.pulls.pull_choice import Holder, PullChoice

PAIR = ("holder", "prefill")
RATE, FIXED_S = 1_000, 0.03
PULL_S = 0.5


def pulled(planner: PullPlanner, rest: int, now: float) -> None:
    """2000 tokens were pulled in half a second, the rest computed."""
    choice = PullChoice(Holder("holder", 2000), 0.0, 0.0, "", saved=2000)
    planner.note_pulled("prefill", choice, rest, PULL_S + FIXED_S + rest / RATE, now)


def computed(planner: PullPlanner, tokens: int, now: float) -> None:
    planner.note_computed("prefill", tokens, FIXED_S + tokens / RATE, now)


def pull_s(planner: PullPlanner, now: float) -> float:
    return planner.chooser.pulling.line_of(PAIR, now).seconds_for(2000)


def test_pulls_before_an_engine_was_known_are_told_anew() -> None:
    """The rest took it 4 s, of which far less was expected of a large GPU."""
    planner = PullPlanner.from_floor(512)
    for now in range(3):
        pulled(planner, 4000, now)
    assert pull_s(planner, 3) > 2
    for number in range(NEW):
        computed(planner, 500 + 900 * number, 3 + number)
    assert pull_s(planner, 10) == pytest.approx(PULL_S, rel=0.25)


def test_pulls_of_a_known_engine_are_not() -> None:
    """Control: measurements are kept, and one is enough."""
    planner = PullPlanner.from_floor(512)
    for number in range(NEW):
        computed(planner, 500 + 900 * number, number)
    pulled(planner, 4000, 5)
    before = pull_s(planner, 6)
    assert before == pytest.approx(PULL_S, rel=0.25)
    for number in range(10):
        computed(planner, 4000, 6 + number)
    assert pull_s(planner, 20) == before


def test_an_engine_that_is_gone_leaves_nothing() -> None:
    planner = PullPlanner.from_floor(512)
    pulled(planner, 4000, 0)
    before = pull_s(planner, 1)
    planner.keep_engines(["another"])
    computed(planner, 4000, 1)
    assert pull_s(planner, 2) == before


def test_a_pair_that_does_not_work_is_left_alone_for_a_while() -> None:
    planner, held = PullPlanner.from_floor(1), [Holder("holder", 5000)]
    planner.note_wasted("prefill", PullChoice(held[0], 0.0, 0.0, ""), 10.0)

    def holder_for(engine: str, now: float) -> Holder | None:
        return planner.choose(engine, 5001, 0, held, now).holder

    assert holder_for("prefill", 10.0 + RESTS_S - 1) is None
    assert holder_for("other", 10.0) is not None
    assert holder_for("prefill", 10.0 + RESTS_S) is not None
    planner.keep_engines(["holder", "prefill"])
    assert holder_for("prefill", 11.0) is None
    planner.keep_engines(["holder"])
    assert holder_for("prefill", 11.0) is not None
