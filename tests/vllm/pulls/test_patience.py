"""A prefix costs at most what it saves: a holder that freezes is given up, with its blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdconn.lifecycle.pull import (
    Patience,
    Pull,
    PullState,
    ReportFailed,
    ReportReleased,
    SendDone,
)
from pdconn.puller.commands import AbandonPull, CancelPull, ReadBlocks
from pdconn.vllm.pulls.patience import LEAST_S, PULLS, UNKNOWN_S, PrefixPatience
from pdconn.vllm.pulls.pulling import Pulling
from tests.fakes.simulated.hooks import allocated, matched
from tests.vllm.lends.test_prefixes import BLOCKS, HELD, computing, consumer, grant, lent
from transport.testing.inprocess.faults import ManualClock


def taught(clock: ManualClock, compute_s: float, pull_s: float | None = None) -> PrefixPatience:
    """Rates, in seconds for each of a thousand tokens."""
    patience = PrefixPatience(clock)
    for number in range(5):
        prompt = SimpleNamespace(request_id=f"c{number}", num_output_tokens=0)
        patience.note_missing(prompt, 1000)
        patience.note_blocks(prompt.request_id, 0)
        clock.advance(1000 * compute_s)
        prompt.num_output_tokens = 1
        assert patience.overdue() == []
        clock.advance(77.0)  # of decoding
        patience.forget_waits(prompt.request_id)
        if pull_s is not None:
            patience.note_blocks(f"p{number}", 1000)
            clock.advance(1000 * pull_s)
            patience.note_pull(f"p{number}", failed=False)
            patience.forget_waits(f"p{number}")
    assert len(patience) == 0
    return patience


def test_the_bound_is_a_multiple_of_the_pull_and_at_most_computing(clock: ManualClock) -> None:
    assert PrefixPatience(clock).bound_s(10**6) == UNKNOWN_S
    assert abs(taught(clock, 0.01).bound_s(1000) - 10.0) < 1e-6
    assert abs(taught(clock, 0.01, 0.0005).bound_s(1000) - PULLS * 0.5) < 1e-6
    assert abs(taught(clock, 0.01, 0.005).bound_s(1000) - 10.0) < 1e-6
    assert taught(clock, 0.01, 0.005).bound_s(10) == LEAST_S


def test_one_slow_pull_or_one_that_failed_teaches_little(clock: ManualClock) -> None:
    patience = taught(clock, 0.01, 0.0005)
    for name, failed in (("slow", False), ("failed", True)):
        patience.note_blocks(name, 1000)
        clock.advance(100.0)
        patience.note_pull(name, failed=failed)
    assert abs(patience.bound_s(1000) - PULLS * 0.5) < 1e-6


def test_what_is_overdue_is_named_once_claim_or_pull(clock: ManualClock) -> None:
    patience = taught(clock, 0.01, 0.0005)
    patience.note_claim("claim", 1000)
    patience.note_blocks("pull", 1000)
    clock.advance(PULLS * 0.5 - 0.01)
    patience.note_claim("claim", 1000)
    assert patience.overdue() == []
    clock.advance(0.02)
    assert patience.overdue() == ["claim", "pull"]
    assert patience.overdue() == []


# The engine's side


def pulling() -> tuple[Pulling, Any]:
    """A request for a prefix has arrived."""
    side, asked = consumer(), computing(lent())
    side.on_new_request(asked)
    return side, asked


def test_a_claim_that_nobody_answers_is_left_and_the_prompt_is_computed() -> None:
    side, asked = pulling()
    assert matched(side, asked, 0) == (None, False)
    assert side.prefix_of("r") == HELD
    side.take_commands()
    side.abandon("r")
    assert side.take_commands() == [CancelPull("r")]
    assert matched(side, asked, 0) == (0, False)


def test_a_pull_that_takes_too_long_is_left() -> None:
    side, asked = pulling()
    grant(side)
    assert matched(side, asked, 0) == (HELD, True)
    allocated(side, asked, BLOCKS, HELD)
    commands: list[Any] = side.take_commands()
    assert [type(command) for command in commands] == [ReadBlocks]
    side.abandon("r")
    assert side.take_commands() == [AbandonPull("r")]
    side.end_pull("r")
    side.abandon("r")
    assert side.take_commands() == []


# The rank's side


def test_a_read_that_hangs_is_reported_at_once_and_its_blocks_are_kept() -> None:
    """A pull that fails waits for its read otherwise."""
    reports = {}
    for how in (Pull.abandon, Pull.fail):
        pull = Pull(Patience(drain_s=5.0), 0.0)
        pull.greeted(0.0)
        pull.granted(1, 30.0, 0.0)
        pull.want(0.0)
        assert pull.state is PullState.READING
        reports[how] = how(pull, "late", 1.0)
        if how is Pull.abandon:
            assert pull.settled(9.0) == [SendDone(), ReportReleased()]
    assert reports[Pull.abandon] == [ReportFailed("late", quarantined=True)]
    assert reports[Pull.fail] == []


def test_a_claim_that_is_left_is_over() -> None:
    pull = Pull(Patience(), 0.0)
    pull.greeted(0.0)
    pull.want(0.0)
    assert pull.abandon("late", 1.0) == [SendDone(), ReportFailed("late")]
