"""Over links of any rate the planner takes the better of pulling and computing.

Drawn prompts, engines and links whose times scatter; the planner begins with what it assumes and
learns from its own choices alone.  ``python -m tests.throughput.links`` does the same over
cables of these rates and with pdconn's lender and puller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

import pytest

from pdconn.router.pulls import pull_choice
from pdconn.router.pulls.planner import PullPlanner
from pdconn.router.pulls.pull_choice import Holder, PullChoice
from tests.throughput.links import __main__ as links
from tests.throughput.links.judged import (
    ALIKE,
    HOLDER,
    WARM_UP,
    Drawn,
    Engine,
    Judged,
    Planner,
    Request,
    judge,
    outcome_of,
    share_right,
)
from tests.throughput.links.machines import TOKEN_BYTES, WINDOW

GBITS = (0.2, 1.0, 2.5, 10.0)
RATES = (1_000, 2_500, 8_000, 20_000)
"""Tokens a second of prefill: 2500 at 1 Gbit/s and 20,000 at 10 are a close call."""
TARGET = 0.95
FLOOR = 512


@dataclass(frozen=True, slots=True)
class Link:
    """A cable with TCP on it; a pull is greeted and planned in a fixed time."""

    rng: Random
    gbit_s: float
    fixed_s: float = 0.004
    scatter: float = 0.06

    def pull(self, request: Request) -> float:
        """Seconds of a pull: tokens of half the layers, and their window in the others."""
        saved = request.there - request.held
        bits = 8 * TOKEN_BYTES * (saved + min(WINDOW, saved))
        line_s = self.fixed_s + bits / (0.93e9 * self.gbit_s)
        return line_s * self.rng.uniform(1 - self.scatter, 1 + self.scatter)


def judged_over(
    gbit_s: float,
    rate: float,
    make: Callable[[], Planner] = lambda: PullPlanner.from_floor(FLOOR),
    seeds: int = 8,
) -> list[Judged]:
    """Requests over some links of that rate, each of which begins anew, without the first."""
    judged: list[Judged] = []
    for seed in range(seeds):
        rng = Random(seed)
        requests = [Drawn().request(rng) for _ in range(110)]
        engine = Engine(Random(seed + 100), rate, fixed_s=0.03, scatter=0.03)
        link = Link(Random(seed + 200), gbit_s)
        judged += judge(make(), requests, engine, link.pull)[WARM_UP:]
    return judged


def worst(make: Callable[[], Planner]) -> float:
    """The share that is right where it is the least."""
    every = [(gbit_s, rate) for gbit_s in GBITS for rate in RATES]
    return min(share_right(judged_over(*case, make, seeds=1)) for case in every)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("gbit_s", GBITS)
def test_the_better_way_is_taken(gbit_s: float, rate: float) -> None:
    assert share_right(judged_over(gbit_s, rate)) >= TARGET


def test_the_better_way_differs_by_link_and_by_prompt() -> None:
    """Else the test above would be none."""
    better = [outcome_of(judged_over(gbit_s, 2_500)).pull_better for gbit_s in (0.2, 1.0, 10.0)]
    assert better[0] == 0
    assert 0.3 < better[1] < 0.9
    assert better[2] == 1


class Unlearning(PullPlanner):
    """Control: knows what it assumes, and no more."""

    def note_computed(self, engine: str, tokens: int, seconds: float, now: float) -> None:
        """Forget it."""

    def note_pulled(
        self, engine: str, choice: PullChoice, rest: int, seconds: float, now: float
    ) -> None:
        """Forget it."""


class Pulling(Unlearning):
    """Control: pulls whatever it can."""

    def choose(
        self, engine: str, num_tokens: int, held: int, holders: Iterable[Holder], now: float
    ) -> PullChoice:
        """Pull."""
        [holder] = holders
        return PullChoice(holder, 0.0, 0.0, "always", holder.tokens - held)


@pytest.mark.parametrize("control", [Unlearning, Pulling])
def test_one_that_never_learns_and_one_that_always_pulls_are_wrong(
    control: type[PullPlanner],
) -> None:
    assert worst(lambda: control.from_floor(FLOOR)) < 0.5


def test_one_that_pulls_only_what_is_sure_is_wrong_where_it_is_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is thought too slow is not pulled, so that it is never put right."""
    close = ((1.0, 2_500), (10.0, 20_000))
    assert min(share_right(judged_over(*case)) for case in close) >= TARGET
    monkeypatch.setattr(pull_choice, "BOLD", 0.0)
    monkeypatch.setattr(pull_choice, "GAIN", 0.9)
    assert max(share_right(judged_over(*case)) for case in close) < TARGET


def test_requests_are_judged_by_both_ways() -> None:
    pulled = Judged(600, 1000, is_pulled=True, pull_s=1.2, compute_s=1.0, why="")
    assert not pulled.is_right
    assert pulled.regret == pytest.approx(0.2)
    alike = Judged(600, 1000, is_pulled=True, pull_s=1.0, compute_s=1 - 0.9 * ALIKE, why="")
    assert alike.is_right
    computed = Judged(600, 1000, is_pulled=False, pull_s=1.2, compute_s=1.0, why="")
    assert computed.is_right
    assert computed.regret == 0
    both = outcome_of([pulled, computed])
    assert (both.right, both.pulled, both.pull_better) == (0.5, 0.5, 0)
    assert both.over_best == pytest.approx(0.1)


def test_the_planner_learns_from_its_own_choice_alone() -> None:
    """The planner receives no measurement of the way not taken."""

    class Noting(Unlearning):
        def note_computed(self, engine: str, tokens: int, seconds: float, now: float) -> None:
            noted.append(("computed", tokens, seconds))

        def note_pulled(
            self, engine: str, choice: PullChoice, rest: int, seconds: float, now: float
        ) -> None:
            assert choice.holder is not None
            assert choice.holder.engine == HOLDER
            noted.append(("pulled", rest, seconds))

    noted: list[tuple[str, int, float]] = []
    engine = Engine(Random(1), 20_000, fixed_s=0.01, scatter=0.0)
    requests = [Request(0, 4000, 4100), Request(0, 100, 4100)]  # the second is below the floor
    judged = judge(Noting.from_floor(FLOOR), requests, engine, lambda _: 7.0)
    assert noted == [("pulled", 100, judged[0].pull_s), ("computed", 4100, judged[1].compute_s)]
    assert judged[0].pull_s == pytest.approx(7.0 + 2 * 0.01 + 101 / 20_000)


def test_without_namespaces_it_is_said_what_is_lacking(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(links, "why_not", lambda: "network namespaces need root")
    assert links.main(["--requests", "1"]) == links.EXIT_NOT_HERE
    assert "need root" in capsys.readouterr().err


def test_bytes_of_a_token_that_no_shape_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        links.main(["--token-bytes", "1000"])
    assert "expected a multiple of 576, got 1000" in capsys.readouterr().err
