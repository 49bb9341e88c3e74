"""Sessions, floods, aborts and resets in any order, with vLLM's own scheduler and block manager.

Whatever comes: requests are answered, what is kept is within the share and in vLLM's pool, every
broken promise is told once, and nothing is left when every time is up.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

pytest.importorskip("vllm.v1.core.sched.scheduler")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.lifecycle.promises import KeepShares, PromiseBroken, PromiseEffect, Unpin
    from pdconn.vllm.keeps.keeping import Keeping
    from pdconn.vllm.keeps.needs import BlockNeeds
    from tests.property.scale import LawMachine, holds, notices
    from tests.vllm.keeps.conversing import Chat, Conversing
    from tests.vllm.patches.hybrid_engines import KINDS

NUM_BLOCKS = 130
"""A single request always fits, in each kind."""
SHARES = KeepShares(share=0.6, tenant_share=0.4, seconds=100.0)
SESSIONS = [("a", "1"), ("a", "2"), ("b", "1"), ("c", "1")]


class SessionMachine(LawMachine):
    """One engine, and clients that talk to it."""

    kind = "window"

    def __init__(self) -> None:
        super().__init__()
        self.one = Conversing(KINDS[self.kind], NUM_BLOCKS, shares=SHARES)
        self.chats = {key: self.one.chat(key[1], 250, key[0]) for key in SESSIONS}
        self.turns: dict[str, tuple[Chat, list[int]]] = {}
        self.told = 0

    def busy(self) -> set[str]:
        return {chat.name + chat.tenant for chat, _ in self.turns.values()}

    @rule(
        key=st.sampled_from(SESSIONS),
        further=st.integers(1, 120),
        seconds=st.sampled_from([5.0, 50.0, 500.0]),
        names_only=st.booleans(),
    )
    def turn(self, key: tuple[str, str], further: int, seconds: float, names_only: bool) -> None:
        """A turn begins, if the last one of its session is over."""
        chat = self.chats[key]
        if chat.name + chat.tenant in self.busy():
            return
        if len(chat.tokens) > 400:
            chat = self.chats[key] = self.one.chat(key[1], 250, key[0])
        chat.tokens += range(further)
        name = self.one.arrive(chat.tokens, None if names_only else chat.keep(seconds))
        self.turns[name] = (chat, list(chat.tokens))

    @rule(key=st.sampled_from(SESSIONS))
    def whole_turn(self, key: tuple[str, str]) -> None:
        """A turn from its beginning to its end, with all that is there."""
        self.turn(key, 60, 500.0, names_only=False)
        self.one.run(1000)
        self.hear()

    @rule(num_tokens=st.integers(20, 550), answer=st.integers(1, 60))
    def one_off(self, num_tokens: int, answer: int) -> None:
        self.one.arrive(self.one.chat("", num_tokens).tokens, answer=answer)

    @rule(steps=st.integers(1, 30))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.one.step()
        self.hear()

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.one.clock.advance(seconds)

    @rule(key=st.sampled_from(SESSIONS))
    def release(self, key: tuple[str, str]) -> None:
        self.one.arrive([1], self.chats[key].keep(0.0), answer=1)

    @rule(number=st.integers(0, 5))
    def abort(self, number: int) -> None:
        names = list(self.one.scheduler.requests)
        if number < len(names):
            self.turns.pop(names[number], None)
            self.one.engine.abort(names[number])

    @rule()
    def reset(self) -> None:
        self.one.manager.reset_prefix_cache()

    def hear(self) -> None:
        """What clients were answered."""
        for name, params in self.one.answers.items():
            kept: dict[str, Any] = ((params or {}).get("pdconn") or {}).get("kept") or {}
            self.told += "broken" in kept
            if name in self.turns:
                chat, tokens = self.turns.pop(name)
                chat.tokens = tokens + [7] * 8
                assert kept.get("tokens", 0) <= len(chat.tokens)
        self.one.answers.clear()

    @invariant()
    def what_is_kept_is_within_the_share_and_in_use(self) -> None:
        keeping, pool = self.one.keeping, self.one.manager.block_pool
        assert keeping.num_blocks <= SHARES.share * NUM_BLOCKS
        for tenant in "abc":
            kept = {b for key, p in keeping._promises if key.tenant == tenant for b in p.items}
            assert len(kept) <= SHARES.tenant_share * NUM_BLOCKS
            for block in kept:
                assert pool.blocks[block].ref_cnt > 0, "it could be reused"
                assert pool.blocks[block].block_hash is not None, "no prompt could hit it"

    def check_end(self) -> None:
        self.one.run(1000)
        self.hear()
        assert not self.turns, "not answered"
        self.one.clock.advance(1000.0)
        self.one.step()
        assert (self.one.used_blocks(), len(self.one.keeping)) == (0, 0)
        broken = sum(n for name, n in self.one.counts.items() if name.startswith("promises_broken"))
        assert self.told <= broken

    def close(self) -> None:
        self.one.close()


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["full", "window", "chunk", "state", "drafter"])
def test_sessions_are_kept_or_told_and_leave_nothing(kind: str) -> None:
    class Machine(SessionMachine):
        pass

    Machine.kind = kind
    holds(Machine, examples=30, steps=20)


def never_unpins(self: Keeping, effects: Iterable[PromiseEffect[int]]) -> None:
    PERFORM(self, [one for one in effects if not isinstance(one, Unpin)])


def forgets_what_broke(self: Keeping, effects: Iterable[PromiseEffect[int]]) -> None:
    PERFORM(self, [one for one in effects if not isinstance(one, PromiseBroken)])


PERFORM = Keeping._perform

BROKEN = {
    "blocks stay pinned": (Keeping, "_perform", never_unpins),
    "what was broken is not counted": (Keeping, "_perform", forgets_what_broke),
    "requests lack blocks": (Keeping, "make_room", lambda self, num_blocks: None),
    "requests are not forgotten": (BlockNeeds, "note_finished", lambda self, name: None),
    "times are not up": (Keeping, "build_connector_meta", lambda self, output, metadata: None),
}


@pytest.mark.parametrize("what", BROKEN)
def test_those_laws_notice(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    monkeypatch.setattr(*BROKEN[what])
    notices(SessionMachine, examples=60, steps=20)
