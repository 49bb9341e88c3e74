"""Which requests keep both targets, by hand."""

from __future__ import annotations

import pytest

from tests.throughput.roles.load import Outcome, Phase, Targets

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
