"""A read into blocks that the GPU still writes is posted once the GPU is done with them."""

from __future__ import annotations

import time

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import CancelPull, ReadBlocks
from tests.fakes.pair import Pair
from tests.fakes.stream_points import Point
from tests.threads.inside import num_open
from transport import HOST
from transport.streams import stream_point

BLOCKS = (BlockList(0, (6, 7, 8)),)
HELD_S = 0.1


def read(pair: Pair, request: str, point: Point | None) -> None:
    ticket = pair.lend(f"lent-{request}")
    pair.claim(request, ticket)
    pair.puller.post_command(ReadBlocks(request, Need.for_range(0, 12, BLOCKS)), point)


def test_blocks_are_read_into_after_the_point_and_not_before() -> None:
    with Pair() as pair:
        point = Point()
        read(pair, "r", point)
        time.sleep(HELD_S)
        assert not pair.ours.bytes.any()
        assert point.num_asked > 1, "it looks again"
        point.reach()
        assert pair.outcome_of("r") is None
        assert pair.ours.row(6) == pair.theirs.row(3)


def test_the_control_without_a_point_reads_at_once() -> None:
    with Pair() as pair:
        read(pair, "r", None)
        assert pair.outcome_of("r") is None


def test_commands_keep_their_order_behind_one_that_waits() -> None:
    """Otherwise a pull would be given up first and begun then, into blocks of another."""
    with Pair() as pair:
        point = Point()
        read(pair, "r", point)
        pair.puller.post_command(CancelPull("r"))
        time.sleep(HELD_S)
        assert num_open(pair.puller), "it is claimed, and not given up"
        point.reach()
        pair.outcome_of("r")
        until = time.monotonic() + 10.0
        while num_open(pair.puller):
            assert time.monotonic() < until
            time.sleep(0.002)


def test_a_cpu_is_done_when_its_thread_goes_on() -> None:
    assert stream_point(HOST) is None
