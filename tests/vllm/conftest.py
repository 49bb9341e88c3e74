"""A prefill scheduler that lends from a block pool, by a clock that stands still."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.tools.lab.ports import free_ports
from pdconn.vllm.config import read_settings
from tests.fakes.pair import Cache

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's, for every test below
    from pdconn.vllm.lends.lending import Lending
    from tests.fakes.simulated.block_pool import CountedPool
    from transport.testing.inprocess.faults import ManualClock


@pytest.fixture
def pool() -> CountedPool:
    return CountedPool()


@pytest.fixture
def lease_s() -> float:
    return 2.5


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def lending(pool: CountedPool, lease_s: float, clock: ManualClock) -> Iterator[Lending]:
    [port] = free_ports(1)
    settings = read_settings({"kv_lease_duration": lease_s}, "127.0.0.1", port, 0)
    made = Lending(settings, "p", "boot", (1, 1), clock=clock)
    made.bind_gpu_block_pool(pool)
    geometry = RankGeometry(0, 0, b"address", Cache("BHLNC", filled=False).references)
    made.serve(Welcome.in_our_version("p", "boot", {}, (geometry,)))
    yield made
    made.shutdown()
