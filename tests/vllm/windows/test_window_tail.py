"""A window group hits only if the whole tail of its window is lent.

A block of 4 tokens, a prompt of 12, a window of 6: position 12 attends to token 7 and on::

    token            0        4        8        12
    full attention   [  3   ] [  4   ] [  5   ]        all of it is needed
    window of 6      [ hole ] [  6   ] [  2   ]        the last two blocks are
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import ReadBlocks
from registration.references import AttentionKind
from tests.fakes.pair import Cache, Pair
from tests.threads.inside import num_open
from transport.testing.inprocess.faults import ReadRequest

WINDOW = 6
FULL = BlockList(0, (3, 4, 5))
NEED = Need.for_range(0, 12, (BlockList(0, (7, 8, 9)), BlockList(1, (10, 11))))


class Hybrid(Cache):
    """One group of full attention and one of windows, in blocks of one pool."""

    def _kinds(self, groups: int) -> Sequence[tuple[AttentionKind, int | None]]:
        assert groups == 2
        return (AttentionKind.FULL, None), (AttentionKind.SLIDING_WINDOW, WINDOW)


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr("tests.fakes.pair.Cache", Hybrid)
    return Pair(groups=2, their_groups=2)


def pull(pair: Pair, window: BlockList) -> tuple[str | None, int]:
    """Pull with ``window`` lent by the window group; the outcome, and how many reads there were."""
    reads: list[ReadRequest] = []
    pair.network.script = reads.append
    pair.claim("d", pair.lend_blocks("r", (FULL, window)))
    pair.puller.post_command(ReadBlocks("d", NEED))
    return pair.outcome_of("d"), len(reads)


@pytest.mark.parametrize(
    ("window", "missing"),
    [
        (BlockList(0, (1, 0, 2)), 4),
        (BlockList(2, (2,)), 4),
        (BlockList(0, (1, 6, 0)), 8),
        (BlockList(0, (1, 6)), 8),
        (BlockList(3, ()), 4),
    ],
    ids=["hole in it", "begins late", "hole at its end", "ends early", "nothing of it"],
)
def test_a_window_whose_tail_is_not_lent_fails_the_pull_before_anything_is_read(
    hybrid: Pair, window: BlockList, missing: int
) -> None:
    with hybrid as pair:
        why, num_reads = pull(pair, window)
        message = f"MissingBlock: group 1: tokens from {missing} on are needed and not lent"
        assert why == message
        assert num_reads == 0
        assert not pair.ours.bytes.any()
        assert pair.received == []
        assert pair.freed() == "read"
        assert num_open(pair.puller) == 0


@pytest.mark.parametrize(
    "window",
    [BlockList(0, (0, 6, 2)), BlockList(1, (6, 2)), BlockList(0, (1, 6, 2))],
    ids=["hole before it", "begins with it", "whole prompt"],
)
def test_a_hole_before_the_window_is_harmless(hybrid: Pair, window: BlockList) -> None:
    """Control: the same groups, and the same hole one block earlier."""
    with hybrid as pair:
        assert pull(pair, window) == (None, 1)
        for here, there in ((7, 3), (8, 4), (9, 5), (10, 6), (11, 2)):
            assert pair.ours.row(here) == pair.theirs.row(there)
        assert not any(pair.ours.row(12))
