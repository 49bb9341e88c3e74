"""Which block holds a state, and at which token a pass ends so that a block holds one.

With prefix caching (``align``) vLLM keeps a state where a pass ends, in the block at that index of
the request's table, which is marked with the number of tokens that the state has processed; other
blocks are holes, or are overwritten.  The store reads states there
(:mod:`pdconn.vllm.store.boundary_states`), and needs a pass to end where a prompt diverges from
saved ones.  vLLM has no hook for that; but it ends a pass where a prompt diverges from cached ones,
by a field of the request that is set here.

Written: ``Request.shared_prefix_boundary``.
Read: blocks by their index, and ``KVCacheManager.take_boundary_state_offloads``, which connectors
get in each step.
Checked at the start by :func:`check_states`.  Tested by ``tests/vllm/store/test_states.py``.
"""

from __future__ import annotations

from typing import Any

from pdconn.vllm.blocks.kinds import is_state
from pdconn.vllm.patches.live import Live, expect

SOURCES = {
    "vllm.v1.core.single_type_kv_cache_manager:MambaManager.cache_blocks": (1961, 1978),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.take_boundary_state_offloads": (871, 880),
    "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split": (443, 546),
}


def end_pass_at(request: Any, junction: int) -> None:
    """Make vLLM end a pass over the prompt at ``junction``.

    Call it in each look-up, which follows vLLM's own.
    """
    request.shared_prefix_boundary = max(request.shared_prefix_boundary, junction)


def check_states(live: Live) -> None:
    """Check that the block where a pass ends is marked with its tokens, and offered.

    Raises:
        ConfigError: naming the method that works differently.
    """
    end = live.end
    if not live.is_found:
        return
    live.manager.take_boundary_state_offloads()
    with live.computed_request(end) as request:
        offers = live.manager.take_boundary_state_offloads().get(request.request_id, [])
        for one in live.cached:
            spec = one.kv_cache_spec
            if not is_state(spec) or spec.mamba_cache_mode != "align":
                continue
            block = one.req_to_blocks[request.request_id][end // one.block_size - 1]
            expect("MambaManager.req_to_blocks, a hole where a pass ends", False, block.is_null)
            marked = block.block_hash_num_tokens
            expect("MambaManager.cache_blocks, tokens of a state", end, marked)
            offer = (one.kv_cache_group_id, block.block_id, end)
            expect(f"KVCacheManager.take_boundary_state_offloads, {offer}", True, offer in offers)
