"""Pods, stores and evictions drawn at random, and a plain account of what is held.

The account knows nothing of slots, planes or bits: it is a counter of
(pod, group, medium, hash), and ``longest`` asks every length in turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from pdconn.router.prefix.block_index import Index
from pdconn.router.prefix.groups import GroupSpec
from pdconn.router.prefix.score import Prompt

MEDIA = ("gpu", "cpu", "disk", "storage")
WEIGHTS: Mapping[str, float] = {"gpu": 1.0, "cpu": 0.75, "storage": 0.5}

FULL = ("full_attention", "mla_attention", "sink_full_attention")
SLIDING = ("sliding_window", "sliding_window_mla")
OTHER = ("chunked_local_attention", "mamba", "cross_attention", "unknown")

Key = tuple[int | None, str, int]
"""Group, medium, hash."""
NEAR = ("gpu", "cpu", "disk")
"""Media of which a hit may end behind any block; a store gives whole rows."""


@dataclass
class Held:
    """One pod, as the plain account has it."""

    described: dict[int, GroupSpec]
    seen: set[int] = field(default_factory=set)
    blocks: Counter[Key] = field(default_factory=Counter)
    row_tokens: int | None = None

    def has(self, group: int | None, block: int, media: Sequence[str] = MEDIA) -> bool:
        return any((group, medium, block) in self.blocks for medium in media)


@dataclass
class World:
    """An index, the account beside it, and a prompt."""

    index: Index
    account: dict[str, Held]
    prompt: Prompt

    def longest(self, name: str, last: int, media: Sequence[str] = MEDIA) -> int:
        """The largest number of hash blocks that every group can serve, at most ``last``."""
        ends = range(last, -1, -1)
        return next(blocks for blocks in ends if self.serves(name, blocks, last, media))

    def is_fine(self, name: str) -> bool:
        """Whether a hit may end inside a block: beside states of longer blocks than hashed."""
        specs = [spec for _, spec in self.counted(self.account[name])]
        longer = [spec for spec in specs if spec.block_tokens > self.prompt.hash_block_tokens]
        return any(spec.kind == "mamba" for spec in longer) and all(
            spec.kind == "mamba" or spec.kind in FULL for spec in longer
        )

    def serves(self, name: str, blocks: int, last: int, media: Sequence[str] = MEDIA) -> bool:
        """Whether generation could go on behind so many hash blocks, of a prompt of ``last``."""
        held, tokens = self.account[name], blocks * self.prompt.hash_block_tokens
        counted = self.counted(held)
        if blocks == 0:
            return True
        if not counted:
            return False
        is_end_of_row = tokens % (held.row_tokens or 1) == 0
        media = media if is_end_of_row else NEAR
        if self.is_fine(name):
            return all(self._can_finely(held, one, blocks, last, media) for one in counted)
        return all(self._can(held, group, spec, tokens, media) for group, spec in counted)

    def _can_finely(
        self,
        held: Held,
        one: tuple[int, GroupSpec],
        blocks: int,
        last: int,
        media: Sequence[str],
    ) -> bool:
        """The same where parts of blocks count: under the hash of the last one that is filled."""
        group, spec = one
        if spec.kind not in (*FULL, "mamba"):
            return self._can(held, group, spec, blocks * self.prompt.hash_block_tokens, media)
        if spec.kind == "mamba":
            return self._at(held, group, spec, blocks - 1, media)
        size = spec.block_tokens // self.prompt.hash_block_tokens
        visible = min(last + spec.eagle, len(self.prompt.hashes))
        needed = blocks + spec.eagle
        if needed > visible:
            return False
        return all(
            any(
                self._at(held, group, spec, at, media)
                for at in range(block, min((block // size + 1) * size, visible))
            )
            for block in range(needed)
        )

    def _at(
        self, held: Held, group: int, spec: GroupSpec, block: int, media: Sequence[str] = MEDIA
    ) -> bool:
        """Whether what ends with a hash block is held."""
        name = self.prompt.hashes[block]
        return held.has(group, name, media) or (spec.kind in FULL and held.has(None, name, media))

    def counted(self, held: Held) -> list[tuple[int, GroupSpec]]:
        groups = [
            (group, spec)
            for group, spec in held.described.items()
            if spec.kind in FULL
            or spec.kind == "mamba"
            or (spec.kind in SLIDING and spec.window is not None)
            or (
                spec.kind == "chunked_local_attention"
                and spec.window is not None
                and spec.window % spec.block_tokens == 0
            )
        ]
        any_full = any(spec.kind in FULL for _, spec in groups)
        if 0 not in held.described and (0 in held.seen or not any_full):
            groups.append((0, GroupSpec(FULL[0], None, self.prompt.hash_block_tokens)))
        return groups

    def _can(
        self, held: Held, group: int, spec: GroupSpec, tokens: int, media: Sequence[str]
    ) -> bool:
        size = spec.block_tokens
        if tokens % size:
            return False
        peek = 1 if spec.eagle and spec.kind in FULL + SLIDING else 0
        end = tokens // size + peek
        if spec.kind in FULL:
            needed = range(end)
        elif spec.kind == "mamba":
            needed = range(end - 1, end)
        elif spec.kind in SLIDING:
            assert spec.window is not None
            needed = range(max(0, end - math.ceil((spec.window - 1) / size) - peek), end)
        else:
            assert spec.window is not None
            needed = range(tokens // spec.window * spec.window // size, end)
        return all(self._block(held, group, spec, block, media) for block in needed)

    def _block(
        self,
        held: Held,
        group: int,
        spec: GroupSpec,
        block: int,
        media: Sequence[str] = MEDIA,
    ) -> bool:
        every = spec.block_tokens // self.prompt.hash_block_tokens
        last = (block + 1) * every - 1
        if last >= len(self.prompt.hashes):
            return False
        name = self.prompt.hashes[last]
        return held.has(group, name, media) or (spec.kind in FULL and held.has(None, name, media))

    def score(self, name: str, blocks: int) -> float:
        """Each block of a hit weighed by the best medium that holds it."""
        held = self.account[name]
        full = [(group, spec) for group, spec in self.counted(held) if spec.kind in FULL]
        is_fine, kept = self.is_fine(name), {(group, medium) for group, medium, _ in held.blocks}
        return sum(self._weight(held, kept, full, block, is_fine) for block in range(blocks))

    def _weight(
        self,
        held: Held,
        kept: set[tuple[int | None, str]],
        full: list[tuple[int, GroupSpec]],
        block: int,
        is_fine: bool,
    ) -> float:
        found: list[float] = []
        sizes = dict(full) if full else dict(self.counted(held))
        groups: set[int | None] = {group for group, _ in full} or set(range(8))
        for group, medium in kept:
            if group not in groups and group is not None:
                continue
            specs = sizes.values() if group is None and full else [sizes.get(group)]  # type: ignore[arg-type]
            for spec in specs:
                every = 1
                if spec is not None:
                    every = spec.block_tokens // self.prompt.hash_block_tokens
                last = (block // every + 1) * every - 1
                ends = range(block if is_fine else last, last + 1)
                names = [self.prompt.hashes[end] for end in ends if end < len(self.prompt.hashes)]
                if any((group, medium, name) in held.blocks for name in names):
                    found.append(WEIGHTS.get(medium, 1.0))
        return max(found, default=1.0)

    def loaded(self, name: str) -> int:
        """Tokens that an engine reports, without those that it would report without a store."""
        return self.believed(name) - self.believed(name, NEAR)

    def believed(self, name: str, media: Sequence[str] = MEDIA) -> int:
        """Tokens that an engine reports: at most all but one, on its alignment."""
        held, unit = self.account[name], self.prompt.hash_block_tokens
        last = max(0, self.prompt.num_tokens - 1) // unit
        counted = self.counted(held)
        if len(held.described.keys() | held.seen) <= 1 and counted:
            (_, spec) = counted[0]
            if spec.eagle and spec.kind in FULL + SLIDING:
                # A lone group looks for the block behind below the cap too.
                last = last // (spec.block_tokens // unit) * (spec.block_tokens // unit)
                last -= spec.block_tokens // unit
        return self.longest(name, max(0, min(last, len(self.prompt.hashes))), media) * unit

    def kept(self, name: str) -> int:
        """Tokens that a pull leaves out: of full attention, beside states or windows alone."""
        held, unit = self.account[name], self.prompt.hash_block_tokens
        counted = self.counted(held)
        full = [(group, spec) for group, spec in counted if spec.kind in FULL]
        others = [spec for _, spec in counted if spec.kind not in FULL]
        are_states = [spec.kind == "mamba" for spec in others]
        if not full or not others or any(are_states) != all(are_states):
            return 0
        if not any(are_states) and any(spec.eagle for _, spec in counted):
            return 0
        last = min(max(0, self.prompt.num_tokens - 1) // unit, len(self.prompt.hashes))
        sizes = [spec.block_tokens for _, spec in counted]
        for blocks in range(last, 0, -1):
            if self.is_fine(name):
                if all(self._can_finely(held, one, blocks, last, NEAR) for one in full):
                    return blocks * unit
            elif not any(blocks * unit % size for size in sizes):
                can = (self._can(held, *one, blocks * unit, NEAR) for one in full)
                if all(can):
                    return blocks * unit
        return 0


def draw(seed: int) -> World:
    """A world: pods of some models, their stores and evictions in any order, a prompt."""
    rng = Random(seed)
    unit = rng.choice((4, 16))
    num_blocks = rng.choice((0, 1, 2, 5, 13, 40))
    hashes = [rng.randrange(2**64) for _ in range(num_blocks)]
    num_tokens = num_blocks * unit + rng.choice((0, 0, 1, unit - 1))
    world = World(Index(), {}, Prompt(hashes, num_tokens, unit))
    models = [_groups(rng, unit) for _ in range(rng.choice((1, 1, 2)))]
    for number in range(rng.choice((1, 2, 3, 3, 70))):
        _add_pod(rng, world, f"pod{number}", rng.choice(models))
    for _ in range(rng.choice((0, 1, 3))):
        _step(rng, world, rng.choice(list(world.account)))
    return world


def _groups(rng: Random, unit: int) -> dict[int, GroupSpec]:
    kinds = rng.choice(
        (
            FULL[:1] + SLIDING[:1],
            FULL[:1] + SLIDING[:1] * 3,
            FULL + SLIDING,
            SLIDING,
            SLIDING[:1],
            FULL[:1],
            FULL + SLIDING + OTHER,
            FULL[:1] + OTHER[1:2],
        )
    )
    mixed = rng.random() < (0.8 if "mamba" in kinds else 0.4)
    groups = {}
    for group in range(rng.randint(1, 5)):
        kind = rng.choice(kinds)
        size = unit * (rng.choice((1, 2, 3, 4)) if mixed else 1)
        window = None
        if kind in SLIDING:
            window = rng.choice((None, 1, 2, unit, unit + 1, 2 * unit, 5 * unit, 7 * unit + 1, 999))
        elif kind == OTHER[0]:
            window = rng.choice((None, size, 2 * size, 3 * size, size + 1))
        groups[group] = GroupSpec(kind, window, size, eagle=rng.random() < 0.1)
    return groups


def _add_pod(rng: Random, world: World, name: str, groups: Mapping[int, GroupSpec]) -> None:
    described = {group: spec for group, spec in groups.items() if rng.random() < 0.9}
    world.index.add_pod(name)
    world.account[name] = Held(dict(described), set(described))
    for group, spec in described.items():
        world.index.learn_group(name, group, spec)
    if rng.random() < 0.5:
        row_tokens = world.prompt.hash_block_tokens * rng.choice((1, 2, 3, 4, 8))
        world.index.learn_row(name, row_tokens)
        world.account[name].row_tokens = row_tokens
    keep = rng.choice((0.5, 0.9, 0.97, 1.0))
    masked = rng.random() < 0.5
    evicted = rng.random() < 0.2
    for group, spec in [*groups.items(), (None, GroupSpec(FULL[0], None, 4))]:
        if group is None and rng.random() < 0.8:
            continue
        medium = rng.choice(MEDIA) if rng.random() < 0.3 else "gpu"
        every = 1 if group is None else spec.block_tokens // world.prompt.hash_block_tokens
        blocks = [block for block in world.prompt.hashes[every - 1 :: every] if rng.random() < keep]
        if spec.kind in (*FULL, "mamba") and rng.random() < 0.5:  # parts of blocks
            blocks += [block for block in world.prompt.hashes if rng.random() < 0.2]
        if masked and group is not None and spec.kind in SLIDING:
            cut = rng.randint(0, len(blocks))
            blocks = blocks[max(0, cut - rng.randint(1, 8)) : cut]
        if evicted:  # the last ones of all groups, and the store has all
            _store(world, name, group, "storage", blocks)
            blocks = blocks[: len(blocks) // 2]
        _store(world, name, group, medium, blocks)
        if rng.random() < 0.3:
            again = [block for block in blocks if rng.random() < 0.9]
            _store(world, name, group, "storage", again)


def _step(rng: Random, world: World, name: str) -> None:
    held = world.account[name]
    kind = rng.random()
    if kind < 0.1:
        world.index.clear_pod(name)
        held.blocks.clear()
        return
    there = sorted(held.blocks, key=str)
    some = rng.sample(there, rng.randint(0, len(there)))
    for group, medium, block in some:
        if kind < 0.4:  # again, as an engine does that has two copies, or repeats itself
            _store(world, name, group, medium, [block])
        else:
            _remove(world, name, group, medium, block)
    if kind > 0.8:  # of what was never stored
        world.index.remove_blocks(name, 0, "gpu", [2**63 + 5])


def _store(world: World, name: str, group: int | None, medium: str, blocks: list[int]) -> None:
    world.index.store_blocks(name, group, medium, blocks)
    held = world.account[name]
    for key in ((group, medium, block) for block in blocks):
        # An engine has copies in its own memory, and only there.
        held.blocks[key] = held.blocks[key] + 1 if medium == "gpu" else 1
    if group is not None:
        held.seen.add(group)


def _remove(world: World, name: str, group: int | None, medium: str, block: int) -> None:
    world.index.remove_blocks(name, group, medium, [block])
    held = world.account[name]
    held.blocks[group, medium, block] -= 1
    held.blocks = +held.blocks
