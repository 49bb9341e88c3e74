"""Hits that windows lag behind, with vLLM's own manager: every token where attention reads it.

Prompts share prefixes, are computed or pulled, fail, end and are evicted in any order, by
:class:`~tests.vllm.windows.memory.SimMemory`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.property.scale import at_least

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.core.kv_cache_manager")

    from pdconn.vllm.patches.pool import local_hits
    from pdconn.vllm.patches.pool.local_hits import complete_windows, held_tokens
    from tests.fakes.simulated.sim_cache import CacheShape, GroupShape, SimCache
    from tests.vllm.windows.memory import SimMemory

NUM_ALLOCATIONS = at_least(4_000)
PARTS = 5
PER_MEMORY = 12


@dataclass
class LaggingMemory(SimMemory):
    """Pulls complete the hits of full attention.

    Attributes:
        agreed: tokens of hits on which all groups agreed.
    """

    agreed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        manager = self.cache.manager
        assert complete_windows(
            manager, lambda request: request.num_tokens - 1 if self.is_pulled(request) else 0
        )

    def is_pulled(self, request: Any) -> bool:
        return request.request_id in self.pulling

    def held(self, request: Any, local: int) -> tuple[int, ...]:
        manager = self.cache.manager
        self.agreed += manager.get_computed_blocks(request)[1]
        blocks = manager.get_blocks(request.request_id).blocks
        return held_tokens(manager.kv_cache_config, blocks, local)


def shapes(rng: Random) -> CacheShape:
    """Full attention, sometimes twice, and windows or chunks; the pool is sometimes small."""
    full, block = rng.choice(((16, 16), (32, 16), (64, 16), (32, 32)))
    lagging = []
    for _ in range(rng.choice((1, 1, 2))):
        if full == block and rng.random() < 0.4:  # vLLM has chunks in blocks of one size only
            lagging.append(GroupShape(block, block * rng.choice((1, 2, 4)), is_chunk=True))
        else:
            lagging.append(GroupShape(block, rng.randint(16, 200)))
    groups = [GroupShape(full), *lagging]
    if rng.random() < 0.3 and not any(group.is_chunk for group in lagging):
        groups.append(GroupShape(2 * full))
    rng.shuffle(groups)
    return CacheShape(
        tuple(groups),
        rng.choice((30, 80, 200, 500)),
        retention=rng.choice((0, 0, None)),
        chunk_tokens=rng.choice((64, 128, 512)),
    )


def play(seed: int) -> LaggingMemory:
    """Prompts that share prefixes, and prompts asked again or cut where a block ends."""
    rng = Random(seed)
    memory = LaggingMemory(SimCache(shapes(rng)), their_block=rng.choice((8, 16, 1 << 30)))
    stems = [[rng.randrange(1000) for _ in range(rng.randint(1, 700))] for _ in range(3)]
    for _ in range(PER_MEMORY):
        stem = rng.choice(stems)
        shared = stem[: rng.choice((len(stem), rng.randint(0, len(stem))))]
        if rng.random() < 0.2:
            tokens = [*shared[: len(shared) // 64 * 64], 7]
        else:
            tokens = shared + [rng.randrange(1000) for _ in range(rng.randint(2, 200))]
        if rng.random() < 0.3 or len(tokens) < 2:
            memory.compute(tokens)
        else:
            memory.pull(tokens, fails=rng.random() < 0.1)
        while memory.running and (len(memory.running) > 3 or rng.random() < 0.4):
            memory.end(rng.randrange(10))
    memory.end_all()
    return memory


def played(seeds: range) -> Iterator[LaggingMemory]:
    for seed in seeds:
        try:
            yield play(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("part", range(PARTS))
def test_every_token_is_where_attention_reads_it(part: int) -> None:
    allocations = kept = agreed = 0
    seed = part
    while allocations < NUM_ALLOCATIONS / PARTS:
        (memory,) = played(range(seed, seed + 1))
        allocations += memory.allocations
        kept, agreed = kept + memory.kept, agreed + memory.agreed
        seed += PARTS
    assert kept > 1.2 * agreed


def _all_held(config: Any, blocks: Any, num_local: int) -> tuple[int, ...]:
    """As if windows held what full attention holds."""
    return (num_local,) * len(blocks)


def _nothing_held(config: Any, blocks: Any, num_local: int) -> tuple[int, ...]:
    """Brings what is held, too, into blocks that others read."""
    return (0,) * len(blocks)


@pytest.mark.parametrize("wrong", [_all_held, _nothing_held])
def test_a_careless_pull_is_noticed(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "held_tokens", wrong)
    with pytest.raises(AssertionError, match=r"wrong at|others read"):
        list(played(range(40)))


def _lookups(change: str) -> Any:
    """Look-ups that are slightly wrong."""

    def look_up(self: Any, request: Any, limit: int | None = None) -> tuple[Any, int, int, bool]:
        del limit
        agreed: tuple[Any, int, int, bool] = self._agreed(request)
        if not self._pulled_until(request):
            return agreed
        coordinator = self._manager.coordinator
        last = request.num_tokens - (1 if change == "whole prompt" else 2)
        computed, hits = coordinator.find_longest_cache_hit_per_group(request.block_hashes, last)
        full = hits[self._full]
        if full <= agreed[1]:
            return agreed
        if full < max(hits) and change != "not cut":
            computed, _ = coordinator.find_longest_cache_hit_per_group(request.block_hashes, full)
        return self._manager.create_kv_cache_blocks(computed), full, 0, True

    return look_up


def crowded(rng: Random) -> CacheShape:
    """Full attention is often evicted where chunks are not."""
    del rng
    groups = (GroupShape(32), GroupShape(32, 128, is_chunk=True))
    return CacheShape(groups, 30, retention=0, chunk_tokens=128)


@pytest.mark.parametrize("change", ["whole prompt", "not cut"])
def test_a_careless_look_up_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_hits._Lookup, "__call__", _lookups(change))
    if change == "not cut":
        monkeypatch.setitem(globals(), "shapes", crowded)
    with pytest.raises(AssertionError):
        list(played(range(300)))


def test_a_careful_look_up_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the controls."""
    monkeypatch.setattr(local_hits._Lookup, "__call__", _lookups(""))
    assert len(list(played(range(40)))) == 40


