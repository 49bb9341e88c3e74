"""Laws of the prefill scheduler: what is lent is pinned, and unpinned exactly once."""

from __future__ import annotations

import logging
import socket

import pytest

from pdconn.protocol.messages import PROTOCOL_VERSION, Done, Hello, Reader, encode, frame
from pdconn.protocol.ticket import parse_ticket
from pdconn.vllm.blocks.splits import Splits
from pdconn.vllm.lends.lending import Lending
from tests.fakes.simulated.block_pool import CountedPool
from tests.vllm.lends.scheduler import request, settle


def test_nothing_to_lend_is_no_ticket(lending: Lending, pool: CountedPool) -> None:
    assert lending.lend_request(request("r"), ([0, 0], [])) is None
    assert pool.pinned() == []


def test_kernel_blocks_are_lent_and_the_engines_blocks_are_pinned(
    lending: Lending, pool: CountedPool
) -> None:
    lending.tickets.splits = Splits((2,))
    params = lending.lend_request(request("a"), ([0, 2, 0, 3],))
    assert params is not None
    assert params["remote_block_ids"] == [[4, 5, 0, 0, 6, 7]]
    assert params["pdconn"]["first_blocks"] == [2]
    assert pool.pinned() == [2, 3]
    settle(lending, pool)
    assert not pool.pinned()


# What is not lent, and what is lent once


@pytest.mark.parametrize(
    "name", ["r" * 600, "cmpl-\u200b1", "a\tb"], ids=["long", "zero width", "a tab"]
)
def test_what_decode_would_refuse_is_not_lent(
    lending: Lending, pool: CountedPool, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was lent, decode refused its ticket, and its blocks stayed pinned for a whole lease."""
    with caplog.at_level(logging.WARNING, logger="pdconn"):
        assert lending.lend_request(request(name), ([3, 4],)) is None
    assert pool.pinned() == []
    [line] = caplog.messages
    assert line.startswith("pdconn: not lent: remote_request_id: expected 1 to 512 printable")
    assert line.isprintable()
    assert len(line) < 300


def test_the_longest_name_that_decode_takes_is_lent(lending: Lending) -> None:
    params = lending.lend_request(request("r" * 512), ([3],))
    assert parse_ticket(params).request_id == "r" * 512


def test_more_blocks_than_decode_takes_are_not_lent(lending: Lending, pool: CountedPool) -> None:
    assert lending.lend_request(request("r"), ([3] * 5000,)) is None
    assert pool.pinned() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("lease_s", [60.0])
def test_the_children_of_a_request_share_one_lease(
    lending: Lending, pool: CountedPool, order: tuple[int, ...], lease_s: float
) -> None:
    """vLLM shows the ticket of the last one: n - 1 leases were pinned until they expired.

    The prompt's blocks are shared by prefix caching (3, 4), and the last one is each child's.
    """
    answers = [lending.lend_request(request(f"{n}_cmpl-x"), ([3, 4, 5 + n],)) for n in order]
    assert answers == [answers[0]] * 3
    assert len({id(answer) for answer in answers}) == 3, "vLLM adds to each answer"
    shown = parse_ticket(answers[-1])
    assert shown.request_id == f"{order[0]}_cmpl-x"
    assert pool.pinned() == [3, 4, 5 + order[0]]
    with socket.create_connection((shown.host, shown.port)) as reader:
        done = Done(shown.request_id, Reader("d", 0, 1), shown.digest())
        reader.sendall(frame(encode([Hello(PROTOCOL_VERSION, "d", shown.incarnation), done])))
        settle(lending, pool)
    assert pool.pinned() == []
    assert lending._lent.num_shared == 0


def test_children_of_several_requests_share_nothing(lending: Lending) -> None:
    children = [request("0_a"), request("0_b"), request("1_a", prompt=(7, 8)), request("c")]
    answers = [lending.lend_request(child, ([3],)) for child in children]
    lent = [parse_ticket(params).request_id for params in answers]
    assert lent == ["0_a", "0_b", "1_a", "c"]
