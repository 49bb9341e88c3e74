"""The faster of pull and recompute is chosen, and no holder is overrun."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pdconn.router.pulls.choose import Chooser, Holder, PullChoice
from pdconn.router.pulls.rates import Lines

PROMPT, HELD_THERE = 4000, 3200


def chooser(pull_token_s: float = 1e-5, **changes: Any) -> Chooser:
    """Prefill computes 10,000 tokens a second."""
    return Chooser(Lines(0.01, 1e-4), Lines(0.02, pull_token_s), **changes)


def choose(made: Chooser, held: int = 0, **holder: Any) -> PullChoice:
    there = Holder(**{"engine": "holder", "tokens": HELD_THERE} | holder)
    return made.choose("prefill", PROMPT, held, [there], now=0.0)


def test_a_fast_link_is_taken() -> None:
    chosen = choose(chooser())
    assert chosen.holder is not None
    assert chosen.seconds == pytest.approx(0.02 + 0.032 + 0.01 + 0.08)
    assert chosen.computed_s == pytest.approx(0.41)


@pytest.mark.parametrize(
    ("made", "held", "holder", "why"),
    [
        (chooser(1e-3), 0, {}, "would take"),
        (chooser(), 3200, {}, "nobody holds more"),
        (chooser(), 3100, {}, "holds 100 tokens more, of at least 512"),
        (chooser(), 0, {"num_lent": 4}, "lends to 4 already"),
        (chooser(), 0, {"num_waiting": 1}, "1 requests waiting"),
        (chooser(), 0, {"engine": "prefill"}, "nobody holds more"),
        (chooser(floor=4000), 0, {}, "of at least 4000"),
    ],
)
def test_else_it_is_computed_and_said_why(
    made: Chooser, held: int, holder: dict[str, Any], why: str
) -> None:
    chosen = choose(made, held, **holder)
    assert chosen.holder is None
    assert why in chosen.why
    assert chosen.seconds == chosen.computed_s


def test_the_best_of_several_holders_is_taken() -> None:
    made = chooser()
    for _ in range(20):
        made.pulling.see(("near", "prefill"), 3000, 0.03, now=0.0)
        made.pulling.see(("far", "prefill"), 3000, 0.2, now=0.0)
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
            made.pulling.see(
                ("h", "prefill"), held, (0.03 + token_s * held) * scatter, number * 0.1
            )
        else:
            made.computing.see("prefill", num_tokens, true_compute * scatter, now)
    assert right >= 0.95 * count, right / count
