"""An engine whose pulls are expected later: its scheduler's process sleeps in idle steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.sidechannel.clock import steady
    from pdconn.vllm.blocks.splits import UNSPLIT
    from pdconn.vllm.idle_steps import IDLE_STEP_S, IdleSteps
    from tests.vllm.patches.vllm_scheduler import BLOCK_TOKENS
    from tests.vllm.pulls.decoding import Decoding

NUM_TOKENS = 3 * BLOCK_TOKENS + 2


@dataclass
class Waiting:
    """A decode engine, the sleeps of its scheduler, and whether its workers waited, by step."""

    engine: Decoding
    slept: list[float] = field(default_factory=list)

    def ask(self, name: str, first: int) -> None:
        early = self.engine.early_ticket(first, NUM_TOKENS)
        self.engine.arrive(name, first, NUM_TOKENS, params=early.to_params(), is_early=True)

    def expect(self, name: str, in_s: float) -> None:
        for puller in self.engine.pullers:
            puller.expect(name, in_s)
        self.step()

    def step(self) -> bool:
        """Take a step; returns whether the workers waited in it."""
        self.engine.schedule()
        metadata = self.engine.engine.in_flight[-1].kv_connector_metadata
        self.engine.process()
        assert metadata is not None
        return bool(metadata.is_idle)


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    engine = Decoding("fail")
    made = Waiting(engine)
    side = engine.side
    side.workers_registered(UNSPLIT)
    engine.half._idle_steps = IdleSteps(side.quiet_until, steady, made.slept.append)
    made.ask("d", 1000)
    made.step()
    yield made
    engine.abort("d")
    engine.schedule()
    engine.close()


def test_the_workers_wait_while_anything_may_come(waiting: Waiting) -> None:
    assert [waiting.step() for _ in range(3)] == [True] * 3
    assert waiting.slept == []


def test_the_scheduler_sleeps_while_nothing_is_expected(waiting: Waiting) -> None:
    waiting.expect("d", 60.0)
    assert [waiting.step() for _ in range(3)] == [False] * 3
    assert waiting.slept == [IDLE_STEP_S] * 3


def test_the_workers_wait_for_what_is_due(waiting: Waiting) -> None:
    waiting.expect("d", 60.0)
    waiting.step()
    waiting.expect("d", 0.0)
    waiting.slept.clear()
    assert waiting.step()
    assert waiting.slept == []


def test_the_workers_wait_once_a_rank_asks_for_blocks(waiting: Waiting) -> None:
    waiting.expect("d", 60.0)
    waiting.engine.pullers[0].grant("d")
    waiting.step()
    waiting.slept.clear()
    assert waiting.step()
    assert waiting.slept == []


def test_the_workers_wait_if_another_pull_may_end_at_any_time(waiting: Waiting) -> None:
    waiting.expect("d", 60.0)
    waiting.ask("e", 2000)
    waiting.step()
    waiting.slept.clear()
    assert waiting.step()
    assert waiting.slept == []
    waiting.engine.abort("e")


def test_what_is_expected_of_an_earlier_pull_of_the_request_is_not_heard(waiting: Waiting) -> None:
    waiting.engine.side._tracked["d"].claim.pull = "another"
    waiting.expect("d", 60.0)
    waiting.slept.clear()
    assert waiting.step()
    assert waiting.slept == []
