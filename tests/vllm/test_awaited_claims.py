"""Laws of an engine with a store: a ticket is promised when every rank holds its claim.

vLLM takes no promise back, so a lender that is gone must be known before it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdconn.puller.commands import CancelPull, ClaimTicket, FailPull, ReadBlocks
from pdconn.puller.results import ClaimOutcome
from pdconn.vllm.consumer import ConsumerScheduler
from tests.vllm.test_consumer import BLOCKS, MAX_MODEL_LEN, PROMPT, kinds, request

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.v1.outputs import KVConnectorOutput

    from pdconn.vllm.metadata import PdWorkerReport
    from pdconn.vllm.scheduler import PdScheduler
    from pdconn.vllm.tracing.pulls import PullSpans

RANKS = 2
GONE = "side channel: closed by the peer"


class Asked:
    """A scheduler whose ranks answer when a test says so."""

    def __init__(
        self,
        recompute: bool = False,
        prefix_caching: bool = False,
        kind: type[ConsumerScheduler] = ConsumerScheduler,
    ) -> None:
        self.side = kind(
            "here", recompute, prefix_caching, MAX_MODEL_LEN, num_ranks=RANKS, is_awaiting=True
        )
        self.claims: dict[str, ClaimTicket] = {}

    def arrive(self, asked: Any) -> None:
        self.side.arrived(asked)
        for command in self.side.take_commands():
            if isinstance(command, ClaimTicket):
                self.claims[command.request] = command

    def told(self, name: str, rank: int, problem: str | None = None) -> None:
        self.side.claimed([ClaimOutcome(name, self.claims[name].pull, rank, problem)])

    def grant(self, name: str, ranks: Iterable[int] = range(RANKS)) -> None:
        for rank in ranks:
            self.told(name, rank)


def test_a_ticket_is_promised_when_every_rank_was_granted_it() -> None:
    engine, asked = Asked(), request()
    engine.arrive(asked)
    assert engine.claims["d"].is_awaited
    for rank in range(RANKS):
        assert engine.side.matched(asked, 0) == (None, False)
        engine.told("d", 0)  # the same rank again is no other rank
        engine.told("d", rank)
    assert engine.side.matched(asked, 0) == (39, True)
    engine.side.allocated(asked, BLOCKS, 39)
    assert kinds(engine.side.take_commands()) == [ReadBlocks]
    engine.side.reported("d")
    assert len(engine.side) == 0
    assert engine.side.take_counts() == {}


def test_without_a_store_it_is_promised_at_once() -> None:
    side, asked = ConsumerScheduler("here", False, False, MAX_MODEL_LEN), request()
    side.arrived(asked)
    [claim] = side.take_commands()
    assert isinstance(claim, ClaimTicket)
    assert not claim.is_awaited
    assert side.matched(asked, 0) == (39, True)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("granted", [(), (0,), (0, 1)], ids=["none", "one", "both"])
def test_a_claim_that_fails_or_is_lost_leaves_the_request_to_the_store(
    granted: tuple[int, ...], recompute: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, asked = Asked(recompute), request()
    engine.arrive(asked)
    engine.grant("d", granted)
    engine.side.matched(asked, 0)
    with caplog.at_level(logging.WARNING, logger="pdconn"):
        for rank in (1, 0):  # both ranks lose their lender, one a little later
            engine.told("d", rank, GONE)
    assert engine.side.matched(asked, 0) == (0, False)
    assert engine.side.take_commands() == [CancelPull("d")], "the claim is given back, once"
    assert engine.side.take_counts() == {"tickets_gone": 1}
    [line] = caplog.messages
    assert "lender=p at localhost:5600" in line
    assert f"reason={GONE}" in line
    engine.side.allocated(asked, BLOCKS, 0)
    engine.side.finished(asked)
    assert engine.side.take_commands() == []
    assert len(engine.side) == 0


def test_a_grant_lost_while_there_are_no_blocks_is_no_longer_promised() -> None:
    engine, asked = Asked(), request()
    engine.arrive(asked)
    engine.grant("d")
    assert engine.side.matched(asked, 0) == (39, True), "and no blocks were free"
    engine.told("d", 0, GONE)
    assert engine.side.matched(asked, 0) == (0, False)


def test_a_claim_that_is_lost_when_there_are_blocks_is_the_pulls_matter() -> None:
    engine, asked = Asked(), request()
    engine.arrive(asked)
    engine.grant("d")
    engine.side.matched(asked, 0)
    engine.side.allocated(asked, BLOCKS, 39)
    engine.told("d", 0, GONE)
    assert kinds(engine.side.take_commands()) == [ReadBlocks]
    assert len(engine.side) == 1, "until the workers report"
    engine.side.reported("d")
    assert len(engine.side) == 0


@pytest.mark.parametrize("num_local", [39, 64])
def test_a_full_local_hit_waits_for_no_claim(num_local: int) -> None:
    engine, asked = Asked(), request()
    engine.arrive(asked)
    assert engine.side.matched(asked, num_local) == (0, False)
    engine.side.allocated(asked, BLOCKS, 0)
    assert engine.side.take_commands() == [CancelPull("d")]


def test_a_request_aborted_while_it_waits_gives_its_claim_up_and_hears_nothing_more() -> None:
    engine, asked = Asked(), request()
    engine.arrive(asked)
    assert engine.side.matched(asked, 0) == (None, False)
    engine.side.finished(asked)
    engine.told("d", 0)
    engine.told("d", 1, GONE)
    assert engine.side.take_commands() == [CancelPull("d")]
    assert len(engine.side) == 0
    assert engine.side.take_counts() == {}


def test_what_is_told_of_an_earlier_request_of_the_same_name_is_left_out() -> None:
    engine, first, second = Asked(), request(), request()
    engine.arrive(first)
    earlier = engine.claims["d"].pull
    engine.side.finished(first)
    engine.arrive(second)
    engine.side.claimed([ClaimOutcome("d", earlier, rank) for rank in range(RANKS)])
    assert engine.side.matched(second, 0) == (None, False)
    engine.side.claimed([ClaimOutcome("d", earlier, 0, GONE)])
    engine.grant("d")
    assert engine.side.matched(second, 0) == (39, True)


@pytest.mark.parametrize("wrong", [{"remote_port": "x"}, {"remote_num_tokens": "x"}])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_wrong_ticket_is_its_clients_error_with_a_store_too(wrong: Any, recompute: bool) -> None:
    """It fails, or is computed, as the policy says, and waits for nothing."""
    engine, asked = Asked(recompute), request(**wrong)
    engine.arrive(asked)
    assert engine.side.matched(asked, 0) == ((0, False) if recompute else (39, True))
    if "d" in engine.claims:
        engine.told("d", 0, GONE)
    engine.side.allocated(asked, BLOCKS, 0 if recompute else 39)
    commands = engine.side.take_commands()
    assert kinds(commands).count(FailPull) == (0 if recompute else 1)
    assert kinds(commands).count(CancelPull) == len(engine.claims)
    assert engine.side.take_counts() == {}


@pytest.mark.parametrize("recompute", [True, False])
def test_a_ticket_for_another_prompt_is_given_up_at_every_rank(recompute: bool) -> None:
    """Its request is computed, and waits for no claim, whatever the policy says of pulls."""
    engine, asked = Asked(recompute), request(remote_num_tokens=3)
    engine.arrive(asked)
    assert engine.side.matched(asked, 0) == (0, False)
    engine.side.allocated(asked, BLOCKS, 0)
    assert kinds(engine.side.take_commands()).count(CancelPull) == 1
    assert engine.side.take_counts() == {"tickets_mistaken": 1}
    assert len(engine.side) == 0


def test_a_preempted_request_waits_for_no_claim() -> None:
    engine, asked = Asked(), request()
    engine.arrive(asked)
    engine.grant("d")
    engine.side.matched(asked, 0)
    engine.side.allocated(asked, BLOCKS, 39)
    engine.side.reported("d")
    assert engine.side.matched(asked, 0) == (0, False)


# Siblings


def test_a_sibling_whose_claim_fails_waits_for_the_first_pull_all_the_same() -> None:
    engine = Asked(prefix_caching=True)
    first, second = request("0_d"), request("1_d")
    for asked in (first, second):
        engine.arrive(asked)
    engine.grant("0_d")
    engine.side.matched(first, 0)
    engine.side.allocated(first, BLOCKS, 39)
    engine.told("1_d", 0, "refused, consumed: ")
    assert engine.side.matched(second, 0) == (None, False)
    engine.side.reported("0_d")
    assert engine.side.matched(second, 32) == (0, False), "the rest is the store's, or computed"


def test_siblings_of_a_lender_that_is_gone_all_go_to_the_store() -> None:
    engine = Asked(prefix_caching=True)
    siblings = [request(f"{number}_d") for number in range(3)]
    for asked in siblings:
        engine.arrive(asked)
    for asked in siblings:
        engine.told(asked.request_id, 0, GONE)
    for asked in siblings:
        assert engine.side.matched(asked, 0) == (0, False)
        engine.side.allocated(asked, BLOCKS, 0)
    late = request("3_d")
    engine.arrive(late)
    assert "3_d" in engine.claims, "no pull began, so it asks for itself"
    assert engine.side.matched(late, 0) == (None, False)


# From the workers to the store


def test_what_ranks_tell_reaches_the_scheduler_and_the_store_is_asked() -> None:
    asked_of_store: list[int] = []

    def matched(request: Any, num_local: int) -> int:
        del request
        asked_of_store.append(num_local)
        return 32

    scheduler: Any = PdScheduler.__new__(PdScheduler)
    scheduler._spans = PullSpans()
    scheduler._answers = None
    scheduler._producer, scheduler._quarantine, scheduler._loading_from_store = None, None, set()
    scheduler._promised_by_store = set()
    engine, asked = Asked(), request()
    scheduler._consumer = engine.side
    scheduler._store = SimpleNamespace(matched=matched, note=lambda results: None)
    engine.arrive(asked)
    assert scheduler.matched(asked, 0) == (None, False)
    assert not asked_of_store
    pull = engine.claims["d"].pull
    reports = [
        PdWorkerReport(claims=[ClaimOutcome("d", pull, 0)]),
        PdWorkerReport(claims=[ClaimOutcome("d", pull, 1, GONE)]),
    ]
    assert not any(report.is_empty for report in reports)
    joined = reports[0].aggregate(reports[1])
    scheduler.reported(KVConnectorOutput(kv_connector_worker_meta=joined))
    assert scheduler.matched(asked, 0) == (32, True)
    assert asked_of_store == [0]


# Every order of events


class AtTheFirstGrant(ConsumerScheduler):
    """As one that does not wait for the other ranks."""

    def claimed(self, outcomes: Iterable[ClaimOutcome]) -> None:
        for told in outcomes:
            every = [told] if told.problem else [replace(told, rank=rank) for rank in range(RANKS)]
            super().claimed(every)


class DeafToLosses(ConsumerScheduler):
    """As one that believes a grant for ever."""

    def claimed(self, outcomes: Iterable[ClaimOutcome]) -> None:
        super().claimed([told for told in outcomes if told.problem is None])


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("told"), st.integers(0, RANKS - 1), st.booleans()),
        st.tuples(st.just("asked"), st.sampled_from([0, 16, 39]), st.booleans()),
    ),
    max_size=12,
)


def _run(events: Any, recompute: bool, kind: type[ConsumerScheduler] = ConsumerScheduler) -> None:
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
        count, is_async = engine.side.matched(asked, number)
        rest = len(PROMPT) - 1 - number
        if rest == 0 or failed:
            assert (count, is_async) == (0, False)
        elif len(granted) == RANKS:
            assert (count, is_async) == (rest, True)
        else:
            assert (count, is_async) == (None, False)
        if count is not None and flag:
            engine.side.allocated(asked, BLOCKS, count)
            break
    engine.side.finished(asked)
    commands = engine.side.take_commands()
    assert CancelPull("d") in commands, "the lender is told in the end"
    assert kinds(commands).count(ReadBlocks) == (len(engine.side) > 0)
    assert FailPull not in kinds(commands)
    engine.side.reported("d")
    assert len(engine.side) == 0


@settings(max_examples=300, deadline=None)
@given(events=EVENTS, recompute=st.booleans())
def test_promised_if_and_only_if_every_rank_holds_its_claim(events: Any, recompute: bool) -> None:
    _run(events, recompute)


@pytest.mark.parametrize("kind", [AtTheFirstGrant, DeafToLosses])
def test_that_law_notices_a_promise_too_early(kind: type[ConsumerScheduler]) -> None:
    @settings(max_examples=300, deadline=None, database=None)
    @given(events=EVENTS)
    def run(events: Any) -> None:
        _run(events, False, kind)

    with pytest.raises(AssertionError):
        run()
