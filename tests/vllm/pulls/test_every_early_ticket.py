"""Every early ticket is pulled, given up or failed, once, and takes no blocks that others lack.

The laws of :mod:`tests.vllm.pulls.test_every_ticket`, with tickets of requests that another engine
still computes::

    blocks      are given before all is computed only while enough are free beside them
    requests    are computed here where the stream is lost, or is of another prompt
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

pytest.importorskip("vllm")

from pdconn.puller.commands import CancelPull, ClaimOutcome
from tests.property.scale import holds, notices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.blocks.splits import UNSPLIT
    from pdconn.vllm.pulls.pulling import EARLY_SPARES, Pulling
    from pdconn.vllm.pulls.tracked import Tracked
    from tests.vllm.patches.vllm_scheduler import NUM_BLOCKS, our_scheduler
    from tests.vllm.pulls.decoding import Decoding
    from tests.vllm.pulls.test_every_ticket import EXAMPLES, FIRSTS, LENGTHS, STEPS, DecodeMachine


class EarlyMachine(DecodeMachine):
    """Tickets come before their requests are computed, beside others."""

    @initialize(policy=st.sampled_from(["fail", "recompute"]))
    def start(self, policy: str) -> None:
        self.engine = Decoding(policy)
        self.engine.side.workers_registered(UNSPLIT)
        self.read = 0
        self.parents: list[tuple[str, int, int, dict[str, Any]]] = []
        self.begun = set()
        allocated = self.engine.side.update_state_after_alloc

        def checked(request: Any, *args: Any, **more: Any) -> None:
            tracked = self.engine.side._tracked.get(request.request_id)
            is_early = tracked is not None and tracked.is_early and not tracked.pulling
            allocated(request, *args, **more)
            if is_early and tracked is not None and tracked.pulling:
                spare = self.engine.pool.get_num_free_blocks()
                assert spare >= EARLY_SPARES * NUM_BLOCKS, f"read early, {spare} blocks are free"

        self.engine.side.update_state_after_alloc = checked  # type: ignore[method-assign]

    @rule(
        first=st.sampled_from(FIRSTS),
        num_tokens=LENGTHS,
        kind=st.sampled_from(["whole", "whole", "whole", "other"]),
        is_child=st.booleans(),
        steps=st.integers(0, 2),
    )
    def arrive_early(
        self, first: int, num_tokens: int, kind: str, is_child: bool, steps: int
    ) -> None:
        early = self.engine.early_ticket(first + (500 if kind == "other" else 0), num_tokens)
        asked: dict[str, Any] = {"params": early.to_params(), "is_early": True}
        self.parents.append((f"r{len(self.parents)}", first, num_tokens, asked))
        if is_child:
            self.arrive_as_child(len(self.parents) - 1)
        else:
            self.engine.arrive(*self.parents[-1][:3], **asked)
        self.go_on(steps)

    @precondition(lambda self: self.pulls())
    @rule(which=st.integers(0, 99), steps=st.integers(0, 2))
    def complete(self, which: int, steps: int) -> None:
        """The other engine has computed a prompt; one rank hears of it, or all."""
        pulls = self.pulls()
        name = pulls[which % len(pulls)][1].request
        for puller in self.engine.pullers[which % 2 :]:
            if name in puller.pulls:
                puller.complete(name)
        self.go_on(steps)

    @precondition(lambda self: self.reading())
    @rule(which=st.integers(0, 99), steps=st.integers(0, 2))
    def lose_under_a_read(self, which: int, steps: int) -> None:
        """The other engine ends the request, or is gone."""
        reading = self.reading()
        rank, pull = reading[which % len(reading)]
        self.engine.pullers[rank].lose(pull.request)
        self.go_on(steps)

    @rule(steps=st.integers(1, 2))
    def grant_all(self, steps: int) -> None:
        self.grant(99)
        self.go_on(steps)

    def drain(self) -> None:
        for rank, pull in self.pulls():
            self.engine.pullers[rank].complete(pull.request)
        super().drain()


@pytest.mark.hypothesis
def test_every_early_ticket_is_pulled_given_up_or_failed_once() -> None:
    holds(EarlyMachine, examples=60, steps=STEPS)


# What those laws notice


class PromisesWithoutRoom(Pulling):
    """Gives blocks to what is not computed yet, though others lack them."""

    def _has_room(self, request: Any, tracked: Tracked) -> bool:
        return True


class KeepsStreams(Pulling):
    """Follows a stream that is not needed any more."""

    def _give_up(self, request_id: str, tracked: Tracked) -> None:
        if tracked.claim.stream is not None:
            tracked.ticket = tracked.claim.stream = None
        super()._give_up(request_id, tracked)


class GivesStreamsUpTwice(Pulling):
    """Gives a stream up when it is lost, and again when its request ends."""

    def request_finished(self, request: Any, blocks: Any, num_computed: int) -> None:
        is_early = "stream" in ((request.kv_transfer_params or {}).get("pdconn") or {})
        super().request_finished(request, blocks, num_computed)
        if is_early:
            self._commands.append(CancelPull(request.request_id))


class TakesOtherPrompts(Pulling):
    """Reads what a stream brings, of whatever prompt it is."""

    def _check(self, request: Any, tracked: Tracked) -> None:
        tracked.checked = tracked.claim.stream is not None or tracked.checked
        super()._check(request, tracked)


class NeverHearsOfTheEnd(Pulling):
    """Takes a stream for one that is computed for ever."""

    def note_claims(self, outcomes: Iterable[ClaimOutcome]) -> None:
        known = [one for one in outcomes if one.ticket is None or not one.ticket.blocks]
        super().note_claims(known)

    def _has_room(self, request: Any, tracked: Tracked) -> bool:
        return not tracked.is_early


class DeafToLostStreams(Pulling):
    """Waits for a stream that was refused."""

    def note_claims(self, outcomes: Iterable[ClaimOutcome]) -> None:
        super().note_claims([one for one in outcomes if one.problem is None])


class FailsForStreams(Pulling):
    """Fails a request whose stream is lost, as one with a ticket."""

    def is_load_optional(self, request_id: str) -> bool:
        return self.is_of_prefix(request_id)


class ListensAfterwards(Pulling):
    """Takes up a stream again that it has given up, since another rank was granted it."""

    def note_claims(self, outcomes: Iterable[ClaimOutcome]) -> None:
        outcomes = list(outcomes)
        super().note_claims(outcomes)
        for one in outcomes:
            tracked = self._tracked.get(one.request)
            if tracked is not None and not tracked.pulling and tracked.claims is None:
                tracked.claim.granted.add(one.rank)
                tracked.ticket = one.ticket


BROKEN = (
    PromisesWithoutRoom, KeepsStreams, GivesStreamsUpTwice, TakesOtherPrompts, NeverHearsOfTheEnd,
    DeafToLostStreams, FailsForStreams, ListensAfterwards,
)  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    # It takes half a minute to be noticed.
    [
        pytest.param(one, marks=[pytest.mark.matrix] * (one is GivesStreamsUpTwice))
        for one in BROKEN
    ],
)
def test_the_laws_notice_a_side_that_breaks_them(
    broken: type[Pulling], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(our_scheduler, "Pulling", broken)
    notices(EarlyMachine, examples=EXAMPLES, steps=STEPS)
