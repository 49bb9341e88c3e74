"""Every ticket is pulled, given up or failed, once, whatever order things come in.

vLLM's own scheduler asks, two ranks' workers report, and what blocks hold is known by the token
(:mod:`tests.vllm.pulls.decoding`).  So these are laws of a whole decode engine::

    commands    a claim ends by a read or is given up; none is read twice, or given up twice;
                what was awaited is read once every rank holds it; a sibling that comes too late
                claims nothing
    blocks      under a read belong to its request, or are pinned; what a step attends to is there
    requests    end once each: computed, or with an error where the policy says so
    at the end  no table has an entry, no block is in use
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sized
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

pytest.importorskip("vllm")

from pdconn.protocol.ticket import Ticket
from pdconn.puller.commands import CancelPull, ClaimOutcome, ClaimTicket, ReadBlocks
from pdconn.vllm.prompt import parent_of
from tests.fakes.scripted.puller import ScriptedPull
from tests.property.scale import LawMachine, holds, notices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.blocks.splits import UNSPLIT
    from pdconn.vllm.pulls.pulling import Pulling
    from pdconn.vllm.pulls.tracked import ClaimGrants, StartedPulls, Tracked
    from tests.vllm.patches.vllm_scheduler import BLOCK_TOKENS, NUM_BLOCKS, our_scheduler
    from tests.vllm.pulls.decoding import RANKS, Decoding

FIRSTS = (1000, 2000)
"""First tokens of prompts: those with the same begin alike."""
LONGEST = 6 * BLOCK_TOKENS + 1
LENGTHS = st.sampled_from([1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS + 2, LONGEST])
IN_FLIGHT = 2
EXAMPLES, STEPS = 200, 30
"""Orders of events until a broken engine is noticed, at most, and events of each."""


class DecodeMachine(LawMachine):
    """Requests come and go, steps are scheduled and run, ranks grant, lose, read, and hang."""

    engine: Decoding

    @initialize(policy=st.sampled_from(["fail", "recompute"]))
    def start(self, policy: str) -> None:
        self.engine = Decoding(policy)
        self.engine.side.workers_registered(UNSPLIT)
        self.read = 0
        self.parents: list[tuple[str, int, int, dict[str, Any]]] = []
        self.begun: set[tuple[Ticket, str]] = set()

    # Requests

    @rule(
        first=st.sampled_from(FIRSTS),
        num_tokens=LENGTHS,
        kind=st.sampled_from(["plain", "whole", "whole", "whole", "other", "wrong"]),
        is_child=st.booleans(),
        steps=st.integers(0, 2),
    )
    def arrive(self, first: int, num_tokens: int, kind: str, is_child: bool, steps: int) -> None:
        ticket = self.engine.ticket(first + (500 if kind == "other" else 0), num_tokens)
        params: dict[str, Any] | None = None if kind == "plain" else ticket.to_params(1, 1)
        if kind == "wrong":
            assert params is not None
            params["remote_port"] = "x"
        asked: dict[str, Any] = {"params": params, "is_wrong": kind == "wrong"}
        self.parents.append((f"r{len(self.parents)}", first, num_tokens, asked))
        if is_child:
            self.arrive_as_child(len(self.parents) - 1)
        else:
            self.engine.arrive(*self.parents[-1][:3], **asked)
        self.go_on(steps)

    @precondition(lambda self: self.parents)
    @rule(which=st.integers(-3, -1))
    def arrive_as_child(self, which: int) -> None:
        """One more answer of best-of-n, to a prompt and with a ticket that others have."""
        parent, first, num_tokens, asked = self.parents[max(which, -len(self.parents))]
        params = asked["params"] and dict(asked["params"])
        name = f"{len(self.engine.asked)}_{parent}"
        self.engine.arrive(name, first, num_tokens, **{**asked, "params": params})

    @rule(
        first=st.sampled_from(FIRSTS),
        num_tokens=LENGTHS,
        more=st.sampled_from([1, 20]),
        granted=st.integers(0, RANKS),
    )
    def arrive_with_prefix(self, first: int, num_tokens: int, more: int, granted: int) -> None:
        """Another engine has lent what its prompt begins with, and has told so many ranks."""
        ticket = self.engine.ticket(first, num_tokens, is_prefix=True).to_params(1, 1)
        asked: dict[str, Any] = {"params": {"do_remote_prefill": False, "pdconn": {"from": ticket}}}
        name = f"p{len(self.engine.asked)}"
        self.engine.arrive(name, first, num_tokens + more, is_prefix=True, **asked)
        if granted:
            self.go_on(1)
            for puller in self.engine.pullers[:granted]:
                if name in puller.pulls:
                    puller.grant(name)
            self.go_on(2)

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        requests = self.engine.scheduler.requests
        names = [pull.request for _, pull in self.reading() if pull.request in requests]
        names += list(requests)
        self.engine.abort(names[which % len(names)])

    # The engine

    @precondition(lambda self: len(self.engine.passes) < IN_FLIGHT)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.passes)
    @rule()
    def process(self) -> None:
        self.engine.process()

    @rule(steps=st.integers(1, 4))
    def go_on(self, steps: int) -> None:
        """Steps as an engine takes them."""
        for _ in range(steps):
            self.engine.schedule()
            self.engine.process()

    @precondition(lambda self: not self.engine.passes)
    @rule(first=st.sampled_from(FIRSTS))
    def abort_under_way(self, first: int) -> None:
        """Clients leave whose requests are in a step in flight, and another's load is quick."""
        self.engine.schedule()
        for one in self.engine.passes[0]:
            if one.name in self.engine.scheduler.requests:
                self.engine.abort(one.name)
        self.arrive(first, LONGEST, "whole", is_child=False, steps=0)
        self.engine.schedule()
        self.receive_all()

    @rule(what=st.sampled_from(["reset", "weights", "sleep"]))
    def disturb(self, what: str) -> None:
        engine, side = self.engine, self.engine.side
        if what == "reset":
            engine.scheduler.reset_prefix_cache()
        elif what == "weights":
            side.weights_changed()
        elif not engine.passes and not self.left_behind():  # else its workers do not sleep
            for puller in engine.pullers:
                puller.forget_all()
            self.begun.clear()  # what has failed by that is no reason to claim nothing
            side.workers_registered(UNSPLIT)

    # A rank

    @rule(rank=st.integers(0, 2 * RANKS - 1))
    def grant(self, rank: int) -> None:
        """Lenders answer a rank, or all of them."""
        ranks = range(RANKS) if rank >= RANKS else [rank]
        for puller in [self.engine.pullers[rank] for rank in ranks]:
            for request in list(puller.pulls):
                puller.grant(request)

    @precondition(lambda self: self.pulls())
    @rule(which=st.integers(0, 99))
    def lose(self, which: int) -> None:
        """A lender refuses a claim, or is gone."""
        pulls = self.pulls()
        rank, pull = pulls[which % len(pulls)]
        self.engine.pullers[rank].lose(pull.request)

    @rule()
    def receive_all(self) -> None:
        for rank, pull in self.pulls():
            if pull.need is not None:
                self.engine.pullers[rank].receive(pull.request)

    @precondition(lambda self: self.reading())
    @rule(which=st.integers(0, 99), hangs=st.booleans(), steps=st.integers(0, 2))
    def end_read(self, which: int, hangs: bool, steps: int) -> None:
        reading = self.reading()
        rank, pull = reading[which % len(reading)]
        puller = self.engine.pullers[rank]
        (puller.leave_behind if hangs else puller.receive)(pull.request)
        self.go_on(steps)

    @precondition(lambda self: any(puller.writing for puller in self.engine.pullers))
    @rule(which=st.integers(0, 99))
    def settle(self, which: int) -> None:
        writing = [puller for puller in self.engine.pullers if puller.writing]
        writing[which % len(writing)].settle(0)

    # Laws

    @invariant()
    def blocks_under_a_read_are_nobody_elses(self) -> None:
        engine = self.engine
        tables = {name: set(engine.blocks(name)) for name in engine.scheduler.requests}
        for _, pull in [*self.pulls(), *self.left_behind()]:
            for block in written(pull):
                assert engine.pool.blocks[block].ref_cnt > 0, f"{block} is free and written"
                users = {name for name, blocks in tables.items() if block in blocks}
                assert users <= {pull.request}, f"{block} is written by {pull.request}, of {users}"

    @invariant()
    def a_sibling_that_comes_too_late_claims_nothing(self) -> None:
        claims: dict[str, ClaimTicket] = {}
        asked = self.engine.pullers[0].asked
        for command in asked:
            if isinstance(command, ClaimTicket):
                claims[command.request] = command
        for at in range(self.read, len(asked)):
            command, parent = asked[at], parent_of(getattr(asked[at], "request", ""))
            if parent is None:
                continue
            if isinstance(command, ReadBlocks):
                self.begun.add((claims[command.request].ticket, parent))
            elif isinstance(command, ClaimTicket):
                assert (command.ticket, parent) not in self.begun, command.request
        self.read = len(asked)

    def check_end(self) -> None:
        """Lenders answer, reads settle, and the engine steps: everything ends, and ends well."""
        engine = self.engine
        self.drain()
        for one in engine.asked.values():
            expected = one.ends if one.is_aborted else [self.end_of(one)]
            assert one.ends == expected, f"{one} ended {one.ends}, expected {expected}"
            assert len(one.ends) <= 1
        tables: tuple[Sized, ...] = (
            engine.side, engine.side._pulling, engine.side._patience,
            engine.side._pulled.quarantine, *(puller.pulls for puller in engine.pullers),
        )  # fmt: skip
        assert [len(table) for table in tables] == [0] * len(tables), "entries of nothing"
        assert engine.pool.get_num_free_blocks() == NUM_BLOCKS - 1, "blocks are in use"

    def close(self) -> None:
        self.engine.close()

    def drain(self) -> None:
        for _ in range(60 * (1 + len(self.engine.asked))):
            for rank, pull in self.pulls():
                self.engine.pullers[rank].grant(pull.request)
                if pull.need is not None:
                    self.engine.pullers[rank].receive(pull.request)
            for puller in self.engine.pullers:
                while puller.writing:
                    puller.settle(0)
            if not self.engine.scheduler.requests and not self.engine.passes:
                break
            self.engine.schedule()
            self.engine.process()
        for _ in range(3 + len(self.engine.passes)):  # what was freed late, reported late
            self.engine.schedule()
            self.engine.process()
        left = list(self.engine.scheduler.requests)
        assert not left, f"{left} wait for ever"

    def end_of(self, one: Any) -> str:
        """How a request must have ended."""
        is_optional = one.is_prefix or one.is_early
        if self.engine.policy == "fail" and not is_optional and one.has_failed:
            return "error"
        return "length"

    def pulls(self) -> list[tuple[int, ScriptedPull]]:
        pullers = enumerate(self.engine.pullers)
        return [(rank, pull) for rank, puller in pullers for pull in puller.pulls.values()]

    def reading(self) -> list[tuple[int, ScriptedPull]]:
        return [(rank, pull) for rank, pull in self.pulls() if pull.need is not None]

    def left_behind(self) -> list[tuple[int, ScriptedPull]]:
        pullers = enumerate(self.engine.pullers)
        return [(rank, pull) for rank, puller in pullers for pull in puller.writing]


