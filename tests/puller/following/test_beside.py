"""A request that is followed, and of which a store has the beginning."""

from __future__ import annotations

import pytest

from pdconn.lifecycle.pull import PullState
from pdconn.planning import cover
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import EndBeside
from pdconn.puller.reads import Read
from tests.fakes.pair import BLOCK_TOKENS, NUM_BLOCKS
from tests.puller.following.test_failed_increments import Following

BLOCKS = (7, 8, 9)
STORED = Need((range(BLOCK_TOKENS),), (BlockList(0, BLOCKS),))
"""The store has the first of three blocks."""


def blocks_of(following: Following, reads: list[Read]) -> list[int]:
    """Blocks of ours that are read, in order."""
    [entry] = following.pulls._entries.values()
    assert entry.peer.pairing is not None
    [tensor] = entry.peer.pairing.ours.tensors
    base, size = tensor.base, tensor.nbytes // NUM_BLOCKS
    starts = [at for read in reads for at in read.spans.local.tolist()]
    return sorted({(at - base) // size for at in starts})


@pytest.mark.parametrize("ends", ["announced", "complete", "settled"])
@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "lost"])
def test_each_block_is_read_once_unless_the_store_has_loaded_it(ends: str, is_loaded: bool) -> None:
    """What it has lost is read once the request is complete, if not before."""
    following = Following(STORED)
    end = EndBeside("d", STORED if is_loaded else cover.NOTHING)
    if ends == "announced":
        following.pulls.apply_command(end)
        assert following.machine.state is PullState.FOLLOWING
    following.complete()
    if ends == "complete":
        following.pulls.apply_command(end)
    settled = 0
    while settled < len(following.reads):
        following.settle(settled)
        settled += 1
    if ends == "settled":
        assert following.machine.state is PullState.READING, "the store still writes"
        following.pulls.apply_command(end)
        while settled < len(following.reads):
            following.settle(settled)
            settled += 1
    assert following.machine.state is PullState.CONFIRMING
    assert blocks_of(following, following.reads) == list(BLOCKS[1:] if is_loaded else BLOCKS)
    runs = sum(len(read.spans) for read in following.reads)
    assert runs == len(BLOCKS[1:] if is_loaded else BLOCKS), "a block is read twice"
