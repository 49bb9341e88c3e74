"""The faster of pull and recompute is chosen, and no holder is overrun."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pdconn.router.pulls.planner import PullPlanner
from pdconn.router.pulls.pull_choice import Chooser, Holder, PullChoice
from pdconn.router.pulls.rates import Lines

PROMPT, HELD_THERE = 4000, 3200


def chooser(pull_token_s: float = 1e-5, load_token_s: float = 5e-5, **changes: Any) -> Chooser:
    """Prefill computes 10,000 tokens a second."""
    lines = Lines(0.01, 1e-4), Lines(0.02, pull_token_s), Lines(0.01, load_token_s)
    return Chooser(*lines, **changes)


def choose(made: Chooser, held: int = 0, stored: int = 0, **holder: Any) -> PullChoice:
    there = Holder(**{"engine": "holder", "tokens": HELD_THERE} | holder)
    return made.choose("prefill", PROMPT, held, [there], now=0.0, stored=stored)


def test_a_fast_link_is_taken() -> None:
    chosen = choose(chooser())
    assert chosen.holder is not None
    assert chosen.seconds == pytest.approx(0.02 + 0.032 + 0.01 + 0.08)
    assert chosen.otherwise_s == pytest.approx(0.41)


@pytest.mark.parametrize(
    ("made", "held", "holder", "why"),
    [
        (chooser(1e-3), 0, {}, "would take"),
        (chooser(), 3200, {}, "no engine holds more"),
        (chooser(), 3100, {}, "holds 100 tokens more, of at least 512"),
        (chooser(), 0, {"num_lent": 4}, "lends to 4 already"),
        (chooser(), 0, {"num_waiting": 1}, "1 requests waiting"),
        (chooser(), 0, {"engine": "prefill"}, "no engine holds more"),
        (chooser(floor=4000), 0, {}, "of at least 4000"),
    ],
)
def test_else_it_is_computed_and_said_why(
    made: Chooser, held: int, holder: dict[str, Any], why: str
) -> None:
    chosen = choose(made, held, **holder)
    assert chosen.holder is None
    assert why in chosen.why
    assert chosen.seconds == chosen.otherwise_s


def test_the_best_of_several_holders_is_taken() -> None:
    made = chooser()
    for _ in range(20):
        made.pulling.add_measurement(("near", "prefill"), 3000, 0.03, now=0.0)
        made.pulling.add_measurement(("far", "prefill"), 3000, 0.2, now=0.0)
    holders = [Holder("far", 3500), Holder("near", 3200), Holder("busy", 3900, num_lent=9)]
    chosen = made.choose("prefill", PROMPT, 0, holders, now=1.0)
    assert chosen.holder == holders[1]


@pytest.mark.parametrize("gbit_s", [0.2, 1.0, 10.0])
def test_in_most_cases_it_is_the_faster_one(gbit_s: float) -> None:
    """Of prompts of any length, judged by what each way truly takes; 16 KiB a token."""
    rng = Random(int(10 * gbit_s))
    token_s = 16384 * 8 / (gbit_s * 1e9)
    made = chooser(1e-5, floor=0)
    right, count = 0, 0
    for number in range(600):
        held, num_tokens = rng.randint(100, 8000), rng.randint(100, 4000)
        num_tokens += held
        true_pull = 0.03 + token_s * held + 0.01 + 5e-4 * (num_tokens - held)
        true_compute = 0.01 + 5e-4 * num_tokens
        chosen = made.choose("prefill", num_tokens, 0, [Holder("h", held)], now=number * 0.1)
        is_pulled = chosen.holder is not None
        if number >= 100:
            count += 1
            right += is_pulled == (true_pull < true_compute)
        scatter, now = rng.uniform(0.9, 1.1), number * 0.1
        if is_pulled:
            made.pulling.add_measurement(
                ("h", "prefill"), held, (0.03 + token_s * held) * scatter, number * 0.1
            )
        else:
            made.computing.add_measurement("prefill", num_tokens, true_compute * scatter, now)
    assert right >= 0.95 * count, right / count


def test_a_pull_that_is_doubtful_is_tried() -> None:
    """Long ones were not seen, and look a little slower.  Control: not if they were seen so."""
    choices = []
    for lengths in ((600, 640, 700), (600, 3200, 6000)):
        made = chooser(floor=0)
        for tokens in lengths * 10:
            made.pulling.add_measurement(
                ("holder", "prefill"), tokens, 0.02 + 1e-4 * tokens, now=0.0
            )
        choices.append(choose(made))
    assert choices[0].holder is not None
    assert choices[1].holder is None
    assert choices[0].seconds < choices[0].otherwise_s


@pytest.mark.parametrize(
    ("load_token_s", "stored", "is_pulled"),
    [
        (5e-5, 3200, True),  # pulled in 0.05 s, loaded in 0.17 s
        (1e-6, 3200, False),  # loaded in 0.01 s
        (1e-6, 1600, True),  # so it is, and 1600 tokens more are computed in 0.16 s
        (1e-6, 3900, False),
        (9e-5, 3900, True),  # what is stored beyond takes longer to load than to compute
    ],
)
def test_a_store_competes(load_token_s: float, stored: int, is_pulled: bool) -> None:
    """And the engine does what its choice says it would take, to the third decimal."""
    chosen = choose(chooser(load_token_s=load_token_s), stored=stored)
    load_s = 0.01 + load_token_s * stored
    assert chosen.otherwise_s == pytest.approx(load_s + 0.01 + 1e-4 * (PROMPT - stored))
    pulled_s = 0.02 + 1e-5 * HELD_THERE + 0.01 + 1e-4 * (PROMPT - HELD_THERE)
    assert (pulled_s < chosen.otherwise_s) == is_pulled == (chosen.holder is not None)
    assert chosen.seconds == pytest.approx(min(pulled_s, chosen.otherwise_s))
    assert chosen.load_cost == pytest.approx(load_s / (0.41 / PROMPT))
    assert "loading and computing take" in chosen.why or not is_pulled


def test_a_store_that_is_not_considered_loses_too_often() -> None:
    """Control: the same prompt as if it were computed."""
    assert choose(chooser(load_token_s=1e-6)).holder is not None


@pytest.mark.parametrize(("load_s", "pull_s"), [(0.05, 0.4), (0.4, 0.05), (0.2, 0.1), (0.1, 0.2)])
def test_the_better_of_loading_and_pulling_is_found(load_s: float, pull_s: float) -> None:
    """By a planner that begins with what it assumes, and sees what it chose alone."""
    planner, rng = PullPlanner.from_floor(512), Random(3)
    fixed_s, token_s = 0.03, 1 / 2500
    right = 0
    for number in range(120):
        stored, rest = rng.randint(1000, 5000), rng.randint(50, 300)
        now, num_tokens = float(number), stored + rest
        if number < 6:  # prompts that no engine holds
            planner.note_computed("p", num_tokens, fixed_s + token_s * num_tokens, now)
            continue
        holders = [Holder("h", stored)]
        chosen = planner.choose("p", num_tokens, 0, holders, now, stored=stored)
        took_s = fixed_s + token_s * rest + rng.uniform(0, 0.01)
        true_load, true_pull = load_s * stored / 3000, pull_s * stored / 3000
        if chosen.holder is None:
            planner.note_loaded("p", stored, rest, took_s + true_load, now)
        else:
            planner.note_pulled("p", chosen, rest, took_s + true_pull, now)
        right += (chosen.holder is None) == (true_load < true_pull)
    assert right >= 0.95 * 114, right
