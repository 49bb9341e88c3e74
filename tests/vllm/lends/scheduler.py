"""What vLLM gives to a prefill scheduler: blocks, requests and time; and a scheduler by itself."""

from __future__ import annotations

import time
from typing import Any

from pdconn.tools.lab.ports import free_ports
from pdconn.vllm.config import read_settings
from pdconn.vllm.lends.lending import Lending
from tests.fakes.simulated.requests import vllm_request


class Block:
    def __init__(self, number: int) -> None:
        self.block_id, self.ref_cnt = number, 0


def untried(connector: Any) -> None:
    """Leave the test of vLLM's insides out, in a rig that has :class:`Pool` and no block manager.

    An engine's connector is refused without one.
    """
    connector._scheduler._self_test._is_over = True


class Pool:
    """vLLM's block pool, as far as pinning goes."""

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(16)]
        self.num_gpu_blocks = len(self.blocks)
        self.freed: list[int] = []

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def get_num_free_blocks(self) -> int:
        """All but the null block and those in use."""
        return self.num_gpu_blocks - 1 - len(self.pinned())

    def reset_prefix_cache(self) -> bool:
        """As vLLM's: refuses while any block is in use."""
        return not self.pinned()

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            self.freed.append(block.block_id)

    def pinned(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.ref_cnt]


class Clock:
    """Seconds, as the test says."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3)) -> Any:
    return vllm_request(
        request_id=name,
        prompt_token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=len(prompt),
        num_tokens=len(prompt),
        mm_features=[],
    )


def with_states() -> Lending:
    """Of a model with states, bound to nothing."""
    [port] = free_ports(1)
    settings = read_settings({}, "127.0.0.1", port, 0)
    return Lending(settings, "p", "boot", (1, 1), has_states=True)


def settle(lending: Lending, pool: Pool, seconds: float = 20.0) -> None:
    """Until nothing is pinned, as vLLM's scheduler asks at every step."""
    give_up = time.monotonic() + seconds
    while pool.pinned() and time.monotonic() < give_up:
        lending.unpin_freed()
        time.sleep(0.01)
