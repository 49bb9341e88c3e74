"""What a plan is refused for, in full words.  What it moves is in ``tests/property``."""

from __future__ import annotations

import pytest

from pdconn.planning.plan import Need, Pairing
from pdconn.planning.planning_errors import BlockOutOfRange, MissingBlock, PlanningError
from pdconn.protocol.ticket import BlockList
from tests.fakes.pair import NUM_BLOCKS, Cache

GOOD = (BlockList(0, (3, 4, 5)),)
AT = NUM_BLOCKS - 1


@pytest.fixture(scope="module")
def pairing() -> Pairing:
    """One group of blocks of four tokens on both sides."""
    ours, theirs = (Cache("BHLNC", filled=False).references for _ in range(2))
    return Pairing.between(ours, [theirs])


@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "message"),
    [
        ((), GOOD, PlanningError, "our block lists: expected 1, one per group, got 0"),
        (GOOD * 3, GOOD, PlanningError, "our block lists: expected 1, one per group, got 3"),
        (GOOD, GOOD * 2, PlanningError, "lent block lists: expected 1, one per group, got 2"),
        (
            (BlockList(0, (3, 0, 5)),), GOOD,
            MissingBlock, "group 0: tokens from 4 on have no block of ours",
        ),
        (
            (BlockList(0, (3, 4)),), GOOD,
            MissingBlock, "group 0: tokens from 8 on have no block of ours",
        ),
        (
            GOOD, (BlockList(1, (4, 5)),),
            MissingBlock, "group 0: tokens from 0 on are needed and not lent",
        ),
        (
            (BlockList(0, (3, AT + 1, 5)),), GOOD,
            BlockOutOfRange, "group 0: block id, ours 16 of 16 blocks",
        ),
        (
            GOOD, (BlockList(0, (AT + 2, 4, AT + 7)),),
            BlockOutOfRange, "group 0: block id, theirs 22 of 16 blocks",
        ),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(
    pairing: Pairing,
    ours: tuple[BlockList, ...],
    theirs: tuple[BlockList, ...],
    kind: type[PlanningError],
    message: str,
) -> None:
    with pytest.raises(PlanningError) as refused:
        pairing.plan(Need.for_range(0, 12, ours), theirs)
    assert type(refused.value) is kind
    assert str(refused.value) == message


@pytest.mark.parametrize("last", [(BlockList(0, (3, 4, AT)),), GOOD])
def test_the_last_block_is_in_range_and_what_is_not_needed_is_not_looked_at(
    pairing: Pairing, last: tuple[BlockList, ...]
) -> None:
    """Control: the same lists, one id lower, or with the bad id behind what is wanted."""
    [only] = last
    assert pairing.plan(Need.for_range(0, 12, last), last).num_runs > 0
    behind = (BlockList(0, (*only.ids, AT + 1)),)
    assert pairing.plan(Need.for_range(0, 12, last), behind).num_runs > 0
