"""What vLLM gives to a prefill scheduler: requests; and a scheduler by itself."""

from __future__ import annotations

import time
from typing import Any

from pdconn.tools.lab.ports import free_ports
from pdconn.vllm.config import read_settings
from pdconn.vllm.lends.lending import Lending
from tests.fakes.simulated.block_pool import CountedPool
from tests.fakes.simulated.requests import vllm_request


def untried(connector: Any) -> None:
    """Leave the test of vLLM's insides out, in a rig that has a block pool and no block manager.

    An engine's connector is refused without one.
    """
    connector._scheduler._self_test._is_over = True


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


def settle(lending: Lending, pool: CountedPool, seconds: float = 20.0) -> None:
    """Until nothing is pinned, as vLLM's scheduler asks at every step."""
    give_up = time.monotonic() + seconds
    while pool.pinned() and time.monotonic() < give_up:
        lending.unpin_freed()
        time.sleep(0.01)