@pytest.mark.parametrize(
    ("tables", "held"),
    [
        (("xxxx..", "xx.", "  xx.."), (64, 64, 64)),
        (("xxxx..", "x..", "  xx.."), (64, 32, 64)),
        (("xxxx..", "...", "   ..."), (64, 0, 0)),
        (("xxxx..", "xx.", "  x..."), (64, 64, 48)),
        (("xxxx..", "xx.", " x ..."), (64, 64, 0)),
    ],
)
def test_what_groups_hold_of_a_hit(tables: Sequence[str], held: tuple[int, ...]) -> None:
    """Two groups of full attention, and a window: x is of the hit, a space is a hole."""
    shape = CacheShape((GroupShape(16), GroupShape(32), GroupShape(16, 40)), 10)
    blocks = [
        [SimpleNamespace(is_null=one == " ", block_hash=one == "x" or None) for one in table]
        for table in tables
    ]
    assert held_tokens(shape.config(), blocks, 64) == held


@pytest.mark.parametrize(("block", "full", "window"), [(16, 63, 9), (32, 32, 5)])
def test_two_prompts_that_share_3200_of_4200_tokens(block: int, full: int, window: int) -> None:
    """The second pull brings the blocks behind the shared ones, and the last window."""
    shape = CacheShape((GroupShape(block), GroupShape(block, 128)), 1000, retention=0)
    memory = LaggingMemory(SimCache(shape))
    rng = Random(1)
    shared = [rng.randrange(1000) for _ in range(3200)]
    for length in (805, 1000):
        memory.pull(shared + [rng.randrange(1000) for _ in range(length)])
    assert (memory.agreed, memory.kept) == (0, 3200)
    manager = memory.cache.manager
    blocks = manager.get_blocks(memory.running[1].request.request_id).blocks
    mine = [sum(b.ref_cnt == 1 and not b.is_null for b in group) for group in blocks]
    assert mine == [full, window]


@pytest.mark.parametrize("until", [160, 161])
def test_a_hit_leaves_something_to_pull(until: int) -> None:
    """The same prompt again, one token after a block: nothing else would ask for the windows."""
    cache = SimCache(CacheShape((GroupShape(16), GroupShape(16, 40)), 100, retention=0))
    complete_windows(cache.manager, lambda request: until)
    tokens = list(range(170))
    longer = cache.request([*tokens, *range(1000, 1100)])
    assert cache.admit(longer) is not None
    cache.finish(longer)
    _, hit, _, is_diverged = cache.manager.get_computed_blocks_for_connector(cache.request(tokens))
    assert (hit, is_diverged) == ((until - 1) // 16 * 16, True)


class _AnotherVersion:
    """The manager of a vLLM that looks hits up with other arguments, or without the method."""

    def __init__(self, manager: Any, look_up: Any) -> None:
        self.kv_cache_config, self.coordinator = manager.kv_cache_config, manager.coordinator
        if look_up is not None:
            self.get_computed_blocks_for_connector = look_up


@pytest.mark.parametrize(
    "look_up", [None, lambda request, limit, more: None], ids=["without", "other arguments"]
)
def test_a_vllm_that_looks_hits_up_otherwise_is_left_alone(
    look_up: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shape = CacheShape((GroupShape(16), GroupShape(16, 40)), 100)
    manager = _AnotherVersion(SimCache(shape).manager, look_up)
    before = dict(vars(manager))
    assert not complete_windows(manager, lambda request: 0)
    assert vars(manager) == before
    (line,) = [record.getMessage() for record in caplog.records]
    assert "pulled whole" in line
    assert "get_computed_blocks_for_connector" in line


def test_what_033_passes_beside_the_request_bounds_the_hit() -> None:
    """``max_cache_hit_length``: the second argument of the method there."""
    cache = SimCache(CacheShape((GroupShape(16), GroupShape(16, 40)), 100, retention=0))
    agreed = cache.manager.get_computed_blocks_for_connector
    asked = []

    def of_033(request: Any, max_cache_hit_length: int) -> Any:
        asked.append(max_cache_hit_length)
        return agreed(request)

    cache.manager.get_computed_blocks_for_connector = of_033  # type: ignore[method-assign]
    assert complete_windows(cache.manager, lambda request: 170)
    longer = cache.request([*range(170), *range(1000, 1100)])
    assert cache.admit(longer) is not None
    cache.finish(longer)
    look_up: Any = cache.manager.get_computed_blocks_for_connector
    hits = [look_up(cache.request(list(range(171))), most)[1] for most in (170, 100, 40)]
    assert hits == [160, 96, 32]
    assert asked == [170, 100, 40]
