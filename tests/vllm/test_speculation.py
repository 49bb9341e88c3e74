"""What decode leaves to itself, so that the drafter's KV is right; and blocks of drafted states."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import vllm.config  # before its parts, which import each other
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )
    from vllm.v1.request import Request

from pdconn.vllm.blocks.recurrent_states import without_scratch
from pdconn.vllm.config import ConfigError
from pdconn.vllm.speculation import num_lookahead

UNKNOWN = -1
DRAFTED = 3


class Modules:
    """The KV of MTP modules, as the tokens that each position was computed from.

    Module ``k`` reads, at a position, the next ``k + 1`` tokens; the last steps of a prompt are
    computed with what was sampled and drafted.
    """

    def __init__(self, count: int, known: list[int]) -> None:
        self.count, self.known = count, known
        self.kv: dict[tuple[int, int], list[int]] = {}

    def compute(self, start: int, end: int) -> None:
        """The positions from ``start`` on, of a prompt of which all tokens are known."""
        tokens = [*self.known, *[UNKNOWN] * (self.count + 1)]
        for module in range(self.count):
            for position in range(start, end):
                self.kv[module, position] = tokens[position + 1 : position + module + 2]


def stale(count: int, prompt: int, lookahead: int) -> list[tuple[int, int]]:
    """What decode keeps of prefill's although it was computed from other than the prompt's."""
    prefill = Modules(count, list(range(prompt)))
    prefill.compute(0, prompt)
    decode = Modules(count, list(range(prompt)))
    until = max(0, prompt - lookahead)
    decode.kv = {key: seen for key, seen in prefill.kv.items() if key[1] < until}
    decode.compute(until, prompt)
    kept = [key for key, seen in decode.kv.items() if key[1] < until and UNKNOWN in seen]
    assert len(decode.kv) == count * prompt
    return kept


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 6, 17])
def test_pulled_kv_of_modules_is_of_the_prompt_alone(count: int, prompt: int) -> None:
    lookahead = num_lookahead(SimpleNamespace(num_prefill_lookahead_tokens=count), False)
    assert stale(count, prompt, lookahead) == []


@pytest.mark.parametrize("count", [2, 3, 5])
def test_leaving_only_the_last_token_keeps_drafts_of_prefills(count: int) -> None:
    """Negative control: one token fewer than needed is too few."""
    assert stale(count, 17, count - 1) != []


@pytest.mark.parametrize(("ahead", "count"), [(0, 1), (1, 1), (2, 2), (4, 4)])
def test_at_least_the_last_token_is_left(ahead: int, count: int) -> None:
    assert num_lookahead(SimpleNamespace(num_prefill_lookahead_tokens=ahead), False) == count


def test_states_and_several_modules_are_refused_by_name() -> None:
    config = SimpleNamespace(num_prefill_lookahead_tokens=2)
    with pytest.raises(ConfigError, match=r"speculative_config: .* num_speculative_tokens to 1"):
        num_lookahead(config, True)
    assert num_lookahead(SimpleNamespace(num_prefill_lookahead_tokens=1), True) == 1


def test_vllm_says_how_far_its_drafters_read() -> None:
    assert isinstance(vllm.config.VllmConfig.num_prefill_lookahead_tokens, property)


def caches(mode: str) -> tuple[KVCacheManager, list[KVCacheGroupSpec]]:
    """vLLM's own block manager of full attention and states, with drafts."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.uint8)
    state: Any = MambaSpec(
        block_size=16 if mode == "align" else 4096,
        shapes=((1,),),
        dtypes=(torch.uint8,),
        mamba_cache_mode=mode,
        num_speculative_blocks=DRAFTED,
    )
    groups = [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["state"], state)]
    config = KVCacheConfig(num_blocks=400, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = KVCacheManager(
        config,
        max_model_len=4096,
        scheduler_block_size=max(16, state.block_size),
        hash_block_size=16,
        max_in_flight_tokens=8192,
        enable_caching=mode == "align",
    )
    return manager, groups


def request(num_tokens: int) -> Any:
    return Request("r", list(range(num_tokens)), SamplingParams(max_tokens=1), None)


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 100])
def test_blocks_of_drafted_states_are_not_lent(mode: str, num_tokens: int) -> None:
    manager, groups = caches(mode)
    made = request(num_tokens)
    taken = manager.allocate_slots(
        made, num_tokens, num_lookahead_tokens=DRAFTED, delay_cache_blocks=True
    )
    assert taken is not None
    ids = manager.get_block_ids("r")
    assert len(ids[1]) >= 1 + DRAFTED
    # vLLM's worker finds the state in front of those of the drafts.
    at = len(ids[1]) - 1 - DRAFTED
    full, states = without_scratch(groups, ids, num_tokens)
    assert full == list(ids[0])
    assert states == list(ids[1][: at + 1])
    assert states[-1] != 0


def test_nothing_is_lent_of_a_state_that_was_not_computed() -> None:
    _, groups = caches("none")
    assert without_scratch(groups, ([1], [2, 3, 4, 5]), 0) == ([1], [])
