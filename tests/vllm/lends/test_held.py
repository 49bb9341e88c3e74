"""What a holder counts as held, with vLLM's own manager: what every group holds, and no more."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.core.kv_cache_manager")

    from pdconn.vllm.config import read_settings
    from pdconn.vllm.lends.lending import Lending
    from pdconn.vllm.patches.pool.local_hits import complete_windows
    from pdconn.vllm.scheduler import SchedulerParts
    from tests.fakes.simulated.hooks import half_of
    from tests.fakes.simulated.sim_cache import CacheShape, GroupShape, SimCache

SAID = list(range(100, 500))
STATES = (GroupShape(16), GroupShape(64, is_state=True))
WINDOWS = (GroupShape(16), GroupShape(16, 128))
BLOCK = 64


def holder(
    groups: tuple[GroupShape, ...], pulled_until: Callable[[Any], int]
) -> tuple[Any, SimCache]:
    """An engine that has computed a prompt, and kept windows and states at its end alone."""
    cache = SimCache(CacheShape(groups, 200, retention=0))
    told = cache.request(SAID)
    assert cache.admit(told) == 0
    cache.finish(told)
    settings = read_settings({}, "127.0.0.1", 1, 0)
    lending = Lending(settings, "h", "boot", (1, 1), block_tokens=BLOCK)
    lending.prefixes.bind_kv_cache_manager(cache.manager)
    complete_windows(cache.manager, pulled_until)
    return half_of(SchedulerParts(lending=lending)), cache


def asked(made: Any, cache: SimCache, num_tokens: int) -> tuple[Any, int]:
    """A request for a prefix, looked up as vLLM does; tokens that full attention holds of it."""
    params = {"do_remote_decode": True, "pdconn": {"lend": num_tokens}}
    request = cache.request(SAID[: num_tokens + 1], kv_transfer_params=params)
    made.on_new_request(request)
    local = cache.manager.get_computed_blocks_for_connector(request)[1]
    assert made.get_num_new_matched_tokens(request, local) == (0, False)
    return request, local


@pytest.mark.parametrize("groups", [STATES, WINDOWS], ids=["states", "windows"])
def test_a_prefix_of_which_full_attention_alone_has_all_is_not_computed(
    groups: tuple[GroupShape, ...],
) -> None:
    """vLLM tells of full attention's hit, beside windows of a request that names a ticket, too."""
    made, cache = holder(groups, lambda request: int(request.num_tokens))
    request, local = asked(made, cache, 320)
    assert local >= 304
    found = cache.manager.get_computed_blocks(request)[1]
    assert request.num_prompt_tokens - found <= BLOCK
    assert made.parts.lending.prefixes.refusal_of(request.request_id, is_within=True) == {
        "pdconn": {"lend": 320, "held": 0}
    }


@pytest.mark.parametrize("groups", [STATES, WINDOWS], ids=["states", "windows"])
def test_a_prefix_that_every_group_has_is_lent(groups: tuple[GroupShape, ...]) -> None:
    made, cache = holder(groups, lambda request: 0)
    request, local = asked(made, cache, 384)
    assert (local, request.num_prompt_tokens) == (384, 385)
    assert made.parts.lending.prefixes.refusal_of(request.request_id, is_within=True) is None
