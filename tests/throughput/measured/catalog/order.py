"""Every benchmark, in the order in which they run; one that is not listed here does not exist."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.throughput.measured.catalog import (
    handovers,
    interference,
    one_process,
    router,
    sessions,
    stores,
    transfers,
)
from tests.throughput.measured.catalog.entry import Benchmark

_LIST = (
    one_process.PLANNING,
    one_process.CHECKSUMS,
    one_process.ENCRYPTION,
    transfers.WATERFALL,
    interference.LENDER_LOAD,
    transfers.TRANSFER,
    transfers.MOONCAKE,
    transfers.WARM,
    handovers.FIRST_REQUEST,
    transfers.TCP_PROGRESS,
    transfers.UCX_BACKEND,
    interference.ENGINE_THREAD,
    interference.PULL_COST,
    interference.ITL,
    interference.ITL_LENDING,
    handovers.SERVE,
    handovers.SERVE_STREAMS,
    router.ROUTING,
    router.INDEX,
    router.ROLES,
    router.PROXY_COST,
    router.PROXY_CPU,
    router.TRACE,
    router.LINKS,
    router.MOONCAKE_TRACE,
    router.REAL_TRACE,
    sessions.AGENTS,
    sessions.AGENTS_SIMULATED,
    handovers.DEMO,
    handovers.VERIFY,
    handovers.HANDOVER,
    handovers.FOLLOWED,
    handovers.HANDOVER_RESERVED,
    stores.SAVES_BESIDE_PULLS,
    stores.COMPRESSION,
    stores.COMPRESSED,
)

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({each.name: each for each in _LIST})
