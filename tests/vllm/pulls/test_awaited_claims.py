"""Laws of an engine with a store: a ticket is promised when every rank holds its claim.

vLLM takes no promise back, so a lender that is gone must be known before it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdconn.puller.commands import CancelPull, ClaimOutcome, ClaimTicket, FailPull, ReadBlocks
from pdconn.vllm.pulls.pull_rules import PullRules
from pdconn.vllm.pulls.pulling import Pulling
from tests.fakes.simulated.hooks import allocated, finished, half_of, matched
from tests.vllm.pulls.test_pulling import BLOCKS, MAX_MODEL_LEN, PROMPT, kinds, request

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.v1.outputs import KVConnectorOutput

    from pdconn.vllm.metadata import PdWorkerReport
    from pdconn.vllm.scheduler import SchedulerParts
    from pdconn.vllm.scheduler_part import Matched, SchedulerPart

RANKS = 2
GONE = "side channel: closed by the peer"


class Asked:
    """A scheduler whose ranks answer when a test says so."""

    def __init__(
        self,
        recompute: bool = False,
        prefix_caching: bool = False,
        kind: type[Pulling] = Pulling,
    ) -> None:
        self.side = kind(
            PullRules(
                "here", recompute, prefix_caching, MAX_MODEL_LEN, num_ranks=RANKS, is_awaiting=True
            )
        )
        self.claims: dict[str, ClaimTicket] = {}

    def arrive(self, asked: Any) -> None:
        self.side.on_new_request(asked)
        for command in self.side.take_commands():
            if isinstance(command, ClaimTicket):
                self.claims[command.request] = command

    def told(self, name: str, rank: int, problem: str | None = None) -> None:
        self.side.note_claims([ClaimOutcome(name, self.claims[name].pull, rank, problem)])

    def grant(self, name: str, ranks: Iterable[int] = range(RANKS)) -> None:
        for rank in ranks:
            self.told(name, rank)


def test_a_ticket_is_promised_when_every_rank_was_granted_it() -> None:
    engine, asked = Asked(), request()
    engine.arrive(asked)
    assert engine.claims["d"].is_awaited
    for rank in range(RANKS):
        assert matched(engine.side, asked, 0) == (None, False)
        engine.told("d", 0)  # the same rank again is no other rank
        engine.told("d", rank)
    assert matched(engine.side, asked, 0) == (39, True)
    allocated(engine.side, asked, BLOCKS, 39)
    assert kinds(engine.side.take_commands()) == [ReadBlocks]
    engine.side.end_pull("d")
    assert len(engine.side) == 0
    assert engine.side.take_counts() == {}


def test_without_a_store_it_is_promised_at_once() -> None:
    side, asked = Pulling(PullRules("here", False, False, MAX_MODEL_LEN)), request()
    side.on_new_request(asked)
    [claim] = side.take_commands()
    assert isinstance(claim, ClaimTicket)
    assert not claim.is_awaited
    assert matched(side, asked, 0) == (39, True)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("granted", [(), (0,), (0, 1)], ids=["none", "one", "both"])
def test_a_claim_that_fails_or_is_lost_leaves_the_request_to_the_store(
    granted: tuple[int, ...], recompute: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, asked = Asked(recompute), request()
    engine.arrive(asked)
    engine.grant("d", granted)
    matched(engine.side, asked, 0)
    with caplog.at_level(logging.WARNING, logger="pdconn"):
        for rank in (1, 0):  # both ranks lose their lender, one a little later
            engine.told("d", rank, GONE)
    assert matched(engine.side, asked, 0) == (0, False)
    assert engine.side.take_commands() == [CancelPull("d")], "the claim is given back, once"
    assert engine.side.take_counts() == {"tickets_gone": 1}
    [line] = caplog.messages
    assert "lender=p at localhost:5600" in line
    assert f"ticket dropped: {GONE} " in line
    allocated(engine.side, asked, BLOCKS, 0)
    finished(engine.side, asked)
    assert engine.side.take_commands() == []
    assert len(engine.side) == 0


@pytest.mark.parametrize("num_local", [39, 64])
def test_a_full_local_hit_waits_for_no_claim(num_local: int) -> None:
    engine, asked = Asked(), request()
    engine.arrive(asked)
    assert matched(engine.side, asked, num_local) == (0, False)
    allocated(engine.side, asked, BLOCKS, 0)
    assert engine.side.take_commands() == [CancelPull("d")]


def test_what_is_told_of_an_earlier_request_of_the_same_name_is_left_out() -> None:
    engine, first, second = Asked(), request(), request()
    engine.arrive(first)
    earlier = engine.claims["d"].pull
    finished(engine.side, first)
    engine.arrive(second)
    engine.side.note_claims([ClaimOutcome("d", earlier, rank) for rank in range(RANKS)])
    assert matched(engine.side, second, 0) == (None, False)
    engine.side.note_claims([ClaimOutcome("d", earlier, 0, GONE)])
    engine.grant("d")
    assert matched(engine.side, second, 0) == (39, True)


@pytest.mark.parametrize("wrong", [{"remote_port": "x"}, {"remote_num_tokens": "x"}])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_wrong_ticket_is_its_clients_error_with_a_store_too(wrong: Any, recompute: bool) -> None:
    """It fails, or is computed, as the policy says, and waits for nothing."""
    engine, asked = Asked(recompute), request(**wrong)
    engine.arrive(asked)
    assert matched(engine.side, asked, 0) == ((0, False) if recompute else (39, True))
    if "d" in engine.claims:
        engine.told("d", 0, GONE)
    allocated(engine.side, asked, BLOCKS, 0 if recompute else 39)
    commands = engine.side.take_commands()
    assert kinds(commands).count(FailPull) == (0 if recompute else 1)
    assert kinds(commands).count(CancelPull) == len(engine.claims)
    assert engine.side.take_counts() == {}


@pytest.mark.parametrize("recompute", [True, False])
def test_a_ticket_for_another_prompt_is_given_up_at_every_rank(recompute: bool) -> None:
    """Its request is computed, and waits for no claim, whatever the policy says of pulls."""
    engine, asked = Asked(recompute), request(remote_num_tokens=3)
    engine.arrive(asked)
    assert matched(engine.side, asked, 0) == (0, False)
    allocated(engine.side, asked, BLOCKS, 0)
    assert kinds(engine.side.take_commands()).count(CancelPull) == 1
    assert engine.side.take_counts() == {"tickets_mistaken": 1}
    assert len(engine.side) == 0


def test_a_preempted_request_waits_for_no_claim() -> None:
    engine, asked = Asked(), request()
    engine.arrive(asked)
    engine.grant("d")
    matched(engine.side, asked, 0)
    allocated(engine.side, asked, BLOCKS, 39)
    engine.side.end_pull("d")
    assert matched(engine.side, asked, 0) == (0, False)


# Siblings


def test_a_sibling_whose_claim_fails_waits_for_the_first_pull_all_the_same() -> None:
    engine = Asked(prefix_caching=True)
    first, second = request("0_d"), request("1_d")
    for asked in (first, second):
        engine.arrive(asked)
    engine.grant("0_d")
    matched(engine.side, first, 0)
    allocated(engine.side, first, BLOCKS, 39)
    engine.told("1_d", 0, "refused, consumed: ")
    assert matched(engine.side, second, 0) == (None, False)
    engine.side.end_pull("0_d")
    assert matched(engine.side, second, 32) == (0, False), "the rest is the store's, or computed"


def test_siblings_of_a_lender_that_is_gone_all_go_to_the_store() -> None:
    engine = Asked(prefix_caching=True)
    siblings = [request(f"{number}_d") for number in range(3)]
    for asked in siblings:
        engine.arrive(asked)
    for asked in siblings:
        engine.told(asked.request_id, 0, GONE)
    for asked in siblings:
        assert matched(engine.side, asked, 0) == (0, False)
        allocated(engine.side, asked, BLOCKS, 0)
    late = request("3_d")
    engine.arrive(late)
    assert "3_d" in engine.claims, "no pull began, so it asks for itself"
    assert matched(engine.side, late, 0) == (None, False)


# From the workers to the store


def test_what_ranks_tell_reaches_the_scheduler_and_the_store_is_asked() -> None:
    asked_of_store: list[int] = []

    class Stored(SchedulerPart):
        """Has 32 tokens of every prompt."""

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched:
            asked_of_store.append(num_computed_tokens)
            return 32, True

    engine, asked = Asked(), request()
    storing: Any = Stored()
    scheduler = half_of(SchedulerParts(pulling=engine.side, storing=storing))
    engine.arrive(asked)
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (None, False)
    assert not asked_of_store
    pull = engine.claims["d"].pull
    reports = [
        PdWorkerReport(claims=[ClaimOutcome("d", pull, 0)]),
        PdWorkerReport(claims=[ClaimOutcome("d", pull, 1, GONE)]),
    ]
    assert not any(report.is_empty for report in reports)
    joined = reports[0].aggregate(reports[1])
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=joined))
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (32, True)
    assert asked_of_store == [0]


# Every order of events


class AtTheFirstGrant(Pulling):
    """As one that does not wait for the other ranks."""

    def note_claims(self, outcomes: Iterable[ClaimOutcome]) -> None:
        for told in outcomes:
            every = [told] if told.problem else [replace(told, rank=rank) for rank in range(RANKS)]
            super().note_claims(every)


class DeafToLosses(Pulling):
    """As one that believes a grant for ever."""

    def note_claims(self, outcomes: Iterable[ClaimOutcome]) -> None:
        super().note_claims([told for told in outcomes if told.problem is None])


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("told"), st.integers(0, RANKS - 1), st.booleans()),
        st.tuples(st.just("asked"), st.sampled_from([0, 16, 39]), st.booleans()),
    ),
    max_size=12,
)


def _run(events: Any, recompute: bool, kind: type[Pulling] = Pulling) -> None:
    """Ask and tell in the order given; an ask that is answered may find blocks or not."""
    engine, asked = Asked(recompute, kind=kind), request()
    engine.arrive(asked)
    granted: set[int] = set()
    failed: set[int] = set()
    for what, number, flag in events:
        if what == "told":
            if number in failed or (flag and number in granted):
                continue  # a rank tells a grant once, and a failure last
            (granted if flag else failed).add(number)
            engine.told("d", number, None if flag else GONE)
            continue
        count, is_async = matched(engine.side, asked, number)
        rest = len(PROMPT) - 1 - number
        if rest == 0 or failed:
            assert (count, is_async) == (0, False)
        elif len(granted) == RANKS:
            assert (count, is_async) == (rest, True)
        else:
            assert (count, is_async) == (None, False)
        if count is not None and flag:
            allocated(engine.side, asked, BLOCKS, count)
            break
    finished(engine.side, asked)
    commands = engine.side.take_commands()
    assert CancelPull("d") in commands, "the lender is told in the end"
    assert kinds(commands).count(ReadBlocks) == (len(engine.side) > 0)
    assert FailPull not in kinds(commands)
    engine.side.end_pull("d")
    assert len(engine.side) == 0


@settings(max_examples=300, deadline=None)
@given(events=EVENTS, recompute=st.booleans())
def test_promised_if_and_only_if_every_rank_holds_its_claim(events: Any, recompute: bool) -> None:
    _run(events, recompute)


@pytest.mark.parametrize("kind", [AtTheFirstGrant, DeafToLosses])
def test_that_law_notices_a_promise_too_early(kind: type[Pulling]) -> None:
    @settings(max_examples=300, deadline=None, database=None)
    @given(events=EVENTS)
    def run(events: Any) -> None:
        _run(events, False, kind)

    with pytest.raises(AssertionError):
        run()
