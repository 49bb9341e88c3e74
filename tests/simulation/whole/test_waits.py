"""Engines that lend and pull do not wait for each other, whatever their roles and sizes.

vLLM's own scheduler, our connector, sessions and pulls, in virtual time.  ``PDCONN_CHAOS=10000``
runs more seeds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

from pdconn.vllm.lends.waits import FIRST_S, ROUND_S, BlockWaits
from pdconn.vllm.pulls.pulling import Pulling
from tests.simulation.laws import LawBroken
from tests.simulation.whole.fleet import ANY, BOTH, ITSELF, ONE_WAY, RING, Fleet, Shape

SEEDS = range(max(2, int(os.environ.get("PDCONN_CHAOS", "0")) // 100))
LONG = (30, 80)
"""Tokens of prompts that take up to 85 % of an engine's blocks, beside 96 tokens."""

SHAPES = {
    "both": Shape(BOTH),
    "both, policy fail": Shape(BOTH, policy="fail"),
    "itself": Shape(ITSELF, tokens=(4, 40)),
    "any to any": Shape(ANY, tokens=(4, 40)),
    "ring": Shape(RING, tokens=(4, 40)),
    "long prompts": Shape(BOTH, tokens=LONG),
    "long prompts in a ring": Shape(RING, tokens=LONG, policy="fail"),
    "second turns": Shape(ONE_WAY, turns=True, tokens=(4, 40)),
    "long second turns": Shape(ONE_WAY, turns=True, tokens=(30, 60), requests=20),
    "second turns of both": Shape(BOTH, turns=True, tokens=(4, 40), policy="fail"),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def ran(shape: Shape, seed: int) -> Fleet:
    """The law is checked at every event."""
    fleet = Fleet(shape, seed)
    fleet.run()
    return fleet


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SHAPES)
def test_everybody_is_answered_and_every_table_drains(name: str, seed: int) -> None:
    fleet = ran(SHAPES[name], seed)
    print(f"{name}: slowest {fleet.slowest_s:.2f} s, gave way {fleet.count('tickets_gave_way')}")
    assert (fleet.clients.num_open, fleet.wrong(), fleet.left()) == (0, [], {})
    assert fleet.world.counts["errors"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_none_waits_twice_as_long_as_where_engines_have_one_role(seed: int) -> None:
    """Where claims are given up, a stall and a round come on top."""
    one_way, both = ran(Shape(ONE_WAY), seed), ran(Shape(BOTH), seed)
    rounds_s = FIRST_S + ROUND_S if both.count("tickets_gave_way") else 0.0
    assert both.slowest_s <= 2 * one_way.slowest_s + rounds_s


def test_claims_are_given_up_in_few_runs() -> None:
    """There is room without that in nine runs of ten."""
    gave_way = [ran(Shape(BOTH), seed).count("tickets_gave_way") > 0 for seed in SEEDS]
    assert sum(gave_way) <= len(SEEDS) / 5


# Negative controls


def unyielding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request keeps its claim until it has blocks."""
    monkeypatch.setattr(Pulling, "drop_claims", lambda self, requests: None)


def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are computed for others however much is lent."""
    monkeypatch.setattr(BlockWaits, "is_held_back", lambda self, request: False)


def unlawful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "_nothing_that_stands_still_holds_claims", lambda self: None)


def test_as_it_was_before_engines_in_both_roles_wait_for_each_other_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unyielding(monkeypatch)
    greedy(monkeypatch)
    unlawful(monkeypatch)
    fleet = ran(Shape(BOTH), 0)
    assert fleet.clients.num_open == 16
    assert fleet.count("renewals") > 20, "claims are renewed all the while"


@pytest.mark.parametrize("shape", [Shape(BOTH), SHAPES["long second turns"]], ids=["both", "turns"])
def test_claims_that_are_kept_while_nothing_moves_are_noticed(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    unyielding(monkeypatch)
    greedy(monkeypatch)
    with pytest.raises(LawBroken, match="stands still"):
        ran(shape, 0)


def test_without_a_share_for_decoding_all_are_answered_but_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    greedy(monkeypatch)
    fleet = ran(Shape(BOTH), 0)
    assert fleet.clients.num_open == 0
    assert fleet.count("tickets_gave_way") > 0
    assert fleet.slowest_s > 2 * ran(Shape(ONE_WAY), 0).slowest_s
