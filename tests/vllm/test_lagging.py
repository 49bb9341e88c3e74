"""Hits that windows lag behind, with vLLM's own manager: every token where attention reads it.

A model of the memory stands beside the manager: each row of each block keeps what was written to
it last, named by the tokens up to there.  Prompts share prefixes, are computed or pulled, fail,
end and are evicted in any order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Any

import pytest

from pdconn.planning.plan import window_start
from registration.references import AttentionKind, KVCacheGroupReference
from tests.property.scale import at_least

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.core.kv_cache_manager")

    from pdconn.vllm import lagging
    from pdconn.vllm.lagging import complete_windows, held_tokens
    from tests.fakes.sim_engine import CacheShape, GroupShape, SimCache

NUM_ALLOCATIONS = at_least(10_000)
PARTS = 5
PER_WORLD = 12

Row = tuple[int, int, int]
"""Group, block, place in it."""


@dataclass
class Running:
    """A request with blocks, and what each of its tokens is named."""

    request: Any
    names: list[int]
    written: list[int]
    """Tokens of each group whose rows were written."""


@dataclass
class World:
    """A cache, the rows of its blocks, and what was counted."""

    cache: SimCache
    piece: int = 1 << 30
    rows: dict[Row, int] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    pulled: set[str] = field(default_factory=set)
    allocations: int = 0
    kept: int = 0
    agreed: int = 0
    lagged: int = 0

    def __post_init__(self) -> None:
        shape = self.cache.shape
        self.sizes = [group.block_tokens for group in shape.groups]
        self.pieces = [min(size, self.piece) for size in self.sizes]
        self.kinds = [_kind(group) for group in shape.groups]
        self.is_told = complete_windows(
            self.cache.manager, lambda request: request.request_id in self.pulled
        )

    def start(self, group: int, until: int) -> int:
        """The first token that position ``until`` attends to."""
        kind, shape = self.kinds[group], self.cache.shape.groups[group]
        reference = KVCacheGroupReference(kind, shape.window, shape.block_tokens, ())
        return window_start(reference, until)

    def write(self, one: Running, group: int, tokens: range, *, is_pull: bool) -> None:
        """Write rows, if there is a block for them; a pull needs one that is nobody else's."""
        blocks = self.cache.manager.get_blocks(one.request.request_id).blocks[group]
        for token in tokens:
            at, place = divmod(token, self.sizes[group])
            block = blocks[at]
            if block.is_null:
                assert not is_pull, f"group {group}: token {token} has no block to be pulled to"
                continue
            shared = is_pull and block.block_hash is not None
            assert not shared, f"group {group}: a pull writes to a block that others read"
            self.rows[group, block.block_id, place] = one.names[token]

    def check(self, one: Running, until: int) -> None:
        """Whether position ``until`` finds every token that it attends to."""
        blocks = self.cache.manager.get_blocks(one.request.request_id).blocks
        for group in range(len(self.sizes)):
            for token in range(self.start(group, until), until):
                at, place = divmod(token, self.sizes[group])
                block = blocks[group][at]
                found = self.rows.get((group, block.block_id, place))
                assert not block.is_null, f"group {group}: a hole at token {token} of {until}"
                assert found == one.names[token], f"group {group}: wrong at token {token}"

    def pull(self, tokens: Sequence[int], *, fails: bool) -> None:
        """As vLLM's scheduler does with a request whose connector brings all but a token."""
        manager = self.cache.manager
        request = self.cache.request(tokens, max_tokens=4)
        one = Running(request, _names(tokens), [0] * len(self.sizes))
        self.pulled.add(request.request_id)
        until = len(tokens) - 1
        self.agreed += manager.get_computed_blocks(request)[1]
        found, local, _, is_lagging = manager.get_computed_blocks_for_connector(request)
        external = until - local
        assert external > 0 or not is_lagging, "a hit that nothing would complete"
        self.cache._begin_step()
        if external <= 0 or not manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=local,
            new_computed_blocks=found,
            num_external_computed_tokens=external,
            delay_cache_blocks=True,
            full_sequence_must_fit=True,
        ):
            return
        self.allocations += 1
        self.lagged += is_lagging
        self.kept += local
        config = manager.kv_cache_config
        held = held_tokens(config, manager.get_blocks(request.request_id).blocks, local)
        if fails:
            manager.free(request)
            return
        for group, start in enumerate(held):
            first = max(start, self.start(group, until))
            whole = first // self.pieces[group] * self.pieces[group]
            self.write(one, group, range(whole, until), is_pull=True)
        request.num_computed_tokens = until
        manager.cache_blocks(request, until)
        self.check(one, until)
        self.running.append(one)

    def compute(self, tokens: Sequence[int]) -> None:
        """A prompt of which the engine computes what it does not hold."""
        manager = self.cache.manager
        request = self.cache.request(tokens, max_tokens=4)
        one = Running(request, _names(tokens), [0] * len(self.sizes))
        done = self.cache.admit(request)
        if done is None:
            return
        while True:
            for group in range(len(self.sizes)):
                self.write(one, group, range(done, request.num_computed_tokens), is_pull=False)
            done = request.num_computed_tokens
            if done == len(tokens):
                break
            if not self.cache.step(request):
                manager.free(request)
                return
        self.check(one, done)
        self.running.append(one)

    def end(self, which: int) -> None:
        """A request computes its last token, and a few more, and is gone."""
        one = self.running.pop(which % len(self.running))
        until = len(one.names)
        if one.request.num_computed_tokens < until and self.cache.step(one.request):
            for group in range(len(self.sizes)):
                self.write(one, group, range(until - 1, until), is_pull=False)
            self.check(one, until)
        self.cache.finish(one.request)


