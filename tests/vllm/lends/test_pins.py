"""What is lent is bounded, and gives way to requests that could not be admitted (law 16)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pdconn.vllm.lends.lending import Lending
from pdconn.vllm.lends.pins import LeaseKind, LeasePins, LentShare
from pdconn.vllm.lends.prompts import PromptShare
from tests.fakes.simulated.block_pool import CountedPool
from tests.fakes.simulated.hooks import finished
from tests.vllm.lends.scheduler import settle
from tests.vllm.lends.test_prefixes import PROMPT, asking, got, request
from transport.testing.inprocess.faults import ManualClock

HELD = 16


def borrow(lending: Lending, name: str, *blocks: int) -> dict[str, Any] | None:
    """Ask for a prefix that is held in these blocks, and leave it at that."""
    asked = asking(PROMPT[: HELD + 1], HELD, name=name)
    lending.on_new_request(asked)
    assert lending.prefixes.note_hit(asked, HELD)
    got(lending, asked, (list(blocks),))
    told = lending.lend_request(asked, (list(blocks),))
    finished(lending, asked)
    return told


def hand_over(lending: Lending, name: str, *blocks: int) -> None:
    """Lend a whole prompt."""
    asked = request(PROMPT, {"do_remote_decode": True}, name=name)
    assert lending.lend_request(asked, (list(blocks),)) is not None


def test_of_forty_prefixes_that_are_asked_for_and_left_few_stay_lent(
    lending: Lending, pool: CountedPool
) -> None:
    for number in range(40):
        assert borrow(lending, f"p{number}", 1 + number % 15) is not None
    settle_down(lending)
    assert lending.pins.count_leases(LeaseKind.PREFIX) == len(pool.pinned()) == 8, (
        "half of 16 blocks"
    )


def test_prefixes_are_few_however_short(pool: CountedPool) -> None:
    pins = LeasePins({LeaseKind.PREFIX: LentShare(0.5, 3)})
    pins.bind_gpu_block_pool(pool)
    ended = [pins.pin(f"p{number}", [[1]], LeaseKind.PREFIX, 0.0) for number in range(5)]
    assert ended == [[], [], [], ["p0"], ["p1"]]
    assert pins.num_blocks == 1


def test_a_prefix_above_the_share_is_not_lent(lending: Lending, pool: CountedPool) -> None:
    told = borrow(lending, "p", *range(1, 10))
    assert told == {"pdconn": {"lend": HELD, "held": 0}}
    assert pool.pinned() == []


def test_prompts_have_no_share_and_stay(lending: Lending, pool: CountedPool) -> None:
    """They are computed because decode asks; readers may be many, and slow."""
    for number in range(15):
        hand_over(lending, f"r{number}", 1 + number)
    settle_down(lending)
    assert len(pool.pinned()) == 15


def test_what_was_lent_first_gives_way_to_a_request_that_is_not_admitted(
    lending: Lending, pool: CountedPool
) -> None:
    for number in range(4):
        borrow(lending, f"p{number}", 2 * number + 1, 2 * number + 2)
    hand_over(lending, "r", 15)
    lending.make_room(3)
    settle_down(lending)
    assert pool.pinned() == [5, 6, 7, 8, 15]


def test_a_prompt_that_nobody_claims_gives_way_in_the_end(
    lending: Lending, pool: CountedPool, clock: ManualClock, lease_s: float
) -> None:
    hand_over(lending, "r", 1, 2)
    lending.make_room(1)
    settle_down(lending)
    assert pool.pinned() == [1, 2], "its reader may be on the way"
    clock.advance(lease_s / 2)
    hand_over(lending, "later", 3)
    lending.make_room(1)
    settle(lending, pool, 1.0)
    assert pool.pinned() == [3]


def settle_down(lending: Lending) -> None:
    """Until the lender's thread has done what it was asked for."""

    for _ in range(30):
        lending.unpin_freed()
        time.sleep(0.01)


# Prompts that are held back, where an engine decodes, too


def may_begin(share: PromptShare, name: str, num_blocks: int, num_lent: int = 0) -> bool:
    may = share.may_begin_prompt(name, num_blocks, num_lent=num_lent, num_gpu_blocks=100)
    if may:
        share.begin_prompt(name, num_blocks)
    return may


def test_prompts_begin_within_the_share_and_in_their_order() -> None:
    share = PromptShare(0.5)
    assert may_begin(share, "a", 30)
    assert not may_begin(share, "long", 40)
    assert not may_begin(share, "short", 5), "it came later"
    share.end_prompt("a")
    assert not may_begin(share, "long", 40, num_lent=30)
    assert may_begin(share, "long", 40, num_lent=10)
    assert not may_begin(share, "short", 5, num_lent=10)
    assert may_begin(share, "short", 5, num_lent=0)
    for name in ("long", "short"):
        share.end_prompt(name)
    assert len(share) == 0


@pytest.mark.parametrize("num_lent", [0, 1])
def test_a_prompt_above_the_share_begins_when_nothing_else_is_lent(num_lent: int) -> None:
    assert may_begin(PromptShare(0.5), "a", 90, num_lent) == (num_lent == 0)


def test_one_that_was_preempted_goes_on_and_one_that_left_holds_up_nobody() -> None:
    share = PromptShare(0.5)
    assert may_begin(share, "a", 50)
    assert not may_begin(share, "left", 50)
    assert may_begin(share, "a", 50, num_lent=99)
    share.end_prompt("left")
    share.end_prompt("a")
    assert may_begin(share, "b", 50)
