"""KV cache groups, which share a block table, as vLLM forms them.

Pages of equal size (``_get_kv_cache_groups_uniform_page_size``): every sort is split into groups of
as many layers as the smallest sort has, or the largest if it is not much larger, so that the
groups' rows overlay each other without loss::

    52 windows, 10 full  ->  six groups of 9 or 8 windows, one of 10 full

Pages of unequal size (``_get_packed_kv_cache_groups``): sorts with equal tokens in equal blocks
share a group, their pages side by side in its rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pdconn.tools.plan.model_shape import Sort
from registration.references import AttentionKind, KVCacheGroupReference


@dataclass(frozen=True, slots=True)
class SharedTable:
    """Layers of one sort in one group, and the bytes of each one's page on a rank.

    A state's page is as wide as those of attention, with padding after the state.
    """

    sort: Sort
    layers: tuple[int, ...]
    page_nbytes: int


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """One KV cache group of the whole model: shares of one kind, window, block size and ratio."""

    kind: AttentionKind
    window: int | None
    block_tokens: int
    shares: tuple[SharedTable, ...]
    compress_ratio: int = 1

    @property
    def header(self) -> KVCacheGroupReference:
        """The group without its layers."""
        return KVCacheGroupReference(
            self.kind, self.window, self.block_tokens, (), self.compress_ratio
        )

    @property
    def num_layers(self) -> int:
        """Pages of one block, over all pipeline stages."""
        return sum(len(share.layers) for share in self.shares)


@dataclass(frozen=True, slots=True)
class Paged:
    """A sort on an engine, with its tokens per block and the bytes of a page."""

    sort: Sort
    block_tokens: int
    page_nbytes: int

    @property
    def key(self) -> tuple[AttentionKind, int | None, int, int]:
        """The properties that are equal for all layers of a group."""
        return self.sort.kind, self.sort.window, self.block_tokens, self.sort.compress_ratio


def group_layers(paged: Sequence[Paged]) -> tuple[LayerGroup, ...]:
    """The groups of a model whose sorts have these pages, in the order of the sorts.

    >>> from pdconn.tools.plan.model_shape import LayerSort
    >>> sort = LayerSort((0, 1), AttentionKind.FULL, None, 8, 512)
    >>> [group.num_layers for group in group_layers([Paged(sort, 16, 65536)])]
    [2]
    """
    if len({one.key for one in paged}) == 1:
        return (_split(list(paged), 0, 1),)
    buckets: dict[object, list[Paged]] = defaultdict(list)
    equal_pages = len({one.page_nbytes for one in paged}) == 1
    for one in paged:
        buckets[one if equal_pages else one.key].append(one)
    made = list(buckets.values())
    counts = _equal_page_counts(made) if equal_pages else _packed_counts(made)
    return tuple(
        _split(bucket, number, count)
        for bucket, count in zip(made, counts, strict=True)
        for number in range(count)
    )


def _split(bucket: list[Paged], number: int, count: int) -> LayerGroup:
    """Group ``number`` of the ``count`` that a bucket is split into: each n-th layer."""
    shares = tuple(
        SharedTable(one.sort, one.sort.layers[number::count], one.page_nbytes) for one in bucket
    )
    kind, window, block_tokens, ratio = bucket[0].key
    here = tuple(share for share in shares if share.layers)
    return LayerGroup(kind, window, block_tokens, here, ratio)


def _equal_page_counts(buckets: Sequence[list[Paged]]) -> list[int]:
    """The number of groups that each bucket is split into.

    vLLM pads the smaller sorts up to a ratio of 1.5, and splits the larger ones above it.
    """
    sizes = [len(bucket[0].sort.layers) for bucket in buckets]
    size = max(sizes) if max(sizes) < min(sizes) * 1.5 else min(sizes)
    return [-(-layers // size) for layers in sizes]


def _packed_counts(buckets: Sequence[list[Paged]]) -> list[int]:
    """The number of groups of each bucket, for pages of several sizes."""
    # A bucket with equally many layers of each page size repeats a pattern.
    pages = [_by_page(bucket) for bucket in buckets]
    depth = [max(sizes.values()) for sizes in pages]
    balanced = [len(set(sizes.values())) == 1 for sizes in pages]
    whole = zip(depth, balanced, pages, strict=True)
    floor = max((d for d, even, sizes in whole if even and len(sizes) > 1), default=0)
    # 1. The largest such bucket of several sizes stays whole, and others are split to its size.
    if floor:
        repeats = _least_padding(
            [d for d, even in zip(depth, balanced, strict=True) if even], floor
        )
        return [-(-d // repeats) if even else 1 for d, even in zip(depth, balanced, strict=True)]
    # 2. There is none: windows are split so that they do not widen a row.
    sliding = [bucket[0].sort.kind is AttentionKind.SLIDING_WINDOW for bucket in buckets]
    row = max(
        sum(page if slides else page * n for page, n in sizes.items())
        for sizes, slides in zip(pages, sliding, strict=True)
    )
    return [
        -(-sum(sizes.values()) // max(1, row // bucket[0].page_nbytes)) if slides else 1
        for sizes, bucket, slides in zip(pages, buckets, sliding, strict=True)
    ]


def _by_page(bucket: list[Paged]) -> dict[int, int]:
    """The number of layers with a page of each size."""
    counts: dict[int, int] = defaultdict(int)
    for one in bucket:
        counts[one.page_nbytes] += len(one.sort.layers)
    return counts


def _least_padding(depths: Sequence[int], least: int) -> int:
    """The group depth of at least ``least`` that wastes fewest layers; of equals, the largest."""
    sizes = range(least, max(least, *depths) + 1)
    return min(sizes, key=lambda size: (sum(-depth % size for depth in depths), -size))
