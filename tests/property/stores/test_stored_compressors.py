"""Groups as DeepSeek-V4 has them, saved by one engine and loaded by another, byte by byte.

Blocks of 256, 64, 64, 4 and 8 tokens, and tails of none, 2, 2, 1 and 0 blocks.
"""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from pdconn.protocol.ticket import BlockList
from registration.references import AttentionKind
from tests.property.oracle import Group, Layers, Side
from tests.property.stores.stored import Store, StoredCase, check
from tests.property.stores.wrong_stores import OtherTail

FULL, WINDOW = AttentionKind.FULL, AttentionKind.SLIDING_WINDOW
GROUPS = (
    Group(Layers((0, 1), FULL, None, 1, 2, ratio=4), (0, 1), 256),
    Group(Layers((2,), FULL, None, 1, 2, ratio=128), (2,), 256),
    Group(Layers((3, 4), WINDOW, 128, 1, 2), (3, 4), 64),
    Group(Layers((5,), WINDOW, 128, 1, 2), (5,), 64),
    Group(Layers((6, 7), WINDOW, 8, 1, 3, compress_ratio=4), (6, 7), 4),
    Group(Layers((8, 9), WINDOW, 128, 1, 3, compress_ratio=128), (8, 9), 8),
)
KEPT_TOKENS = {"3": 128, "4": 128, "5": 128, "6": 4, "7": 4}
"""Of windowed layers in a row; 8 and 9 are in none."""


def side(boundary: int, layout: str, tp: int, stages: int, base: int, *, loads: bool) -> Side:
    """An engine with a request of ``boundary`` tokens, in blocks of any order."""
    rng = Random(f"{layout}{tp}{loads}")
    tables, most = [], boundary // 4 + 1
    for group in GROUPS:
        count = boundary // group.block_tokens
        ids = rng.sample(range(1, count + 1), count)
        gone = group.skipped(boundary) if loads else 0
        tables.append(BlockList(0, (0,) * gone + tuple(ids[gone:])))
    split = (tuple(range(10)),) if stages == 1 else ((0, 3, 6, 8), (1, 2, 4, 5, 7, 9))
    return Side(GROUPS, layout, tp, split, most, tuple(tables), base, boundary)


def case(
    boundary: int, writer: tuple[str, int, int], reader: tuple[str, int, int], size: int = 256
) -> StoredCase:
    return StoredCase(
        size,
        side(boundary, *writer, 1 << 41, loads=False),
        side(boundary, *reader, 1 << 51, loads=True),
        0,
        boundary,
        order=7,
    )


ENGINES = (("LBHNC", 1, 1), ("BLHNC", 2, 1), ("BHLNC", 4, 1), ("LBNHC", 2, 2))


@pytest.mark.parametrize(("writer", "reader"), list(product(ENGINES, ENGINES)))
def test_what_any_engine_saved_any_other_resumes(
    writer: tuple[str, int, int], reader: tuple[str, int, int]
) -> None:
    one = case(768, writer, reader)
    wa = one.layout.wa
    assert wa is not None
    assert {layer.name: s.tokens for s in wa.sections for layer in s.layers} == KEPT_TOKENS
    store = Store(one)
    for rank in range(len(one.reader.ranks)):
        check(store, rank)


@pytest.mark.parametrize("size", [256, 512])
@pytest.mark.parametrize(("kept_4", "kept_128"), [(0, 0), (5, 0), (7, 0), (4, 1), (4, 127)])
def test_a_tail_a_block_shorter_or_longer_is_noticed(kept_4: int, kept_128: int, size: int) -> None:
    """Negative control, on each compressor by itself."""

    def kept(window: int, ratio: int, rows: int) -> int:
        return {4: kept_4, 128: kept_128}[ratio]

    one = case(1024, ENGINES[0], ENGINES[1], size)
    with pytest.raises(AssertionError, match="bytes needed" if kept_4 < 4 else "nothing needs"):
        check(OtherTail(one, kept), 0)
    check(OtherTail(one, lambda window, ratio, rows: window - ratio), 0)
