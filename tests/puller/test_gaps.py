"""Law 13 through a puller: what lies behind and before what it reads in a block is zero.

A GPU's memory holds what was there before, which may be NaN in another precision: so here all of
decode's memory is 0xFF at first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from pdconn.planning.plan import NO_GAPS, Need, Pairing
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import ReadBlocks
from registration.references import AttentionKind
from tests.fakes.pair import NUM_BLOCKS, Cache, Pair
from tests.threads.inside import num_open

NUM_TOKENS = 100
OURS, THEIRS = 64, 16
WINDOW = 60
THEIR_IDS = (1, 2, 3, 4, 5, 6, 7)
STALE = 0xFF


class Hybrid(Cache):
    """Full attention, and a window, each with blocks of its own."""

    def _kinds(self, groups: int) -> Sequence[tuple[AttentionKind, int | None]]:
        assert groups == 2
        return (AttentionKind.FULL, None), (AttentionKind.SLIDING_WINDOW, WINDOW)


@pytest.fixture(params=["BHLNC", "LBNHC", "LBHNC"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with mock.patch("tests.fakes.pair.Cache", Hybrid):
        made = Pair(
            layout=request.param,
            groups=2,
            their_groups=2,
            block_tokens=OURS,
            their_block_tokens=THEIRS,
        )
    made.ours.bytes[:] = STALE
    with made:
        yield made


def pull(pair: Pair, need: Need) -> None:
    """All tokens are lent of full attention, and the window of the last ones."""
    lent = BlockList(0, THEIR_IDS), BlockList(2, (8, 9, 10, 11, 12))
    pair.claim("r", pair.lend_blocks("r", lent))
    pair.puller.post_command(ReadBlocks("r", need))
    assert pair.outcome_of("r") is None


def rows(pair: Pair, group: int, block: int) -> NDArray[np.uint8]:
    """A block's bytes by token: every layer and head of a group."""
    references = pair.ours.references
    base = pair.ours.bytes.ctypes.data
    found = []
    for ref in references.groups[group].data:
        tensor = references.tensors[ref.tensor]
        at = tensor.base - base + ref.offset + block * tensor.block_stride
        for head in range(ref.num_heads):
            start = at + head * ref.head_stride
            stride = ref.token_stride or 0
            tokens = [pair.ours.bytes[start + n * stride :][:8] for n in range(OURS)]
            found.append(np.stack(tokens))
    return np.concatenate(found, axis=1)


NEED = Need.for_range(0, NUM_TOKENS, (BlockList(0, (3, 5)), BlockList(0, (6, 2))))
"""The window of token 100 begins with token 41; their blocks of 16 are read from 32 to 111."""


def test_a_pull_leaves_no_stale_byte_in_a_block(pair: Pair) -> None:
    pull(pair, NEED)
    first, last = rows(pair, 0, 3), rows(pair, 0, 5)
    assert (first != STALE).all()
    assert first.any(axis=1).all()
    assert last[: 112 - OURS].any(axis=1).all()
    assert not last[112 - OURS :].any()
    begins, ends = rows(pair, 1, 6), rows(pair, 1, 2)
    assert not begins[:32].any()
    assert begins[32:].any(axis=1).all()
    assert ends[: 112 - OURS].any(axis=1).all()
    assert not ends[112 - OURS :].any()


def test_no_byte_of_another_block_is_zeroed(pair: Pair) -> None:
    pull(pair, NEED)
    for group, ours in enumerate(({3, 5}, {6, 2})):
        for block in set(range(NUM_BLOCKS)) - {2, 3, 5, 6}:
            assert (rows(pair, group, block) == STALE).all()
        # Blocks of both groups lie in one allocation, so each byte is that of a block of one.
        assert not any((rows(pair, group, block) == STALE).all() for block in ours)


def test_a_block_that_is_held_stays_as_it_is(pair: Pair) -> None:
    """A prefix: the first block is another request's, too, and only the second is filled."""
    pull(pair, Need.for_range(OURS, NUM_TOKENS, NEED.blocks))
    for group, held in ((0, 3), (1, 6)):
        assert (rows(pair, group, held) == STALE).all()
    assert not rows(pair, 0, 5)[112 - OURS :].any()
    assert not rows(pair, 1, 2)[112 - OURS :].any()


def test_without_it_stale_bytes_are_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the planner finds no gaps, and what lies behind is what was there."""
    monkeypatch.setattr(Pairing, "gaps", lambda self, need: NO_GAPS)
    pull(pair, NEED)
    assert (rows(pair, 0, 5)[112 - OURS :] == STALE).all()
    assert (rows(pair, 1, 6)[:32] == STALE).all()


def test_a_pull_fails_whose_gaps_cannot_be_zeroed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(gaps: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("pdconn.puller.reads.fill_with_zeros", out_of_memory)
    lent = BlockList(0, THEIR_IDS), BlockList(2, (8, 9, 10, 11, 12))
    pair.claim("r", pair.lend_blocks("r", lent))
    pair.puller.post_command(ReadBlocks("r", NEED))
    assert "CUDA out of memory" in (pair.outcome_of("r") or "")
    assert num_open(pair.puller) == 0