def written(pull: ScriptedPull) -> set[int]:
    """Blocks that a read writes to."""
    if pull.need is None:
        return set()
    [tokens], [blocks] = pull.need.tokens, pull.need.blocks
    return {blocks.ids[at // BLOCK_TOKENS - blocks.first] for at in tokens}


@pytest.mark.hypothesis
def test_every_ticket_is_pulled_given_up_or_failed_once() -> None:
    holds(DecodeMachine, examples=60, steps=STEPS)


# What those laws notice


class KeepsClaims(Pulling):
    """Forgets the lender of a request that needs nothing of it."""

    def _give_up(self, request_id: str, tracked: Tracked) -> None:
        tracked.ticket = None
        super()._give_up(request_id, tracked)


class GivesUpTwice(Pulling):
    """Gives a claim up when it fails, and again when the request ends."""

    def request_finished(self, request: Any, blocks: Any, num_computed: int) -> None:
        super().request_finished(request, blocks, num_computed)
        self._commands.append(CancelPull(request.request_id))


class PromisesTooEarly(Pulling):
    """Takes the first rank's grant for every rank's."""

    def note_claims(self, outcomes: Iterable[ClaimOutcome]) -> None:
        outcomes = list(outcomes)
        super().note_claims(outcomes)
        for one in outcomes:
            tracked = self._tracked.get(one.request)
            if tracked is not None and one.problem is None:
                tracked.claim.granted.update(range(RANKS))


class DeafToLosses(Pulling):
    """Believes a grant for ever."""

    def note_claims(self, outcomes: Iterable[ClaimOutcome]) -> None:
        super().note_claims([one for one in outcomes if one.problem is None])


class ForgetsAborted(Pulling):
    """Tracks no pull whose request has left."""

    def request_finished(self, request: Any, blocks: Any, num_computed: int) -> None:
        super().request_finished(request, blocks, num_computed)
        self._tracked.pop(request.request_id, None)


class ForgetsSleep(Pulling):
    """Waits for what its workers knew before they slept."""

    def workers_registered(self, splits: Any) -> None:
        self._splits = splits


class TakesOthers(Pulling):
    """Reads what a ticket brings, of whatever prompt it is."""

    def _check(self, request: Any, tracked: Tracked) -> None:
        tracked.checked = True


class PullsForNobody(Pulling):
    """Lets the pull of a request that has left go on."""

    def request_finished(self, request: Any, blocks: Any, num_computed: int) -> None:
        super().request_finished(request, blocks, num_computed)
        if self._tracked.get(request.request_id) is not None:
            self._commands.remove(CancelPull(request.request_id))


class PullsAgain(Pulling):
    """Promises a ticket again that was pulled, or has failed, when it is asked again."""

    def update_state_after_alloc(self, request: Any, *args: Any, **more: Any) -> None:
        given = request.kv_transfer_params
        again = dict(given) if given and given.get("do_remote_prefill") else None
        super().update_state_after_alloc(request, *args, **more)
        if again is not None:
            request.kv_transfer_params = again

    def end_pull(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        super().end_pull(request_id)
        if tracked is not None and not tracked.over:
            self._tracked[request_id] = tracked
            tracked.pulling = False


class HearsTooLate(Pulling):
    """Takes what is told of a claim for news, though its request has blocks, or has left."""

    def note_claims(self, outcomes: Iterable[ClaimOutcome]) -> None:
        for one in outcomes:
            tracked = self._tracked[one.request]
            if one.problem is None:
                tracked.claim.granted.add(one.rank)
            elif tracked.ticket is not None and tracked.problem is None:
                self._lost(one.request, one.problem)


BROKEN = (
    PullsForNobody, PullsAgain, HearsTooLate, KeepsClaims, GivesUpTwice, PromisesTooEarly,
    DeafToLosses, ForgetsAborted, ForgetsSleep, TakesOthers,
)  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_the_laws_notice_a_side_that_breaks_them(
    broken: type[Pulling], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(our_scheduler, "Pulling", broken)
    notices(DecodeMachine, examples=EXAMPLES, steps=STEPS)


def test_they_notice_blocks_that_are_free_under_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without quarantine."""
    monkeypatch.setattr(Pulling, "_note_blocks", lambda self, report: None)
    notices(DecodeMachine, examples=EXAMPLES, steps=STEPS, what="written|attends to")


def test_they_notice_blocks_that_a_step_still_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fence that vLLM raises for our sake."""
    started = Decoding.__init__

    def start(self: Decoding, policy: str) -> None:
        started(self, policy)
        self.scheduler.defer_block_free = False

    monkeypatch.setattr(Decoding, "__init__", start)
    notices(DecodeMachine, examples=EXAMPLES, steps=STEPS, what="attends to")


def test_they_notice_a_sibling_that_claims_what_was_consumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StartedPulls, "has_begun", lambda self, ticket, parent: False)
    notices(DecodeMachine, examples=EXAMPLES, steps=STEPS, what="_r")


def test_they_notice_an_engine_that_waits_for_more_ranks_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = property(lambda self: len(self.granted) > self.awaited)
    monkeypatch.setattr(ClaimGrants, "is_held", held)
    notices(DecodeMachine, examples=EXAMPLES, steps=STEPS, what="wait for ever")
