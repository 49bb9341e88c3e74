"""Why prefill keeps one token more, against a stand-in for vLLM's block managers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from pdconn.vllm.patches.pool.kept_windows import keep_window_of_last_token


class Manager:
    """Frees blocks outside the window, as vLLM's managers do."""

    max_admission_blocks_per_request: int | None = 9
    kv_cache_spec: object = None

    def __init__(self, block_tokens: int, num_blocks: int, window: int | None, chunk: bool) -> None:
        self.block_tokens, self.window, self.chunk = block_tokens, window, chunk
        self.blocks = list(range(1, num_blocks + 1))

    def get_num_skipped_tokens(self, computed: int) -> int:
        if self.window is None:
            return 0
        if self.chunk:
            return computed // self.window * self.window
        return max(0, computed - self.window + 1)

    def remove_skipped_blocks(
        self, request_id: str, computed: int, num_prompt_tokens: int | None = None
    ) -> None:
        for index in range(self.get_num_skipped_tokens(computed) // self.block_tokens):
            self.blocks[index] = 0


def kept(manager: Manager, computed: int, retaining: bool, num_tokens: int = 1) -> list[int]:
    """Which blocks are left after ``computed`` tokens."""
    if retaining:
        coordinator = SimpleNamespace(single_type_managers=[manager])
        keep_window_of_last_token(SimpleNamespace(coordinator=coordinator), num_tokens)
    manager.remove_skipped_blocks("r", computed, computed)
    return manager.blocks


def covered(blocks: list[int], block_tokens: int, first: int, last: int) -> bool:
    return all(blocks[token // block_tokens] for token in range(first, last + 1))


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", range(1, 40))
def test_the_last_tokens_window_is_kept(chunk: bool, block: int, num_tokens: int) -> None:
    """Decode computes the token at N-1 again, and attends from there."""
    window, last = 8, num_tokens - 1
    first = last // window * window if chunk else max(0, last - window + 1)
    blocks = kept(Manager(block, 40, window, chunk), num_tokens, retaining=True)
    assert covered(blocks, block, first, last)


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("ahead", [2, 3, 5])
def test_the_window_of_several_tokens_is_kept(chunk: bool, ahead: int) -> None:
    """Decode computes those that its drafter looks ahead to."""
    window, block, missing = 8, 2, 0
    for num_tokens in range(1, 40):
        last = max(0, num_tokens - ahead)
        first = last // window * window if chunk else max(0, last - window + 1)
        manager = Manager(block, 40, window, chunk)
        manager.kv_cache_spec = SimpleNamespace(block_size=block)
        blocks = kept(manager, num_tokens, retaining=True, num_tokens=ahead)
        assert covered(blocks, block, first, num_tokens - 1)
        assert manager.max_admission_blocks_per_request == 9
        fewer = kept(Manager(block, 40, window, chunk), num_tokens, retaining=True)
        missing += not covered(fewer, block, first, num_tokens - 1)
    assert missing, "control: that of the last token alone is too little"


@pytest.mark.parametrize(("chunk", "num_tokens"), [(False, 11), (False, 9), (True, 16)])
def test_without_it_a_block_is_missing(chunk: bool, num_tokens: int) -> None:
    """Negative control: vLLM as it is frees a block of that window."""
    window, last = 8, num_tokens - 1
    first = last // window * window if chunk else max(0, last - window + 1)
    blocks = kept(Manager(2, 40, window, chunk), num_tokens, retaining=False)
    assert not covered(blocks, 2, first, last)


def test_full_attention_is_left_alone() -> None:
    manager = Manager(2, 4, None, chunk=False)
    before = manager.remove_skipped_blocks
    coordinator = SimpleNamespace(single_type_managers=[manager])
    assert keep_window_of_last_token(SimpleNamespace(coordinator=coordinator)) == 0
    assert manager.remove_skipped_blocks == before
    assert manager.max_admission_blocks_per_request == 9


def test_a_state_is_left_alone() -> None:
    """Its manager would keep one token more as well; prefill leaves decode that token instead."""
    spec = MambaSpec(block_size=2, shapes=((4,),), dtypes=(torch.float32,))
    for kept_spec, changed in ((spec, 0), (None, 1)):
        manager = Manager(2, 4, 1, chunk=False)
        manager.kv_cache_spec = kept_spec
        coordinator = SimpleNamespace(single_type_managers=[manager])
        assert keep_window_of_last_token(SimpleNamespace(coordinator=coordinator)) == changed
