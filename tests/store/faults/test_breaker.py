"""What does not answer is tried once after each pause, by one."""

from __future__ import annotations

import pytest

from pdconn.lifecycle.load import FETCH_S, LOOKUP_S
from pdconn.store.breaker import Breaker, LoadPatience


def test_a_breaker_opens_at_a_failure_and_closes_at_a_success() -> None:
    breaker = Breaker(5.0, 60.0)
    assert breaker.allows(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert breaker.is_open
    assert not breaker.allows(4.9)
    assert breaker.left_s(4.0) == 1.0
    assert breaker.allows(5.0)
    assert not breaker.allows(5.0), "one tries"
    breaker.succeeded()
    assert breaker.allows(5.0)
    assert breaker.left_s(5.0) == 0.0


def test_pauses_are_doubled_up_to_the_longest_and_short_again_after_a_success() -> None:
    breaker, now, pauses = Breaker(5.0, 60.0), 0.0, []
    for _ in range(6):
        breaker.failed(now)
        pauses.append(breaker.left_s(now))
        now += breaker.left_s(now)
        assert breaker.allows(now)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    breaker.succeeded()
    breaker.failed(now)
    assert breaker.left_s(now) == 5.0


def test_a_try_of_which_nothing_is_heard_is_followed_by_another() -> None:
    """The request that tried was aborted."""
    breaker = Breaker(5.0, 60.0)
    breaker.failed(0.0)
    assert breaker.allows(5.0)
    assert not breaker.allows(9.0)
    assert breaker.allows(10.0)


@pytest.mark.parametrize("most_s", [LOOKUP_S, FETCH_S])
def test_one_request_waits_for_a_shelf_that_hangs(most_s: float) -> None:
    patience = LoadPatience()
    assert all(patience.admits(name, 0.0) for name in "abc")
    assert not patience.is_over("a", most_s, most_s, most_s)
    assert patience.is_over("a", most_s + 0.1, most_s, most_s + 0.1)
    now = most_s + 0.1
    assert patience.is_over("b", 0.1, most_s, now), "it waits no longer than the first did"
    assert not patience.admits("d", now)
    now += 5.0
    assert patience.admits("e", now)
    assert not patience.admits("f", now)
    assert not patience.is_over("e", 1.0, most_s, now + 1.0)
    assert patience.is_over("c", 1.0, most_s, now + 1.0)
    assert patience.is_over("e", most_s + 0.1, most_s, now + most_s + 0.1)
    assert not patience.admits("g", now + most_s + 9.0), "the pause is longer"
    patience.shelf_answered()
    assert patience.admits("g", now + most_s + 9.0)
