"""Prefill admits what vLLM alone admits: what it keeps for decode's last token costs no room.

vLLM's own manager, with a pool that is just large enough for the longest prompt.
"""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from pdconn.vllm.patches.pool.kept_windows import keep_more_tokens, keep_window_of_last_token
    from tests.fakes.simulated.sim_cache import CacheShape, GroupShape, SimCache

LONGEST, STEP, BLOCK = 192, 32, 8
WINDOWS = {
    "sliding": (GroupShape(BLOCK), GroupShape(BLOCK, 24), GroupShape(BLOCK, 40)),
    "chunked": (GroupShape(BLOCK), GroupShape(BLOCK, 32, is_chunk=True)),
    "windows alone": (GroupShape(BLOCK, 24),),
}


def cache(groups: tuple[GroupShape, ...], num_blocks: int) -> SimCache:
    return SimCache(CacheShape(groups, num_blocks, chunk_tokens=STEP))


def is_served(cache: SimCache, num_tokens: int, num_answers: int = 8) -> bool:
    """Whether a prompt is admitted, computed, and answered, without another one to preempt."""
    request = cache.request(range(num_tokens), max_tokens=num_answers)
    if cache.admit(request) is None:
        return False
    for _ in range(num_answers):
        while not cache.is_computed(request):
            if not cache.step(request):
                return False
        request.append_output_token_ids(7)
    cache.finish(request)
    return True


def least_blocks(groups: tuple[GroupShape, ...]) -> int:
    """With fewer vLLM does not serve the longest prompt."""
    return next(n for n in range(4, 400) if is_served(cache(groups, n), LONGEST))


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("groups", WINDOWS.values(), ids=WINDOWS)
def test_the_longest_prompt_is_served(groups: tuple[GroupShape, ...], ahead: int) -> None:
    num_blocks = least_blocks(groups)
    assert not is_served(cache(groups, num_blocks - 1), LONGEST)
    kept = cache(groups, num_blocks)
    assert keep_window_of_last_token(kept.manager, ahead) == len(groups) - (len(groups) > 1)
    assert all(is_served(kept, LONGEST - shorter) for shorter in range(BLOCK + 1))


def test_to_keep_more_all_the_time_takes_room() -> None:
    """The control: what keeps answers' windows is asked for room first, for this reason."""
    groups = WINDOWS["sliding"]
    kept = cache(groups, least_blocks(groups))
    keep_more_tokens(kept.manager.coordinator.single_type_managers[1:], 1)
    assert not is_served(kept, LONGEST)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("groups", WINDOWS.values(), ids=WINDOWS)
def test_the_window_of_the_last_tokens_is_there_at_the_end(
    groups: tuple[GroupShape, ...], ahead: int
) -> None:
    missing = 0
    for num_tokens in range(40, 40 + 2 * STEP):
        found = []
        for keeps in (True, False):
            made = cache(groups, 100)
            if keeps:
                keep_window_of_last_token(made.manager, ahead)
            request = made.request(range(num_tokens))
            assert made.admit(request) == 0
            while not made.is_computed(request):
                assert made.step(request)
            made.manager.remove_skipped_blocks(request.request_id, num_tokens, num_tokens)
            found.append(_has_window(made, request.request_id, num_tokens - ahead))
        assert found[0], f"a prompt of {num_tokens} tokens"
        missing += not found[1]
    assert missing, "control: vLLM alone frees some of it"


def _has_window(made: SimCache, request_id: str, token: int) -> bool:
    """Whether every block is there that ``token`` attends to."""
    blocks = made.manager.get_blocks(request_id).blocks
    for group, ids in zip(made.shape.groups, blocks, strict=True):
        first = 0
        if group.window is not None:
            first = token - token % group.window if group.is_chunk else token - group.window + 1
        if any(block.is_null for block in ids[max(0, first) // BLOCK : token // BLOCK + 1]):
            return False
    return True
