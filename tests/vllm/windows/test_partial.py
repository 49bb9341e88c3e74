"""Blocks of which a pull wrote only the end, with vLLM's own manager: no prompt finds them."""

from __future__ import annotations

import warnings
from random import Random
from typing import Any

import pytest

from pdconn.store.settings import StoreSettings
from tests.property.scale import at_least

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.core.kv_cache_manager")

    from vllm.v1.outputs import KVConnectorOutput

    from pdconn.vllm.blocks.partial import partial_blocks
    from pdconn.vllm.metadata import PdWorkerReport
    from pdconn.vllm.pulls.pull_rules import PullRules
    from pdconn.vllm.pulls.pulling import Pulling
    from pdconn.vllm.pulls.tracked import Tracked
    from pdconn.vllm.scheduler import SchedulerParts
    from pdconn.vllm.store.storing import Storing, _KnownRequest
    from tests.fakes.simulated.hooks import half_of
    from tests.fakes.simulated.sim_cache import CacheShape, GroupShape, SimCache
    from tests.vllm.windows import memory as sim_memory
    from tests.vllm.windows.memory import SimMemory

NUM_WORLDS = at_least(150)


def play(seed: int) -> SimMemory:
    """Pulls of beginnings of one prompt, from a lender of smaller blocks."""
    rng = Random(seed)
    block = rng.choice((32, 64))
    groups = (GroupShape(block), GroupShape(block, rng.randint(16, 200)))
    cache = SimCache(CacheShape(groups, 200, retention=rng.choice((0, None))))
    memory = SimMemory(cache, their_block=rng.choice((8, 16)))
    stem = [rng.randrange(1000) for _ in range(600)]
    for _ in range(6):
        prompt = stem[: rng.randint(2, 600)]
        if rng.random() < 0.2:
            memory.compute(prompt)
        else:
            memory.pull(prompt)
        while memory.running and rng.random() < 0.6:
            memory.end(rng.randrange(10))
    memory.end_all()
    return memory


def test_a_prompt_finds_only_blocks_that_are_whole() -> None:
    played = [play(seed) for seed in range(NUM_WORLDS)]
    assert sum(memory.kept for memory in played) > 0, "hits are left"


@pytest.mark.parametrize("careless", ["cached", "one block too few", "asked too late"])
def test_a_block_written_in_part_is_found_otherwise(
    careless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    right = sim_memory.never_cache

    def wrong(manager: Any, config: Any, request_id: str, blocks: dict[int, int]) -> None:
        if careless == "one block too few":
            right(manager, config, request_id, {g: block - 1 for g, block in blocks.items()})
        elif careless == "asked too late":
            right(manager, config, f"{request_id}-gone", blocks)

    monkeypatch.setattr(sim_memory, "never_cache", wrong)
    with pytest.raises(AssertionError, match="wrong at"):
        list(map(play, range(NUM_WORLDS)))


def test_equal_blocks_lose_no_hit() -> None:
    """The same prompts of a lender of equal blocks: none is written in part."""
    assert partial_blocks([(0, 0), (1, 320)], [64, 64]) == {}
    assert partial_blocks([(0, 304), (1, 319)], [16, 64]) == {1: 4}


def test_what_ranks_tell_is_joined() -> None:
    """Pipeline stages may hold different groups."""
    one, other = PdWorkerReport(), PdWorkerReport()
    assert one.is_empty
    one.partial, other.partial = {"a": {0: 4}, "b": {1: 2}}, {"a": {1: 3}}
    assert not one.is_empty
    assert one.aggregate(other).partial == {"a": {0: 4, 1: 3}, "b": {1: 2}}


def test_what_a_rank_wrote_in_part_reaches_vllms_manager_and_the_store() -> None:
    """Before the engine hears that the request was received: it caches its blocks then.

    One that was aborted meanwhile leaves nothing behind.
    """
    shape = CacheShape((GroupShape(64), GroupShape(64, 200)), 50, retention=None)
    cache = SimCache(shape, keeps_answers=True)
    request = cache.request(list(range(500)))
    cache.manager.allocate_slots(
        request, 0, num_external_computed_tokens=499, delay_cache_blocks=True
    )
    name, pulling = request.request_id, Pulling(PullRules("here", True, True, 1000))
    pulling._pulled._manager, pulling._pulled.answers = cache.manager, cache.answers
    pulling._tracked = {
        each: Tracked(None, None, None, pulling=True, over=each == "aborted")
        for each in (name, "aborted")
    }
    storing = Storing(StoreSettings("root", 1 << 20), None, "writer", None)
    storing._requests[name] = known = _KnownRequest(request)
    report = PdWorkerReport(partial={name: {1: 4}, "aborted": {1: 2}})
    half_of(SchedulerParts(pulling=pulling, storing=storing)).update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=report, finished_recving={name})
    )
    cache.manager.cache_blocks(request, 499)
    full, window = cache.manager.get_blocks(request.request_id).blocks
    assert [block.block_hash is not None for block in full] == [True] * 7 + [False]
    assert [block.block_hash is not None for block in window] == [False] * 5 + [True] * 2 + [False]
    assert cache.answers is not None
    assert cache.answers._partial == {name: {1: 4}}
    assert (known.partial, list(storing._requests)) == ({1: 4}, [name])
    cache.finish(request)
    managers = cache.manager.coordinator.single_type_managers
    assert not any(manager.num_cached_block for manager in managers), "nothing is left behind"
