"""Laws of one place's warming, without a clock or a socket."""

from __future__ import annotations

from random import Random

import pytest

from pdconn.puller.warmup_state import (
    TRANSITIONS,
    Pauses,
    Place,
    PlaceWarmup,
    WarmupState,
    WarmupStep,
)

ANSWER_S, CONNECT_S = 10.0, 120.0
PAUSES = Pauses()
TO_WARM = ("welcomed", "ready", "probed")


def begun(now: float = 0.0) -> PlaceWarmup:
    place_warmup = PlaceWarmup(ANSWER_S, CONNECT_S, now, Random(7), PAUSES)
    assert list(place_warmup.tick(now)) == [WarmupStep.GREET]
    return place_warmup


def warm(now: float = 0.0) -> PlaceWarmup:
    place_warmup = begun(now)
    for event in TO_WARM:
        place_warmup.enter(event, now)
    assert place_warmup.state is WarmupState.WARM
    return place_warmup


def pause(place_warmup: PlaceWarmup, now: float) -> float:
    """How long it rests from now on; it does nothing until then, and greets at the end."""
    until = place_warmup.next_deadline()
    assert until is not None
    assert place_warmup.tick((now + until) / 2) == ()
    assert list(place_warmup.tick(until)) == [WarmupStep.GREET]
    return until - now


def test_it_greets_at_once_then_connects_then_probes() -> None:
    place_warmup = begun()
    steps = [step for event in TO_WARM for step in place_warmup.enter(event, 1.0)]
    assert steps == [WarmupStep.PROBE]
    assert place_warmup.next_deadline() is None


def test_a_warm_lender_is_left_alone_until_it_is_lost() -> None:
    place_warmup = warm()
    assert place_warmup.tick(1e9) == ()
    place_warmup.enter("lost", 1e9)
    assert 0 < pause(place_warmup, 1e9) <= PAUSES.first_s


def test_pauses_grow_to_a_bound_while_there_is_no_answer() -> None:
    place_warmup, now = begun(), 0.0
    pauses = []
    for _ in range(12):
        place_warmup.enter("lost", now)
        pauses.append(pause(place_warmup, now))
        now += pauses[-1]
    assert pauses[0] <= PAUSES.first_s
    assert all(later > sooner for sooner, later in zip(pauses[:5], pauses[2:7], strict=True))
    assert all(PAUSES.longest_s / 2 <= each <= PAUSES.longest_s for each in pauses[6:])
    assert len(set(pauses[6:])) > 1, "many engines would come back at once"


@pytest.mark.parametrize(
    ("state", "allowed_s"),
    [
        (WarmupState.GREETING, ANSWER_S),
        (WarmupState.CONNECTING, CONNECT_S),
    ],
)
def test_each_answer_has_its_time_and_then_what_was_begun_is_left(
    state: WarmupState, allowed_s: float
) -> None:
    place_warmup = begun()
    for event in TO_WARM:
        if place_warmup.state is not state:
            place_warmup.enter(event, 5.0 if state is not WarmupState.GREETING else 0.0)
    began = 0.0 if state is WarmupState.GREETING else 5.0
    assert place_warmup.state is state
    assert place_warmup.tick(began + allowed_s - 0.001) == ()
    assert list(place_warmup.tick(began + allowed_s)) == [WarmupStep.LEAVE]
    assert place_warmup.state is WarmupState.RESTING


def test_a_probe_read_has_all_the_time_it_takes() -> None:
    place_warmup = begun()
    for event in TO_WARM[:-1]:
        place_warmup.enter(event, 0.0)
    assert place_warmup.state is WarmupState.PROBING
    assert place_warmup.tick(1e9) == ()


def test_a_lender_that_comes_and_goes_is_tried_ever_more_seldom() -> None:
    place_warmup, now = warm(), 0.0
    for _ in range(8):
        place_warmup.enter("lost", now)
        last = pause(place_warmup, now)
        now += last
        for event in TO_WARM:
            place_warmup.enter(event, now)
    assert last >= PAUSES.longest_s / 2
    now += PAUSES.longest_s
    place_warmup.enter("lost", now)
    assert pause(place_warmup, now) <= PAUSES.first_s


def test_we_ourselves_are_never_tried_again() -> None:
    place_warmup = begun()
    assert place_warmup.enter("ourselves", 0.0) == ()
    assert place_warmup.next_deadline() is None
    assert place_warmup.tick(1e9) == ()


def test_everything_under_way_can_be_lost() -> None:
    lasting = {WarmupState.RESTING, WarmupState.SKIPPED}
    assert {state for state, event in TRANSITIONS if event == "lost"} == set(WarmupState) - lasting


def test_an_event_without_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="a warm place cannot be welcomed"):
        warm().enter("welcomed", 0.0)


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
