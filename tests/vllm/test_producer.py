"""Laws of the prefill scheduler: what is lent is pinned, and unpinned exactly once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.lab.ports import free_ports
from pdconn.protocol.framing import frame
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Done,
    Hello,
    RankGeometry,
    Reader,
    Welcome,
    encode,
)
from pdconn.protocol.ticket import parse_ticket
from pdconn.vllm.config import read_settings
from pdconn.vllm.producer import ProducerScheduler
from tests.fakes.pair import Cache


class Block:
    def __init__(self, number: int) -> None:
        self.block_id, self.ref_cnt = number, 0


class Pool:
    """vLLM's block pool, as far as pinning goes."""

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(16)]
        self.freed: list[int] = []

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            self.freed.append(block.block_id)

    def pinned(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.ref_cnt]


def request(name: str) -> Any:
    return SimpleNamespace(
        request_id=name, prompt_token_ids=[1, 2, 3], num_computed_tokens=3, mm_features=[]
    )


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def lease_s() -> float:
    return 2.5


@pytest.fixture
def lending(pool: Pool, lease_s: float) -> Iterator[ProducerScheduler]:
    [port] = free_ports(1)
    settings = read_settings({"kv_lease_duration": lease_s}, "127.0.0.1", port, 0)
    made = ProducerScheduler(settings, "p", "boot", (1, 1))
    made.bind(pool)
    geometry = RankGeometry(0, 0, b"address", Cache("BHLNC", filled=False).references)
    made.serve(Welcome.of("p", "boot", {}, (geometry,)))
    yield made
    made.close()


def settle(lending: ProducerScheduler, pool: Pool, seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while pool.pinned() and time.monotonic() < give_up:
        lending.unpin_freed()
        time.sleep(0.01)


def test_lent_blocks_are_pinned_until_the_lease_ends(
    lending: ProducerScheduler, pool: Pool
) -> None:
    params = lending.lend(request("r"), ([0, 0, 3, 4], [7]))
    assert params is not None
    assert pool.pinned() == [3, 4, 7]
    lending.unpin_freed()
    assert pool.pinned() == [3, 4, 7]
    settle(lending, pool)
    assert pool.freed == [7, 4, 3]


@pytest.mark.parametrize("lease_s", [60.0])
def test_a_lease_that_is_given_up_is_unpinned_long_before_its_time(
    lending: ProducerScheduler, pool: Pool, lease_s: float
) -> None:
    params = lending.lend(request("r"), ([3],))
    assert params is not None
    ticket = parse_ticket(params)
    began = time.monotonic()
    with socket.create_connection((ticket.host, ticket.port)) as reader:
        done = Done(ticket.request_id, Reader("d", 0, 1), ticket.digest(), ok=True)
        reader.sendall(frame(encode([Hello(PROTOCOL_VERSION, "d", ticket.incarnation), done])))
        settle(lending, pool)
    assert pool.freed == [3]
    assert time.monotonic() - began < lease_s / 2


def test_nothing_to_lend_is_no_ticket(lending: ProducerScheduler, pool: Pool) -> None:
    assert lending.lend(request("r"), ([0, 0], [])) is None
    assert pool.pinned() == []


def test_two_leases_on_one_block_are_two_references(lending: ProducerScheduler, pool: Pool) -> None:
    lending.lend(request("a"), ([5],))
    lending.lend(request("b"), ([5],))
    assert pool.blocks[5].ref_cnt == 2
    settle(lending, pool)
    assert pool.blocks[5].ref_cnt == 0
