"""Laws of the prefill scheduler: what is lent is pinned, and unpinned exactly once."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import replace

import pytest

from pdconn.protocol.messages import PROTOCOL_VERSION, Done, Hello, Reader, encode, frame
from pdconn.protocol.ticket import parse_ticket
from pdconn.vllm.blocks.splits import Splits
from pdconn.vllm.lends.lending import Lending
from tests.vllm.lends.scheduler import Clock, Pool, request, settle


def test_lent_blocks_are_pinned_until_the_lease_ends(lending: Lending, pool: Pool) -> None:
    params = lending.lend_request(request("r"), ([0, 0, 3, 4], [7]))
    assert params is not None
    assert pool.pinned() == [3, 4, 7]
    lending.unpin_freed()
    assert pool.pinned() == [3, 4, 7]
    settle(lending, pool)
    assert pool.freed == [7, 4, 3]


@pytest.mark.parametrize("lease_s", [60.0])
def test_a_lease_that_is_given_up_is_unpinned_long_before_its_time(
    lending: Lending, pool: Pool, lease_s: float
) -> None:
    params = lending.lend_request(request("r"), ([3],))
    assert params is not None
    ticket = parse_ticket(params)
    began = time.monotonic()
    with socket.create_connection((ticket.host, ticket.port)) as reader:
        done = Done(ticket.request_id, Reader("d", 0, 1), ticket.digest())
        reader.sendall(frame(encode([Hello(PROTOCOL_VERSION, "d", ticket.incarnation), done])))
        settle(lending, pool)
    assert pool.freed == [3]
    assert time.monotonic() - began < lease_s / 2


@pytest.mark.parametrize("lease_s", [60.0])
def test_a_ticket_that_comes_back_to_its_engine_ends_its_lease_and_an_altered_one_does_not(
    lending: Lending, pool: Pool, lease_s: float
) -> None:
    """A client can write another request's name into a ticket."""
    ticket = parse_ticket(lending.lend_request(request("r"), ([3],)))
    lending.take_back_own(replace(ticket, num_tokens=ticket.num_tokens - 1))
    settle(lending, pool, seconds=0.2)
    assert pool.pinned() == [3]
    lending.take_back_own(ticket)
    settle(lending, pool, seconds=lease_s / 2)
    assert pool.freed == [3]


def test_nothing_to_lend_is_no_ticket(lending: Lending, pool: Pool) -> None:
    assert lending.lend_request(request("r"), ([0, 0], [])) is None
    assert pool.pinned() == []


def test_two_leases_on_one_block_are_two_references(lending: Lending, pool: Pool) -> None:
    lending.lend_request(request("a"), ([5],))
    lending.lend_request(request("b"), ([5],))
    assert pool.blocks[5].ref_cnt == 2
    settle(lending, pool)
    assert pool.blocks[5].ref_cnt == 0


def test_kernel_blocks_are_lent_and_the_engines_blocks_are_pinned(
    lending: Lending, pool: Pool
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
    lending: Lending, pool: Pool, name: str, caplog: pytest.LogCaptureFixture
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


def test_more_blocks_than_decode_takes_are_not_lent(lending: Lending, pool: Pool) -> None:
    assert lending.lend_request(request("r"), ([3] * 5000,)) is None
    assert pool.pinned() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("lease_s", [60.0])
def test_the_children_of_a_request_share_one_lease(
    lending: Lending, pool: Pool, order: tuple[int, ...], lease_s: float
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


@pytest.mark.parametrize("lease_s", [60.0])
def test_a_child_that_finishes_late_gets_a_lease_that_is_not_about_to_end(
    lending: Lending, clock: Clock, lease_s: float
) -> None:
    names = []
    for number, waited_s in enumerate((0.0, 0.4 * lease_s, 0.2 * lease_s)):
        clock.now += waited_s
        params = lending.lend_request(request(f"{number}_a"), ([3],))
        names.append(parse_ticket(params).request_id)
    assert names == ["0_a", "0_a", "2_a"]


def test_a_child_whose_sibling_is_not_lent_any_more_is_lent(lending: Lending, pool: Pool) -> None:
    lending.lend_request(request("0_a"), ([3],))
    settle(lending, pool)
    params = lending.lend_request(request("1_a"), ([3],))
    assert parse_ticket(params).request_id == "1_a"
