"""The laws of every ticket, of an engine whose store has parts of prompts.

A scripted store offers a part of each prompt, now or later, and each rank's part of it ends when
the law says, with as many blocks as it says.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

pytest.importorskip("vllm")

from pdconn.planning import cover
from pdconn.planning.plan import Need
from pdconn.puller.commands import EndBeside, FailedPull
from pdconn.store.engine.beside import BesideOffer, PullOutlook
from registration.references import AttentionKind, KVCacheGroupReference
from tests.fakes.scripted.puller import ScriptedPull, ScriptedPuller
from tests.property.scale import holds, notices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.pulls.pulling import Pulling
    from tests.vllm.patches.vllm_scheduler import BLOCK_TOKENS, our_scheduler
    from tests.vllm.pulls.decoding import RANKS
    from tests.vllm.pulls.test_every_ticket import EXAMPLES, STEPS, DecodeMachine

GROUPS = (KVCacheGroupReference(AttentionKind.FULL, None, BLOCK_TOKENS, ()),)


@dataclass
class ScriptedStore:
    """What :class:`~pdconn.vllm.pulls.beside.BesideStore` says.

    Attributes:
        num_blocks: of each prompt, that it has.
        asks: how often a request asks before it is known.
        writing: by request, its part and the ranks that still write.
    """

    num_blocks: int = 2
    asks: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    writing: dict[str, tuple[Need, set[int]]] = field(default_factory=dict)

    def offer_beside(self, request: Any, pull: PullOutlook) -> BesideOffer | None:
        name = request.request_id
        self.asked[name] = self.asked.get(name, 0) + 1
        if self.asked[name] <= self.asks:
            return None
        return BesideOffer(max(pull.tokens.start, self._split(pull)))

    def join_pull(self, request: Any, need: Need, pull: PullOutlook) -> Need | None:
        if self._split(pull) <= pull.tokens.start:
            return None
        part = cover.first_part(need, GROUPS, range(self._split(pull)))
        assert request.request_id not in self.writing, "its part is being loaded"
        self.writing[request.request_id] = part, set(range(RANKS))
        return part

    def _split(self, pull: PullOutlook) -> int:
        return min(self.num_blocks, pull.tokens.stop // BLOCK_TOKENS) * BLOCK_TOKENS


class BesideMachine(DecodeMachine):
    """Requests that pull, with a store that has the beginnings of their prompts."""

    @initialize(policy=st.sampled_from(["fail", "recompute"]))
    def start(self, policy: str) -> None:
        super().start(policy)
        self.store = ScriptedStore()
        self.engine.side.store = self.store

    @rule(num_blocks=st.integers(0, 3), asks=st.integers(0, 2))
    def store_changes(self, num_blocks: int, asks: int) -> None:
        """Rows come and go."""
        self.store.num_blocks, self.store.asks = num_blocks, asks

    @precondition(lambda self: self.store.writing)
    @rule(which=st.integers(0, 99), rank=st.integers(0, RANKS - 1), num_blocks=st.integers(0, 3))
    def end_part(self, which: int, rank: int, num_blocks: int) -> None:
        """A rank has loaded so many blocks of a request's part, and loads no more."""
        names = list(self.store.writing)
        name = names[which % len(names)]
        part, ranks = self.store.writing[name]
        if rank not in ranks:
            rank = min(ranks)
        ranks.remove(rank)
        if not ranks:
            del self.store.writing[name]
        filled = cover.until(part, GROUPS, part.tokens[0].start + num_blocks * BLOCK_TOKENS)
        first = self.engine.asked[name].first
        for at in filled.tokens[0]:
            block = part.blocks[0].ids[at // BLOCK_TOKENS - part.blocks[0].first]
            self.engine.memory.write(rank, (block, at % BLOCK_TOKENS), (first, at))
        self.engine.pullers[rank].post_command(EndBeside(name, filled))

    @rule(what=st.sampled_from(["reset", "weights"]))
    def disturb(self, what: str) -> None:
        """An engine with a store may not sleep."""
        super().disturb(what)

    @invariant()
    def blocks_that_the_store_writes_are_nobody_elses(self) -> None:
        engine = self.engine
        for name, (part, _) in self.store.writing.items():
            for block in blocks_of(part):
                assert engine.pool.blocks[block].ref_cnt > 0, f"{block} is free and written"
                for other in engine.scheduler.requests:
                    is_its = other == name or block not in engine.blocks(other)
                    assert is_its, f"{block} is written for {name}, of {other}"

    def drain(self) -> None:
        for name in list(self.store.writing):
            for rank in list(self.store.writing[name][1]):
                self.end_part([*self.store.writing].index(name), rank, 3)
        self.store.num_blocks = self.store.asks = 0
        super().drain()


def blocks_of(part: Need) -> set[int]:
    """Blocks that the store may write to."""
    [tokens], [blocks] = part.tokens, part.blocks
    return {blocks.ids[at // BLOCK_TOKENS - blocks.first] for at in tokens}


@pytest.mark.hypothesis
def test_every_ticket_is_pulled_given_up_or_failed_once_beside_a_store() -> None:
    holds(BesideMachine, examples=60, steps=STEPS)


# What those laws notice


class TakesTheOfferForLoaded(Pulling):
    """Has the rest pulled, and does not say that a store loads the other part."""

    def take_commands(self) -> Any:
        for command in (commands := super().take_commands()):
            if getattr(command, "beside", None) is not None:
                object.__setattr__(command, "beside", None)
        return commands


def test_the_laws_notice_a_side_that_takes_an_offer_for_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(our_scheduler, "Pulling", TakesTheOfferForLoaded)
    notices(BesideMachine, examples=EXAMPLES, steps=STEPS, what="attends to|written|begun")


def test_they_notice_a_puller_that_reports_under_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at_once(self: ScriptedPuller, pull: ScriptedPull, why: str) -> None:
        del self.pulls[pull.request]
        self._reports.append(FailedPull(pull.request, why))

    monkeypatch.setattr(ScriptedPuller, "_fail", at_once)
    notices(BesideMachine, examples=EXAMPLES, steps=STEPS, what="written")
