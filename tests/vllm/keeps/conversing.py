"""Conversations and floods of one-off prompts at one engine, of vLLM's own scheduler."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pdconn.lifecycle.promises import KeepShares
from pdconn.vllm.patches.pool.admitted_blocks import blocks_for, num_free_blocks
from tests.fakes.simulated.sim_cache import CacheShape, GroupShape
from tests.vllm.patches.hybrid_engines import started
from tests.vllm.patches.vllm_scheduler import Engine, Request
from transport.testing.inprocess.faults import ManualClock

ANSWER = 8
"""Tokens of every answer."""


@dataclass
class Chat:
    """One session: its name, its tokens so far, and what its last answer told."""

    name: str
    tokens: list[int]
    tenant: str = "a"
    told: dict[str, Any] = field(default_factory=dict)

    def keep(self, seconds: float) -> dict[str, Any]:
        """What a router asks of the engine."""
        asked = {"session": self.name, "seconds": seconds, "tenant": self.tenant}
        return {"pdconn": {"keep": asked}}


def counted(keeping: Any) -> Counter[str]:
    """What a :class:`~pdconn.vllm.keeps.keeping.Keeping` counts from now on, also what it tells."""
    counts: Counter[str] = Counter()
    taking = keeping.take_counts

    def taken() -> dict[str, int]:
        found: dict[str, int] = taking()
        counts.update(found)
        return found

    keeping.take_counts = taken
    return counts


class Conversing:
    """An engine, and clients that talk to it.

    Args:
        groups: its KV cache groups.
        num_blocks: of its pool.
        shares: the setting ``keep``.
        retention: vLLM's ``prefix_cache_retention_interval``.
        how: of :func:`started`.
    """

    def __init__(
        self,
        groups: tuple[GroupShape, ...],
        num_blocks: int,
        shares: KeepShares | None = None,
        retention: int | None = 0,
        **how: Any,
    ) -> None:
        shape = CacheShape(groups, num_blocks, retention=retention)
        self.engine: Engine = started(shape, longest=2048, **how)
        self.scheduler = self.engine.scheduler
        self.keeping: Any = self.engine.connector._scheduler.parts.keeping
        self.clock = ManualClock(1000.0)
        self.keeping._clock = self.clock
        self.keeping._shares = KeepShares() if shares is None else shares
        self.keeping.bind_gpu_block_pool(self.manager.block_pool)
        self.counts = counted(self.keeping)
        self.answers: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._tokens = itertools.count(1_000_000, 10_000)

    @property
    def manager(self) -> Any:
        """vLLM's."""
        return self.scheduler.kv_cache_manager

    def chat(self, name: str, num_tokens: int, tenant: str = "a") -> Chat:
        """A session whose prompt is like no other."""
        first = next(self._tokens)
        return Chat(name, list(range(first, first + num_tokens)), tenant)

    def arrive(self, tokens: list[int], params: Any = None, answer: int = ANSWER) -> str:
        """A request comes."""
        name = f"q{next(self._numbers)}"
        extra = {"kv_transfer_params": params} if params else None
        sampling = self.engine.sampling(extra_args=extra)
        sampling.max_tokens = answer
        request = Request(name, list(tokens), sampling, None, block_hasher=self.engine._hasher)
        self.scheduler.add_request(request)
        return name

    def step(self) -> None:
        """One step, and what clients get of it."""
        self.engine.schedule()
        for answer in self.engine.process():
            if answer.finished:
                self.answers[answer.request_id] = answer.kv_transfer_params

    def run(self, most_steps: int = 2000) -> int:
        """Until nothing is left to compute; returns the steps."""
        for steps in range(most_steps):
            if not self.scheduler.has_unfinished_requests():
                self.step()  # vLLM tells connectors of what has ended in one step more
                return steps
            self.step()
        raise AssertionError("requests starve")

    def hit(self, tokens: list[int]) -> int:
        """Tokens of a prompt that would hit now."""
        request = Request(
            "look", list(tokens), self.engine.sampling(), None, block_hasher=self.engine._hasher
        )
        return int(self.manager.get_computed_blocks(request)[1])

    def turn(self, chat: Chat, seconds: float | None, further: int = 0) -> int:
        """A turn of a session, and ``further`` tokens of its next prompt; returns its hit."""
        chat.tokens += [next(self._numbers) + 500_000 for _ in range(further)]
        hit = self.hit(chat.tokens)
        name = self.arrive(chat.tokens, None if seconds is None else chat.keep(seconds))
        self.run()
        chat.tokens += [7] * ANSWER
        params = self.answers.pop(name) or {}
        chat.told = params.get("pdconn", {}).get("kept", {})
        return hit

    def flood(self, times: float = 2.0, num_tokens: int = 200) -> None:
        """One-off prompts, one after another, until they have had so many times the cache."""
        pool, taken = self.manager.block_pool, 0
        getting = pool.get_new_blocks

        def counted(num_blocks: int, *rest: Any, **more: Any) -> Any:
            nonlocal taken
            taken += num_blocks
            return getting(num_blocks, *rest, **more)

        pool.get_new_blocks = counted
        while taken < times * pool.num_gpu_blocks:
            first = next(self._tokens)
            self.arrive(list(range(first, first + num_tokens)))
            self.run()
        pool.get_new_blocks = getting

    def lacks(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens is not admitted now."""
        needed = blocks_for(self.manager, num_tokens)
        return needed > num_free_blocks(self.manager)

    def used_blocks(self) -> int:
        """Blocks that are in use, by requests or by promises."""
        pool = self.manager.block_pool
        return int(pool.num_gpu_blocks - pool.get_num_free_blocks() - 1)

    def close(self) -> None:
        """End what it has of threads."""
        self.engine.close()
