"""Families of pods with equal groups, which one pass over a prompt scores together.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdconn.router.prefix.block_index import Index, Pod, alignment
from pdconn.router.prefix.groups import GroupSpec, Needs, ends_anywhere
from pdconn.router.prefix.held_blocks import POD_BITS

_WINDOWED = {Needs.WINDOW, Needs.CHUNK}


@dataclass(frozen=True, slots=True)
class Family:
    """Pods with equal group descriptions and rows, which one pass scores together.

    Attributes:
        whole, tails: group index and spec of the groups that count: full attention, and others.
        masks: for each word, the bits of the family's pods.
        align: hash blocks that every hit is a multiple of; None if some group's blocks are no
            multiple of hash blocks, so that there is no hit.
        alone: whether the engine has one group, for which EAGLE's extra block lies within the cap.
        row_tokens: as in :class:`~pdconn.router.prefix.block_index.Pod`.
        is_fine: whether a hit may end after any hash block, inside blocks.
        with_stored: whether blocks in a store count.
    """

    whole: tuple[tuple[int, GroupSpec], ...]
    tails: tuple[tuple[int, GroupSpec], ...]
    masks: tuple[int, ...]
    align: int | None
    alone: bool
    row_tokens: int | None = None
    is_fine: bool = False
    with_stored: bool = True

    @property
    def beside_a_pull(self) -> Family | None:
        """The family for pulls, if it differs: only full attention counts.

        vLLM's ``KVCacheManager.get_computed_blocks_for_connector`` with states, and
        :mod:`pdconn.vllm.patches.pool.local_hits` with windows, unless one of these is held further
        than full attention: then the hit on which all agree counts.
        """
        needs = {spec.needs for _, spec in self.tails}
        in_windows = bool(needs) and needs <= _WINDOWED
        if not self.whole or not (in_windows or needs == {Needs.STATE}):
            return None
        if in_windows and any(spec.eagle for _, spec in self.counted):
            return None
        return replace(self, tails=(), alone=False, with_stored=False)

    def needs_every_hash(self, hash_block_tokens: int) -> bool:
        """Whether a group needs each hash block of the prefix, under its own hash."""
        sizes = {spec.block_tokens for _, spec in self.whole}
        return hash_block_tokens in sizes and not self.is_fine

    @property
    def counted(self) -> tuple[tuple[int, GroupSpec], ...]:
        """Every group that a hit depends on, full attention first."""
        return self.whole + self.tails


def groups_that_count(
    pod: Pod, hash_block_tokens: int
) -> tuple[list[tuple[int, GroupSpec]], list[tuple[int, GroupSpec]]]:
    """A pod's groups that need the whole prefix, and those that need a part of it."""
    described = sorted(pod.groups.items())
    whole = [(group, spec) for group, spec in described if spec.needs is Needs.WHOLE]
    nothing = (Needs.WHOLE, Needs.NOTHING)
    tails = [(group, spec) for group, spec in described if spec.needs not in nothing]
    if 0 not in pod.groups and (0 in pod.seen or not whole):
        whole.insert(0, (0, GroupSpec("full_attention", None, hash_block_tokens)))
    return whole, tails


def families(index: Index, hash_block_tokens: int) -> Iterator[Family]:
    """The pods of an index, grouped by their group descriptions."""
    together: dict[object, tuple[Pod, list[int]]] = {}
    for pod in index.pods.values():
        whole, tails = groups_that_count(pod, hash_block_tokens)
        key = (tuple(whole), tuple(tails), len(pod.groups), pod.row_tokens)
        _, masks = together.setdefault(key, (pod, [0] * index.num_words))
        masks[pod.place // POD_BITS] |= 1 << pod.place % POD_BITS
    for pod, masks in together.values():
        whole, tails = groups_that_count(pod, hash_block_tokens)
        specs = [spec for _, spec in whole + tails]
        fits = all(spec.block_tokens % hash_block_tokens == 0 for spec in specs)
        align = alignment(specs, hash_block_tokens) // hash_block_tokens if fits else None
        is_fine = fits and ends_anywhere(specs, hash_block_tokens)
        alone = len(pod.groups.keys() | pod.seen) <= 1
        yield Family(
            tuple(whole),
            tuple(tails),
            tuple(masks),
            1 if is_fine else align,
            alone,
            pod.row_tokens,
            is_fine,
        )
