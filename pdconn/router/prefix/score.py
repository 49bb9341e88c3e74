"""The hit of each pod: how much of a request's prefix it could serve without computing.  Pure.

A hit may end after L tokens if every group that counts has the blocks it needs there: full
attention all its blocks from 0, a sliding window the blocks of its last ``window - 1`` tokens (or
all from 0), a chunk the blocks since it began, a state its last block.  L is a multiple of every
group's block, and the largest such L is the hit::

    blocks      0 1 2 3 4 5 6 7
    full        x x x x x x x .      main prefix: 7
    window (2)  . . x x . x x .      a hit may end at 4 (2, 3) and at 7 (5, 6)

A block counts on any medium, weighted by its best one.  Blocks in a store
(:data:`~pdconn.router.prefix.groups.OUTSIDE`) are loaded in whole rows: a hit that needs them ends
at the end of a row, a hit that does not may end anywhere::

    on the GPU  x x x . . . . .      a hit may end at 1, 2, 3
    stored      x x x x x x x x      and, with rows of 4 blocks, at 4 and 8

For each word of 64 pods and each group the blocks held are one array of bits, so the prefix
is a running AND over it, a window of n blocks about log2(n) shifted ANDs, and the largest L
of all 64 pods the places where the running OR from behind changes.  Everything is linear in
the blocks of the request.

With states whose blocks are longer than the hashed ones (``--prefix-match-unit``), vLLM allows a
hit to end after any hash block.  It keeps the state at the end of a prompt, and the attention block
there under the hash of its last hash block, though neither is full.

Groups without a description: group 0 counts as full attention, and so does a block without a group;
other groups do not count.  If group 0 is described and no group is full attention, the windows
alone decide.

Sources: llm-d-kv-cache PR 650 for the scan and the fallbacks, vLLM's
``HybridKVCacheCoordinator.find_longest_cache_hit`` for alignment, cap and EAGLE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pdconn.router.prefix.block_index import Index, Plane
from pdconn.router.prefix.ends import (
    ALL,
    chunk_ends,
    count,
    covered,
    fine_ends,
    last_ends,
    tail_ends,
)
from pdconn.router.prefix.families import Family, families
from pdconn.router.prefix.groups import OUTSIDE, REMOTE, STORED, GroupSpec, Needs
from pdconn.router.prefix.held_blocks import POD_BITS, Words

DEFAULT_WEIGHTS: Mapping[str, float] = {
    "gpu": 1.0,
    "cpu": 0.8,
    STORED: 0.5,
    "fs": 0.5,
    REMOTE: 0.3,
    "obj": 0.3,
}
"""Guessed."""
UNKNOWN_WEIGHT = 1.0
"""Weight of blocks on an unlisted medium, and of blocks that a hit does not need."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request as block hashes.

    Attributes:
        hashes: of its full blocks of ``hash_block_tokens`` tokens, in order.
        num_tokens: of the whole prompt.
        hash_block_tokens: the engines' ``hash_block_size``.
    """

    hashes: Sequence[int]
    num_tokens: int
    hash_block_tokens: int


@dataclass(frozen=True, slots=True)
class Hit:
    """How much of a prompt one pod could serve.

    Attributes:
        blocks: leading blocks of ``hash_block_tokens`` tokens.
        tokens: what the engine would report as cached: it always computes the last token of a
            prompt, so a hit ends before it.
        score: ``blocks``, each weighted by the best medium that holds it.
        kept_tokens: what a pull leaves out where states cut the hit: the pull brings states in any
            case, so that only full attention counts, in the engine's own memory.
        loaded_tokens: of ``tokens``, those that the engine would load from a store.
    """

    blocks: int
    tokens: int
    score: float
    kept_tokens: int = 0
    loaded_tokens: int = 0

    @property
    def own_tokens(self) -> int:
        """``tokens`` without those in a store."""
        return self.tokens - self.loaded_tokens

    @property
    def weighed_tokens(self) -> float:
        """``tokens``, weighted as the score."""
        return self.tokens * self.score / self.blocks if self.blocks else float(self.tokens)

    @property
    def weighed_beside_a_pull(self) -> float:
        """Tokens that a pull can leave out, weighted as the score."""
        return max(self.weighed_tokens, float(self.kept_tokens))


NO_HIT = Hit(0, 0, 0.0)


class Scorer:
    """Scores prompts against an index.

    Args:
        index: the blocks that pods hold.
        weights: by medium; other media weigh ``UNKNOWN_WEIGHT``.
    """

    def __init__(self, index: Index, weights: Mapping[str, float] = DEFAULT_WEIGHTS) -> None:
        self._index = index
        self._weights = weights
        self._families: tuple[Family, ...] = ()
        self._known: tuple[int, int] | None = None

    def score(self, prompt: Prompt) -> dict[str, Hit]:
        """The hit of every pod of the index, in insertion order."""
        hits = dict.fromkeys(self._index.pods, NO_HIT)
        if not prompt.hashes:
            return hits
        families = self.families(prompt.hash_block_tokens)
        # Where every hit needs every hash block, none ends after the first one that no pod holds.
        if all(family.needs_every_hash(prompt.hash_block_tokens) for family in families):
            chain = _Chain(prompt, self._index.leading_slots_of(prompt.hashes))
            if not len(chain.slots):
                return hits
        else:
            chain = _Chain(prompt, self._index.slots_of(prompt.hashes))
        for family in families:
            for word, mask in enumerate(family.masks):
                if mask and family.align is not None:
                    hits.update(self._hits(family, word, chain))
        return hits

    def _hits(self, family: Family, word: int, chain: _Chain) -> dict[str, Hit]:
        """The hits of the pods in one word of a family."""
        hits = dict(_Pass(self._index, self._weights, family, word, chain).hits())
        if any(medium in OUTSIDE for _, medium in self._index.planes()):
            near = replace(family, with_stored=False)
            own = dict(_Pass(self._index, self._weights, near, word, chain).hits())
            for name, hit in hits.items():
                loaded = hit.tokens - own.get(name, NO_HIT).tokens
                hits[name] = replace(hit, loaded_tokens=loaded)
        if (pulling := family.beside_a_pull) is not None:
            for name, kept in _Pass(self._index, self._weights, pulling, word, chain).hits():
                hit = hits.get(
                    name, NO_HIT
                )  # built anew, since `replace` takes three times as long
                hits[name] = Hit(hit.blocks, hit.tokens, hit.score, kept.tokens, hit.loaded_tokens)
        return hits

    def families(self, hash_block_tokens: int) -> tuple[Family, ...]:
        """The pods of the index, grouped by their group descriptions."""
        known = (self._index.version, hash_block_tokens)
        if self._known != known:
            self._families = tuple(families(self._index, hash_block_tokens))
            self._known = known
        return self._families


@dataclass(frozen=True, slots=True)
class _Chain:
    """A prompt and the slots of its hashes."""

    prompt: Prompt
    slots: NDArray[np.intp]


class _Pass:
    """The scoring of one prompt for one family in one word of pods."""

    def __init__(
        self, index: Index, weights: Mapping[str, float], family: Family, word: int, chain: _Chain
    ) -> None:
        assert family.align is not None
        self._index = index
        self._weights = weights
        self._family = family
        self._align = family.align
        self._word = word
        self._slots = chain.slots
        self._num_tokens = chain.prompt.num_tokens
        self._hash_block_tokens = chain.prompt.hash_block_tokens

    def hits(self) -> Iterator[tuple[str, Hit]]:
        """The pods with a hit, and their hits."""
        valid = self._valid_ends()
        places, ends = last_ends(valid)
        if not places:
            return
        num_blocks = [end * self._align for end in ends]
        num_tokens = self._reported_tokens(valid, places, ends)
        scores = self._scores(places, num_blocks)
        equal: dict[tuple[int, int, float], Hit] = {}  # many pods hold just what all share
        for place, key in zip(
            places, zip(num_blocks, num_tokens, scores, strict=True), strict=True
        ):
            name = self._index.name_at(self._word * POD_BITS + place)
            assert name is not None
            hit = equal.get(key)
            if hit is None:
                hit = equal[key] = Hit(*key)
            yield name, hit

    def _reported_tokens(self, valid: Words, places: list[int], ends: list[int]) -> list[int]:
        """Tokens that the engine would report as cached; it always computes the last one."""
        tokens = self._align * self._hash_block_tokens
        cap = max(0, self._num_tokens - 1) // tokens
        if self._family.alone and self._family.counted[0][1].peeks:
            cap = max(
                0, cap - 1
            )  # a single group looks up the block after the hit below the cap too
        if cap < len(valid):
            # Within a block only ends below the cap count, not blocks that cover them.
            below = self._valid_ends(cap) if self._family.is_fine else valid[:cap]
            capped = dict(zip(*last_ends(below), strict=True))
            ends = [capped.get(place, 0) for place in places]
        return [end * tokens for end in ends]

    # Ends

    def _valid_ends(self, limit: int | None = None) -> Words:
        """Bit p of row j: for pod p a hit may end after (j + 1) * align hash blocks.

        ``limit``: assume a prompt of this many hash blocks.
        """
        planes = list(self._index.planes())
        near = [plane for plane in planes if plane[1] not in OUTSIDE]
        if not self._family.with_stored:
            return self._ends_on(near, limit)
        valid = self._ends_on(planes, limit)
        rows = self._family.row_tokens
        if rows is None or len(near) == len(planes) or not len(valid):
            return valid  # and no prompt is as long as a multiple of odd blocks can be
        ends = np.arange(1, len(valid) + 1) * (self._align * self._hash_block_tokens)
        valid[ends % rows != 0] = 0
        return valid | self._ends_on(near, limit)

    def _ends_on(self, planes: Sequence[Plane], limit: int | None) -> Words:
        """The possible ends of a hit, given the blocks of these planes."""
        mask = self._family.masks[self._word] if self._family.counted else 0
        num_blocks = len(self._slots) if limit is None else limit
        valid = np.full(num_blocks // self._align, mask, np.uint64)
        for group, spec in self._family.counted:
            ends_of = self._fine_ends_of if self._family.is_fine else self._ends_of
            valid &= ends_of(planes, group, spec, len(valid))
        return valid

    def _fine_ends_of(
        self, planes: Sequence[Plane], group: int, spec: GroupSpec, num_ends: int
    ) -> Words:
        every = spec.block_tokens // self._hash_block_tokens
        held = self._held(planes, group, 1, spec.needs is Needs.WHOLE)[: num_ends + spec.peeks]
        if spec.needs is Needs.WHOLE:
            ends = fine_ends(held, every)
        elif spec.needs is Needs.CHUNK:
            ends = chunk_ends(held, spec)
        else:
            ends = tail_ends(held, spec.tail_blocks)
        ends = ends[spec.peeks :]
        return np.append(ends, np.zeros(num_ends - len(ends), np.uint64))

    def _ends_of(
        self, planes: Sequence[Plane], group: int, spec: GroupSpec, num_ends: int
    ) -> Words:
        every = spec.block_tokens // self._hash_block_tokens
        held = self._held(planes, group, every, spec.needs is Needs.WHOLE)
        if spec.needs is Needs.WHOLE:
            ends = np.bitwise_and.accumulate(held)
        elif spec.needs is Needs.CHUNK:
            ends = chunk_ends(held, spec)
        else:
            ends = tail_ends(held, spec.tail_blocks)
        step = self._align // every
        if not spec.peeks:
            return ends[step - 1 :: step][:num_ends]
        behind = ends[step::step][:num_ends]
        return np.append(behind, np.zeros(num_ends - len(behind), np.uint64))

    def _held(self, planes: Sequence[Plane], group: int, every: int, with_unnamed: bool) -> Words:
        """The group's blocks that each pod holds, in any of these planes."""
        slots = self._slots[every - 1 :: every]
        held = np.zeros(len(slots), np.uint64)
        for plane in planes:
            if plane[0] == group or (with_unnamed and plane[0] is None):
                held |= self._index.held(plane, self._word, slots)
        return held

    # Weights

    def _scores(self, places: list[int], num_blocks: list[int]) -> list[float]:
        """The scores of the pods at ``places``, whose hits are ``num_blocks`` long."""
        if self._family.whole and len(at := self._planes_at_weights()) == 1:
            return [weight * blocks for weight in at for blocks in num_blocks]
        levels = self._levels(max(num_blocks))
        top, held = next(levels)
        lower = np.bitwise_or.accumulate(~held)
        scores = [top * blocks for blocks in num_blocks]
        mixed = [
            i
            for i, (place, blocks) in enumerate(zip(places, num_blocks, strict=True))
            if int(lower[blocks - 1]) >> place & 1
        ]
        if mixed:
            inside = np.arange(max(num_blocks))[:, None] < [num_blocks[i] for i in mixed]
            columns = [places[i] for i in mixed]
            weighed = top * count(held, columns, inside)
            for weight, more in levels:
                weighed += weight * count(more & ~held, columns, inside)
                held |= more
            for i, score in zip(mixed, weighed.tolist(), strict=True):
                scores[i] = score
        return scores

    def _levels(self, num_blocks: int) -> Iterator[tuple[float, Words]]:
        """The blocks held at each weight, heaviest first; blocks that no hit needs are last."""
        at, whole = self._planes_at_weights(), self._family.whole
        if not whole:
            at.setdefault(UNKNOWN_WEIGHT, [])
        for weight in sorted(at, reverse=True):
            held = np.zeros(num_blocks, np.uint64)
            for plane in at[weight]:
                held |= self._spread(plane, num_blocks)
            yield weight, held
        if not whole:
            yield UNKNOWN_WEIGHT, np.full(num_blocks, ALL)

    def _planes_at_weights(self) -> dict[float, list[Plane]]:
        """The planes whose blocks are weighed, by weight."""
        at: dict[float, list[Plane]] = {}
        whole = [group for group, _ in self._family.whole]
        for plane in self._index.planes():
            if not whole or plane[0] is None or plane[0] in whole:
                at.setdefault(self._weights.get(plane[1], UNKNOWN_WEIGHT), []).append(plane)
        return at

    def _spread(self, plane: Plane, num_blocks: int) -> Words:
        """The plane's blocks in hash blocks: a block of n hash blocks covers n rows."""
        group = plane[0]
        specs = self._family.whole if group is None else self._family.counted
        sizes = {spec.block_tokens for other, spec in specs if group in (None, other)}
        held = np.zeros(num_blocks, np.uint64)
        for block_tokens in sizes or {self._hash_block_tokens}:
            every = block_tokens // self._hash_block_tokens
            if self._family.is_fine:
                blocks = self._index.held(plane, self._word, self._slots)
                spread = covered(blocks, every)[:num_blocks]
            else:
                blocks = self._index.held(plane, self._word, self._slots[every - 1 :: every])
                spread = np.repeat(blocks, every)[:num_blocks]
            held[: len(spread)] |= spread
        return held