def _kind(group: GroupShape) -> AttentionKind:
    if group.window is None:
        return AttentionKind.FULL
    return AttentionKind.CHUNKED_LOCAL if group.is_chunk else AttentionKind.SLIDING_WINDOW


def _names(tokens: Sequence[int]) -> list[int]:
    """Each token by all tokens up to it."""
    return list(accumulate(tokens, lambda name, token: hash((name, token)), initial=0))[1:]


def shapes(rng: Random) -> CacheShape:
    """One group of full attention, and windows or chunks, in a pool that is sometimes small."""
    full, block = rng.choice(((16, 16), (32, 16), (64, 16), (32, 32)))
    lagging = []
    for _ in range(rng.choice((1, 1, 2))):
        if full == block and rng.random() < 0.4:  # vLLM has chunks in blocks of one size only
            lagging.append(GroupShape(block, block * rng.choice((1, 2, 4)), is_chunk=True))
        else:
            lagging.append(GroupShape(block, rng.randint(16, 200)))
    groups = [GroupShape(full), *lagging]
    rng.shuffle(groups)
    chunk = rng.choice((64, 128, 512))
    return CacheShape(
        tuple(groups), rng.choice((80, 200, 500)), retention=rng.choice((0, 0, None)),
        chunk_tokens=chunk,
    )  # fmt: skip


def play(seed: int) -> World:
    """A world of prompts that share prefixes."""
    rng = Random(seed)
    world = World(SimCache(shapes(rng)))
    assert world.is_told
    stems = [[rng.randrange(1000) for _ in range(rng.randint(1, 700))] for _ in range(3)]
    for _ in range(PER_WORLD):
        stem = rng.choice(stems)
        shared = stem[: rng.choice((len(stem), rng.randint(0, len(stem))))]
        tokens = shared + [rng.randrange(1000) for _ in range(rng.randint(2, 200))]
        if rng.random() < 0.3:
            world.compute(tokens)
        else:
            world.pull(tokens, fails=rng.random() < 0.1)
        while world.running and (len(world.running) > 3 or rng.random() < 0.4):
            world.end(rng.randrange(10))
    while world.running:
        world.end(0)
    world.cache.end_copies()
    pool = world.cache.manager.block_pool
    assert pool.get_num_free_blocks() == world.cache.shape.num_blocks - 1, "blocks are lost"
    return world


