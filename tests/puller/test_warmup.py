"""Laws of one place's warming, without a clock or a socket."""

from __future__ import annotations

from random import Random

import pytest

from pdconn.puller.warmup import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    TRANSITIONS,
    Place,
    PlaceWarmup,
    Step,
    WarmupState,
)

ANSWER_S, CONNECT_S = 10.0, 120.0
TO_WARM = ("told", "welcomed", "ready", "touched")


def begun(now: float = 0.0) -> PlaceWarmup:
    warmth = PlaceWarmup(ANSWER_S, CONNECT_S, now, Random(7))
    assert list(warmth.tick(now)) == [Step.ASK]
    return warmth


def warm(now: float = 0.0) -> PlaceWarmup:
    warmth = begun(now)
    for event in TO_WARM:
        warmth.enter(event, now)
    assert warmth.state is WarmupState.WARM
    return warmth


def pause(warmth: PlaceWarmup, now: float) -> float:
    """How long it rests from now on; it is asleep until then, and asks at the end."""
    until = warmth.next_deadline()
    assert until is not None
    assert warmth.tick((now + until) / 2) == ()
    assert list(warmth.tick(until)) == [Step.ASK]
    return until - now


def test_it_asks_at_once_then_greets_then_touches() -> None:
    warmth = begun()
    steps = [step for event in TO_WARM for step in warmth.enter(event, 1.0)]
    assert steps == [Step.GREET, Step.TOUCH]
    assert warmth.next_deadline() is None


def test_who_is_warm_is_left_alone_until_it_is_lost() -> None:
    warmth = warm()
    assert warmth.tick(1e9) == ()
    warmth.enter("lost", 1e9)
    assert 0 < pause(warmth, 1e9) <= FIRST_PAUSE_S


def test_pauses_grow_to_a_bound_while_nobody_answers() -> None:
    warmth, now = begun(), 0.0
    pauses = []
    for _ in range(12):
        warmth.enter("lost", now)
        pauses.append(pause(warmth, now))
        now += pauses[-1]
    assert pauses[0] <= FIRST_PAUSE_S
    assert all(later > sooner for sooner, later in zip(pauses[:5], pauses[2:7], strict=True))
    assert all(LONGEST_PAUSE_S / 2 <= each <= LONGEST_PAUSE_S for each in pauses[6:])
    assert len(set(pauses[6:])) > 1, "many engines would come back at once"


@pytest.mark.parametrize(
    ("state", "allowed_s"),
    [
        (WarmupState.ASKING, ANSWER_S),
        (WarmupState.GREETING, ANSWER_S),
        (WarmupState.CONNECTING, CONNECT_S),
    ],
)
def test_each_answer_has_its_time_and_then_what_was_begun_is_left(
    state: WarmupState, allowed_s: float
) -> None:
    warmth = begun()
    for event in TO_WARM:
        if warmth.state is not state:
            warmth.enter(event, 5.0 if state is not WarmupState.ASKING else 0.0)
    began = 0.0 if state is WarmupState.ASKING else 5.0
    assert warmth.state is state
    assert warmth.tick(began + allowed_s - 0.001) == ()
    assert list(warmth.tick(began + allowed_s)) == [Step.LEAVE]
    assert warmth.state is WarmupState.RESTING


def test_a_touch_has_all_the_time_it_takes() -> None:
    warmth = begun()
    for event in TO_WARM[:-1]:
        warmth.enter(event, 0.0)
    assert warmth.state is WarmupState.TOUCHING
    assert warmth.tick(1e9) == ()


def test_a_lender_that_comes_and_goes_is_tried_ever_more_seldom() -> None:
    warmth, now = warm(), 0.0
    for _ in range(8):
        warmth.enter("lost", now)
        last = pause(warmth, now)
        now += last
        for event in TO_WARM:
            warmth.enter(event, now)
    assert last >= LONGEST_PAUSE_S / 2
    now += LONGEST_PAUSE_S
    warmth.enter("lost", now)
    assert pause(warmth, now) <= FIRST_PAUSE_S


def test_we_ourselves_are_never_tried_again() -> None:
    warmth = begun()
    assert warmth.enter("ourselves", 0.0) == ()
    assert warmth.next_deadline() is None
    assert warmth.tick(1e9) == ()


def test_everything_under_way_can_be_lost() -> None:
    lasting = {WarmupState.RESTING, WarmupState.NEEDLESS}
    assert {state for state, event in TRANSITIONS if event == "lost"} == set(WarmupState) - lasting


def test_an_event_without_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="a warm place cannot be told"):
        warm().enter("told", 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "", "p1", ":5600", "p1:", "p1:0", "p1:65536", "p1:-1", "p1:5600x", "p1:٥٦",
        "fe80::1:5600", "[]:5600", "p\n1:5600", 5600, None, ["p1:5600"],
    ],
)  # fmt: skip
def test_what_is_no_place_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match='"host:port" with a port from 1 to 65535'):
        Place.parse(text)
