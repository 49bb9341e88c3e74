"""Which requests keep both targets, by hand."""

from __future__ import annotations

import pytest

from tests.throughput.roles.load import LEAST_RATE, NoRate, Outcome, Phase, Targets, served_rate

TARGETS = Targets(ttft_s=1.0, itl_s=0.1)
GOOD = Outcome(0.9, 0.09)


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(1.1, 0.09),
        Outcome(0.9, 0.11),
        Outcome(error="refused"),
        Outcome(0.9, 0.09, differs="token 3"),
    ],
)
def test_a_request_counts_if_it_is_right_and_keeps_both_targets(outcome: Outcome) -> None:
    assert GOOD.keeps(TARGETS)
    assert not outcome.keeps(TARGETS)
    assert Phase("prompts", [GOOD, GOOD, GOOD, outcome]).goodput(TARGETS) == 0.75


def test_lost_and_wrong_requests_are_counted_apart() -> None:
    phase = Phase("answers", [GOOD, Outcome(error="refused"), Outcome(0.9, 0.09, differs="3")])
    assert (phase.num_lost, phase.num_wrong, phase.first_error) == (1, 1, "refused")
    assert Phase("answers", [GOOD]).first_error is None


@pytest.mark.parametrize("most", [12.0, 10.0, 6.0, 3.8])
def test_the_rate_is_one_that_the_best_ratio_serves(most: float) -> None:
    """Of a fleet that serves ``most`` requests a second, and none of more."""
    asked: list[float] = []

    def goodput(per_s: float) -> float:
        asked.append(per_s)
        return 1.0 if per_s <= most else 0.1

    found = served_rate(10.0, goodput)
    assert 0.85**2 * min(most, 10.0) <= found <= 0.85 * most, "with room for a slower machine"
    assert asked[-1] == pytest.approx(found / 0.85)


def test_a_fleet_that_serves_nothing_is_no_benchmark() -> None:
    asked: list[float] = []
    with pytest.raises(NoRate, match="the goodput is"):
        served_rate(10.0, lambda per_s: asked.append(per_s) or 0.5)
    assert min(asked) >= 10.0 * LEAST_RATE
    assert len(asked) > 3