def worlds(seeds: range) -> Iterator[World]:
    for seed in seeds:
        try:
            yield play(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("part", range(PARTS))
def test_every_token_is_where_attention_reads_it(part: int) -> None:
    allocations = kept = agreed = lagged = 0
    seed = part
    while allocations < NUM_ALLOCATIONS / PARTS:
        (world,) = worlds(range(seed, seed + 1))
        allocations += world.allocations
        kept, agreed, lagged = kept + world.kept, agreed + world.agreed, lagged + world.lagged
        seed += PARTS
    assert lagged > allocations / 20
    assert kept > 1.2 * agreed


def _all_held(config: Any, blocks: Any, num_local: int) -> tuple[int, ...]:
    """As if windows held what full attention holds."""
    return (num_local,) * len(blocks)


def _nothing_held(config: Any, blocks: Any, num_local: int) -> tuple[int, ...]:
    """Brings what is held, too, into blocks that others read."""
    return (0,) * len(blocks)


def _holes_held(blocks: Sequence[Any]) -> int:
    """Takes every block in front of the last hit for held."""
    held = [at for at, block in enumerate(blocks) if block.is_null or block.block_hash]
    return max(held, default=-1) + 1 if held else len(blocks)


@pytest.mark.parametrize(
    ("what", "wrong"),
    [("held_tokens", _all_held), ("held_tokens", _nothing_held)],
    ids=["all held", "nothing held"],
)
def test_a_careless_pull_is_noticed(what: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), what, wrong)
    with pytest.raises(AssertionError):
        list(worlds(range(40)))


def _lookups(change: str) -> Any:
    """Look-ups that are slightly wrong."""

    def look_up(self: Any, request: Any, limit: int | None = None) -> tuple[Any, int, int, bool]:
        agreed = self._agreed(request)
        coordinator = self._manager.coordinator
        last = request.num_tokens - (1 if change == "whole prompt" else 2)
        computed, hits = coordinator.find_longest_cache_hit_per_group(request.block_hashes, last)
        full = hits[self._full]
        if full <= agreed[1]:
            return agreed
        if change == "deepest" and full < max(hits):
            return self._manager.create_kv_cache_blocks(computed), max(hits), 0, True
        if change == "of another" and full < max(hits):
            return self._manager.create_kv_cache_blocks(computed), full, 0, True
        if full < max(hits):
            computed, _ = coordinator.find_longest_cache_hit_per_group(request.block_hashes, full)
        return self._manager.create_kv_cache_blocks(computed), full, 0, True

    return look_up


@pytest.mark.parametrize("change", ["whole prompt", "deepest", "of another"])
def test_a_careless_look_up_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lagging._Lookup, "__call__", _lookups(change))
    with pytest.raises(AssertionError):
        list(worlds(range(300)))


def test_a_careful_look_up_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the controls."""
    monkeypatch.setattr(lagging._Lookup, "__call__", _lookups(""))
    assert len(list(worlds(range(40)))) == 40


@pytest.mark.parametrize(("block", "full", "window"), [(16, 63, 9), (32, 32, 5)])
def test_two_prompts_that_share_3200_of_4200_tokens(block: int, full: int, window: int) -> None:
    """The second pull brings the blocks behind the shared ones, and the last window."""
    shape = CacheShape((GroupShape(block), GroupShape(block, 128)), 1000, retention=0)
    world = World(SimCache(shape))
    rng = Random(1)
    shared = [rng.randrange(1000) for _ in range(3200)]
    for length in (805, 1000):
        world.pull(shared + [rng.randrange(1000) for _ in range(length)], fails=False)
    assert world.agreed == 0
    assert world.lagged == 1
    blocks = world.cache.manager.get_blocks(world.running[1].request.request_id).blocks
    mine = [sum(b.ref_cnt == 1 and not b.is_null for b in group) for group in blocks]
    assert mine == [full, window]
